// Links between two columns of tokens: queries on the left, keys on the right, a line for each weight that is not zero.

const MOST_LINKS = 30000;
const CLEAR_LINKS = 1000;
const LEVELS = 12;

function linksView(view, width) {
  const { colours } = theme;
  const most = Math.max(view.queries.length, view.keys.length);
  const step = most <= 48 ? 22 : most <= 120 ? 14 : Math.max(2, Math.floor(1400 / most));
  const font = `600 13px ${FONT}`;
  const room = Math.min(170, width * 0.3);
  const [left, right] = [view.queries, view.keys].map(
    (tokens) => Math.max(30, Math.min(room, widest(tokens, font))) + 8,
  );
  const size = { width: Math.min(width, left + right + 380), height: most * step + 30, left, step, top: 24 };
  size.right = size.width - right;
  size.keyTop = size.top + ((most - view.keys.length) * step) / 2;
  size.queryTop = size.top + ((most - view.queries.length) * step) / 2;
  const [canvas, context] = sharp(size.width, size.height, { role: 'img', 'aria-label': describe(view) });
  const rows = view.weights.queries;
  const count = view.weights.start[(view.head + 1) * rows] - view.weights.start[view.head * rows];
  const all = count <= MOST_LINKS;
  if (all) drawLinks(context, view, size, count, colours);
  const [over, marks] = sharp(size.width, size.height, { class: 'over' });
  const at = ({ offsetX, offsetY }) => {
    const left = offsetX < size.width / 2;
    const row = Math.floor((offsetY - (left ? size.queryTop : size.keyTop)) / step);
    return left && row >= 0 && row < view.queries.length ? row : null;
  };
  const mark = (row = state.row) => drawRowLinks(marks, view, size, row, colours);
  over.addEventListener('pointermove', (event) => {
    const row = at(event);
    mark(row ?? state.row);
    if (row === null) tip.hide();
    else tip.show(rowText(view, row), event.clientX, event.clientY);
  });
  over.addEventListener('pointerleave', () => (tip.hide(), mark()));
  over.addEventListener('click', (event) => at(event) !== null && go({ row: at(event) }));
  mark();
  const note = all
    ? null
    : el(
        'p',
        { class: 'note' },
        `${whole(count)} links are too many to tell apart: those of the chosen word are drawn.`,
      );
  return {
    element: el('div', {}, el('div', { class: 'stack' }, canvas, over), note),
    mark: () => mark(),
    layers: [canvas, over],
  };
}

const ends = (size, query, key) => [
  [size.left + 6, size.queryTop + (query + 0.5) * size.step],
  [size.right - 6, size.keyTop + (key + 0.5) * size.step],
];

// All links, the fainter the more there are; those of like weight are one path, which is many times faster.
function drawLinks(context, view, size, count, colours) {
  const faint = Math.min(1, Math.max(0.1, CLEAR_LINKS / count));
  const paths = Array.from({ length: LEVELS }, () => new Path2D());
  for (let query = 0; query < view.queries.length; query++) {
    for (const { key, share } of rowOf(view.weights, view.head, query)) {
      const [from, to] = ends(size, query, key);
      const line = paths[Math.min(LEVELS - 1, Math.floor(rampPlace(share) * LEVELS))];
      line.moveTo(...from);
      line.lineTo(...to);
    }
  }
  context.strokeStyle = colours.runs[0];
  paths.forEach((line, level) => {
    context.globalAlpha = faint * (0.06 + (0.4 * (level + 1)) / LEVELS);
    context.lineWidth = 0.6 + (1.6 * (level + 1)) / LEVELS;
    context.stroke(line);
  });
}

// The links of one word, strong, and all labels.
function drawRowLinks(context, view, size, row, colours) {
  context.clearRect(0, 0, size.width, size.height);
  const found = new Map(rowOf(view.weights, view.head, row).map((entry) => [entry.key, entry]));
  context.strokeStyle = colours.mark;
  for (const { key, share } of found.values()) {
    const [from, to] = ends(size, row, key);
    context.globalAlpha = 0.25 + 0.75 * rampPlace(share);
    context.lineWidth = 0.8 + 4 * rampPlace(share);
    context.beginPath();
    context.moveTo(...from);
    context.lineTo(...to);
    context.stroke();
  }
  context.globalAlpha = 1;
  context.textBaseline = 'middle';
  context.font = `11px ${FONT}`;
  context.fillStyle = colours.soft;
  context.textAlign = 'right';
  context.fillText('from', size.left, 10);
  context.textAlign = 'left';
  context.fillText('to', size.right, 10);
  const write = (token, x, y, align, strong) => {
    if (size.step < 10 && !strong) return;
    context.font = `${strong ? '600 ' : ''}${size.step < 14 ? 11 : 13}px ${FONT}`;
    context.textAlign = align;
    context.fillStyle = strong ? colours.mark : colours.ink;
    context.fillText(shortened(context, token, align === 'right' ? size.left - 4 : size.width - size.right), x, y);
  };
  view.queries.forEach((token, query) =>
    write(token, size.left, size.queryTop + (query + 0.5) * size.step, 'right', query === row),
  );
  view.keys.forEach((token, key) =>
    write(
      token,
      size.right,
      size.keyTop + (key + 0.5) * size.step,
      'left',
      found.has(key) && found.get(key).share > 0.05,
    ),
  );
}

// The largest weights of a row, in words.
function rowText(view, row) {
  const found = rowOf(view.weights, view.head, row).sort((a, b) => b.share - a.share);
  const lines = found.slice(0, 8).map(({ key, weight }) => `${weightText(weight)}  ${view.keys[key]}`);
  const rest = found.length > 8 ? [`and ${found.length - 8} more`] : [];
  return [view.queries[row], ...(found.length ? lines : ['attends to nothing']), ...rest];
}
