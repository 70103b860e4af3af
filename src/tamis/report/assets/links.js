// Links between two columns of tokens: queries on the left, keys on the right, a line for each weight that is not zero.
// Several heads lie over one another, each in its colour, and can be switched on and off.

const MOST_LINKS = 30000;
const LEVELS = 12;
const FADED = 0.12;
// What is shown beside the chosen head, and the least share of a row that is drawn; null: as the head asks for.
const overlay = { heads: new Set(), least: null, of: '' };

// Heads that are drawn, the chosen one first.
const drawnHeads = (view) => [view.head, ...[...overlay.heads].filter((head) => head !== view.head && head < view.weights.heads)];
const colourOfHead = (head, colours) => colours.runs[head % colours.runs.length];

// The least share that is drawn: all of a head that keeps few keys, what stands out of a dense one.
function leastShare(view) {
  if (overlay.least !== null) return overlay.least;
  const rows = view.weights.queries;
  const kept = view.weights.start[(view.head + 1) * rows] - view.weights.start[view.head * rows];
  return kept / Math.max(1, rows) > 8 ? 0.1 : 0;
}

function linksView(view, width) {
  if (overlay.of !== view.site) Object.assign(overlay, { heads: new Set(), least: null, of: view.site });
  const most = Math.max(view.queries.length, view.keys.length);
  const step = most <= 48 ? 22 : most <= 120 ? 14 : Math.max(2, Math.floor(1400 / most));
  const font = `600 13px ${FONT}`;
  const room = Math.min(170, width * 0.3);
  const [left, right] = [view.queries, view.keys].map((tokens) => Math.max(30, Math.min(room, widest(tokens, font))) + 8);
  const size = { width: Math.min(width, left + right + 380), height: Math.min(8000, most * step) + 30, left, step, top: 24 };
  size.right = size.width - right;
  size.keyTop = size.top + ((most - view.keys.length) * step) / 2;
  size.queryTop = size.top + ((most - view.queries.length) * step) / 2;
  const [canvas, context] = sharp(size.width, size.height, { role: 'img', 'aria-label': describe(view) });
  const [over, marks] = sharp(size.width, size.height, { class: 'over' });
  const note = el('p', { class: 'note' });
  const draw = () => (note.textContent = drawLinks(context, view, size, theme.colours));
  const at = ({ offsetX, offsetY }) => {
    const onLeft = offsetX < size.width / 2;
    const row = Math.floor((offsetY - (onLeft ? size.queryTop : size.keyTop)) / step);
    return onLeft && row >= 0 && row < view.queries.length ? row : null;
  };
  const mark = (row = null) => {
    // What is not pointed at fades.
    canvas.style.opacity = row === null ? '' : FADED;
    drawRowLinks(marks, view, size, row ?? chosenRow(view), theme.colours);
  };
  over.addEventListener('pointermove', (event) => {
    const row = at(event);
    mark(row);
    follow(row);
    if (row === null) tip.hide();
    else tip.show(rowText(view, row), event.clientX, event.clientY);
  });
  over.addEventListener('pointerleave', () => (tip.hide(), mark(), follow(null)));
  over.addEventListener('click', (event) => at(event) !== null && go({ row: at(event) }));
  draw();
  mark();
  const again = () => (draw(), mark());
  return {
    element: el('div', {}, linkControls(view, again), el('div', { class: 'stack' }, canvas, over), note),
    mark: () => mark(),
    layers: [canvas, over],
  };
}

// A switch for each head in its colour, and the least share.
function linkControls(view, again) {
  const heads = Array.from({ length: view.weights.heads }, (_, head) => {
    const chosen = head === view.head;
    const box = el('span', { class: 'swatch', 'aria-hidden': true });
    box.style.background = colourOfHead(head, theme.colours);
    const made = button([box, String(head)], () => {
      overlay.heads[overlay.heads.has(head) ? 'delete' : 'add'](head);
      made.setAttribute('aria-pressed', String(overlay.heads.has(head)));
      again();
    }, { 'aria-pressed': String(chosen || overlay.heads.has(head)), disabled: chosen, 'data-overlay': head, 'aria-label': `draw head ${head} too` });
    return made;
  });
  const shown = el('output', { class: 'soft' }, percent(leastShare(view), 0));
  const slider = el('input', {
    type: 'range', min: 0, max: 50, step: 1, 'aria-label': 'least share of a row that is drawn, in percent',
    oninput: () => {
      overlay.least = Number(slider.value) / 100;
      shown.textContent = percent(overlay.least, 0);
      again();
    },
  });
  slider.value = 100 * leastShare(view);
  return el(
    'div',
    { class: 'controls small' },
    el('div', { class: 'choice' }, el('span', { class: 'soft' }, 'heads drawn'), el('div', { class: 'chips', role: 'group', 'aria-label': 'heads drawn' }, heads)),
    el('label', { class: 'choice' }, el('span', { class: 'soft' }, 'links from'), slider, shown),
  );
}

const ends = (size, query, key) => [
  [size.left + 6, size.queryTop + (query + 0.5) * size.step],
  [size.right - 6, size.keyTop + (key + 0.5) * size.step],
];

// All links above the least share; those of like weight are one path, which is many times faster.  Says what is left out.
function drawLinks(context, view, size, colours) {
  context.clearRect(0, 0, size.width, size.height);
  const least = leastShare(view);
  let [drawn, hidden] = [0, 0];
  for (const head of drawnHeads(view)) {
    const paths = Array.from({ length: LEVELS }, () => new Path2D());
    for (let query = 0; query < view.queries.length; query++) {
      for (const { key, share } of rowOf(view.weights, head, query)) {
        if (share < least || drawn >= MOST_LINKS) {
          hidden += 1;
          continue;
        }
        drawn += 1;
        const [from, to] = ends(size, query, key);
        const line = paths[Math.min(LEVELS - 1, Math.floor(rampPlace(share) * LEVELS))];
        line.moveTo(...from);
        line.lineTo(...to);
      }
    }
    context.strokeStyle = colourOfHead(head, colours);
    paths.forEach((line, level) => {
      context.globalAlpha = 0.1 + (0.55 * (level + 1)) / LEVELS;
      context.lineWidth = 0.6 + (2 * (level + 1)) / LEVELS;
      context.stroke(line);
    });
  }
  context.globalAlpha = 1;
  return hidden ? `${whole(drawn)} links are drawn; ${whole(hidden)} weaker ones are not: move \u201clinks from\u201d to see them.` : '';
}

// The links of one word, strong, and all labels.
function drawRowLinks(context, view, size, row, colours) {
  context.clearRect(0, 0, size.width, size.height);
  const looked = new Map();
  for (const head of drawnHeads(view)) {
    for (const { key, share } of rowOf(view.weights, head, row)) {
      looked.set(key, Math.max(share, looked.get(key) ?? 0));
      context.strokeStyle = drawnHeads(view).length > 1 ? colourOfHead(head, colours) : colours.mark;
      context.globalAlpha = 0.25 + 0.75 * rampPlace(share);
      context.lineWidth = 0.8 + 4 * rampPlace(share);
      context.beginPath();
      const [from, to] = ends(size, row, key);
      context.moveTo(...from);
      context.lineTo(...to);
      context.stroke();
    }
  }
  context.globalAlpha = 1;
  context.textBaseline = 'middle';
  context.font = `11px ${FONT}`;
  context.fillStyle = colours.soft;
  context.textAlign = 'right';
  context.fillText('from', size.left, 10);
  context.textAlign = 'left';
  context.fillText('to', size.right, 10);
  // Every so many labels where there is no room for all, but always those that are looked at.
  const thin = Math.max(1, Math.ceil(11 / size.step));
  const write = (token, place, x, y, align, strong) => {
    if (place % thin && !strong) return;
    context.font = `${strong ? '600 ' : ''}${size.step < 14 ? 11 : 13}px ${FONT}`;
    context.textAlign = align;
    const text = shortened(context, token, align === 'right' ? size.left - 4 : size.width - size.right);
    if (strong && thin > 1) {
      context.fillStyle = colours.page;
      const room = context.measureText(text).width;
      context.fillRect(align === 'right' ? x - room - 1 : x - 1, y - 7, room + 2, 14);
    }
    context.fillStyle = strong ? colours.mark : colours.ink;
    context.fillText(text, x, y);
  };
  const queryAt = (query) => size.queryTop + (query + 0.5) * size.step;
  const keyAt = (key) => size.keyTop + (key + 0.5) * size.step;
  view.queries.forEach((token, query) => query !== row && write(token, query, size.left, queryAt(query), 'right', false));
  const strong = new Set([...looked].filter(([, share]) => share > 0.05).map(([key]) => key));
  view.keys.forEach((token, key) => strong.has(key) || write(token, key, size.right, keyAt(key), 'left', false));
  write(view.queries[row], row, size.left, queryAt(row), 'right', true);
  for (const key of strong) write(view.keys[key], key, size.right, keyAt(key), 'left', true);
}

// The largest weights of a row, in words.
function rowText(view, row) {
  const found = rowOf(view.weights, view.head, row).sort((a, b) => b.share - a.share);
  const lines = found.slice(0, 8).map(({ key, weight }) => `${weightText(weight)}  ${view.keys[key]}`);
  const rest = found.length > 8 ? [`and ${found.length - 8} more`] : [];
  return [view.queries[row], ...(found.length ? lines : ['attends to nothing']), ...rest];
}
