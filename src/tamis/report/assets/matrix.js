// A matrix of weights on canvas: a row for each query, a column for each key, nothing where a weight is zero.  What does
// not fit is looked at through a window that zooms and moves.

const MOST_LABEL = 110;
const SLANT = Math.PI / 3.4;
const LARGEST_CELL = 34;
const LABELLED_CELL = 11;
const ruler = el('canvas').getContext('2d');
const windows = new Map();

function shortened(context, text, room) {
  if (context.measureText(text).width <= room) return text;
  const letters = [...text];
  let end = letters.length;
  while (end > 1 && context.measureText(`${letters.slice(0, end).join('')}\u2026`).width > room) end -= 1;
  return `${letters.slice(0, end).join('')}\u2026`;
}

// The room that the longest of some tokens takes; of very many, of some of them.
function widest(tokens, font) {
  ruler.font = font;
  const some = tokens.length > 2000 ? tokens.slice(0, 2000) : tokens;
  return Math.min(MOST_LABEL, Math.max(0, ...some.map((token) => ruler.measureText(token).width)));
}

// Where the matrix stands in its picture: margins for labels, a box, and which cells are in it.
function layout({ queries, keys }, width, name) {
  const largest = `13px ${FONT}`;
  const left = Math.min(Math.ceil(widest(queries, largest)) + 12, Math.max(48, width * 0.3));
  const last = Math.ceil(widest(keys.slice(-3), largest) * Math.cos(SLANT)) + 4;
  const room = Math.max(80, width - left - last);
  const top = Math.ceil(widest(keys, largest) * Math.sin(SLANT)) + 16;
  // Two pictures fit the screen of a phone, one that of a desk.
  const high = width < 500 ? Math.max(260, innerHeight / 2) : Math.max(320, Math.min(760, innerHeight - 200));
  // A few more cells than fit are worth a smaller cell; many more are worth a window.
  const tallest = Math.max(LABELLED_CELL + 1, high / Math.max(1, queries.length));
  const fit = Math.min(LARGEST_CELL, tallest, room / Math.max(1, keys.length));
  const all = fit >= 5 && fit * queries.length <= 2 * high;
  const whole = all ? Math.max(5, fit >= 10 ? Math.floor(fit) : fit) : Math.min(fit, high / Math.max(1, queries.length));
  const box = { left, top, width: 0, height: 0 };
  box.width = all ? whole * keys.length : Math.min(room, LARGEST_CELL * keys.length);
  box.height = all ? whole * queries.length : Math.min(high, box.width, LARGEST_CELL * queries.length);
  const smallest = all ? whole : Math.min(box.width / keys.length, box.height / queries.length);
  const kept = windows.get(name);
  const cell = kept && !all ? Math.max(smallest, kept.cell) : smallest;
  const placed = { box, cell, smallest, all, x: kept?.x ?? 0, y: kept?.y ?? 0, width: left + box.width + last, height: top + box.height + 4 };
  return within(placed, queries.length, keys.length);
}

// The window stays inside the matrix.  x and y are the cells at its corner.
function within(placed, queries, keys) {
  const { box, cell } = placed;
  placed.x = Math.min(Math.max(0, placed.x), Math.max(0, keys - box.width / cell));
  placed.y = Math.min(Math.max(0, placed.y), Math.max(0, queries - box.height / cell));
  return placed;
}

const leftOf = ({ box, cell, x }, key) => box.left + (key - x) * cell;
const topOf = ({ box, cell, y }, query) => box.top + (query - y) * cell;
const inside = (from, size, at, length) => at + length > from && at < from + size;

// Labels where there is room, every so many where there is not.
function drawLabels(context, { queries, keys }, placed, colours) {
  const { box, cell } = placed;
  const step = Math.max(1, Math.ceil(LABELLED_CELL / cell));
  context.font = `${Math.min(13, Math.max(10, cell * 0.55))}px ${FONT}`;
  context.fillStyle = step > 1 ? colours.soft : colours.ink;
  const first = (at) => Math.ceil(at / step) * step;
  for (let row = first(placed.y); row < queries.length && topOf(placed, row) < box.top + box.height; row += step)
    queryLabel(context, queries[row], topOf(placed, row) + cell / 2, placed);
  for (let key = first(placed.x); key < keys.length && leftOf(placed, key) < box.left + box.width; key += step)
    keyLabel(context, keys[key], leftOf(placed, key) + cell / 2, placed);
}

function queryLabel(context, text, y, { box }) {
  if (y < box.top || y > box.top + box.height + 1) return;
  context.textBaseline = 'middle';
  context.textAlign = 'right';
  context.fillText(shortened(context, text, box.left - 10), box.left - 7, y);
}

function keyLabel(context, text, x, { box }) {
  if (x < box.left || x > box.left + box.width + 1) return;
  context.save();
  context.textBaseline = 'middle';
  context.textAlign = 'left';
  context.translate(x, box.top - 7);
  context.rotate(-SLANT);
  context.fillText(shortened(context, text, MOST_LABEL), 0, 0);
  context.restore();
}

// Lines between cells, and the weight in each cell where there is room for two digits.
function drawCells(context, { weights, head }, placed, colours) {
  const { box, cell } = placed;
  const [right, bottom] = [Math.min(box.left + box.width, leftOf(placed, weights.keys)), Math.min(box.top + box.height, topOf(placed, weights.queries))];
  context.save();
  context.beginPath();
  context.rect(box.left, box.top, box.width, box.height);
  context.clip();
  context.strokeStyle = colours.page;
  context.lineWidth = 1;
  context.beginPath();
  for (let k = Math.floor(placed.x); leftOf(placed, k) <= right; k++) {
    context.moveTo(leftOf(placed, k), box.top);
    context.lineTo(leftOf(placed, k), bottom);
  }
  for (let k = Math.floor(placed.y); topOf(placed, k) <= bottom; k++) {
    context.moveTo(box.left, topOf(placed, k));
    context.lineTo(right, topOf(placed, k));
  }
  context.stroke();
  if (cell >= 24) drawShares(context, weights, head, placed, colours);
  context.restore();
}

function drawShares(context, weights, head, placed, colours) {
  const { box, cell } = placed;
  context.font = `10px ${FONT}`;
  context.textAlign = 'center';
  context.textBaseline = 'middle';
  const last = Math.min(weights.queries, Math.ceil(placed.y + box.height / cell));
  for (let query = Math.floor(placed.y); query < last; query++) {
    for (const { key, share } of rowOf(weights, head, query)) {
      if (share < 0.095 || !inside(box.left, box.width, leftOf(placed, key), cell)) continue;
      context.fillStyle = inkOn(along(colours.ramp, rampPlace(share)));
      const text = share > 0.995 ? '1' : share.toFixed(2).slice(1);
      context.fillText(text, leftOf(placed, key) + cell / 2, topOf(placed, query) + cell / 2 + 0.5);
    }
  }
}

function matrixView(view, width) {
  const name = `${view.run.number}/${state.sentence}/${view.site}`;
  const placed = layout(view, width, name);
  const [canvas, context] = sharp(placed.width, placed.height, { role: 'img', 'aria-label': describe(view) });
  const [over, marks] = sharp(placed.width, placed.height, { class: 'over' });
  const draw = () => {
    const { colours } = theme;
    context.clearRect(0, 0, placed.width, placed.height);
    const place = { ...placed, left: leftOf(placed, 0), top: topOf(placed, 0) };
    paintWeights(context, view, place, colours);
    if (placed.cell >= 5) drawCells(context, view, placed, colours);
    drawLabels(context, view, placed, colours);
  };
  const mark = (hovered = null) => drawMarks(marks, view, placed, hovered);
  const move = (change) => {
    Object.assign(placed, change);
    within(placed, view.queries.length, view.keys.length);
    windows.set(name, { x: placed.x, y: placed.y, cell: placed.cell });
    draw();
    mark();
  };
  const at = ({ offsetX, offsetY }) => {
    const { box, cell } = placed;
    if (!inside(box.left, box.width, offsetX, 0.01) || !inside(box.top, box.height, offsetY, 0.01)) return null;
    const [key, query] = [Math.floor(placed.x + (offsetX - box.left) / cell), Math.floor(placed.y + (offsetY - box.top) / cell)];
    return key >= 0 && query >= 0 && key < view.keys.length && query < view.queries.length ? { key, query } : null;
  };
  draw();
  mark();
  pointing(over, view, at, mark);
  if (!placed.all) windowing(over, placed, move);
  return {
    element: el('div', {}, placed.all ? null : windowButtons(view, placed, move), el('div', { class: 'stack' }, canvas, over)),
    mark: () => {
      if (!placed.all) keepInSight(view, placed, move);
      mark();
    },
    layers: [canvas, over],
  };
}

// The row under the pointer is the one that is shown; a press keeps it.
function pointing(over, view, at, mark) {
  over.addEventListener('pointermove', (event) => {
    const found = at(event);
    mark(found);
    follow(found?.query ?? null);
    if (found) tip.show(cellText(view, found), event.clientX, event.clientY);
    else tip.hide();
  });
  over.addEventListener('pointerleave', () => {
    tip.hide();
    mark();
    follow(null);
  });
  over.addEventListener('click', (event) => at(event) && !over.dataset.dragged && go({ row: at(event).query }));
}

// Zoom about a place of the picture.
function zoomed(placed, factor, x = placed.box.left + placed.box.width / 2, y = placed.box.top + placed.box.height / 2) {
  const cell = Math.min(LARGEST_CELL, Math.max(placed.smallest, placed.cell * factor));
  const [key, query] = [placed.x + (x - placed.box.left) / placed.cell, placed.y + (y - placed.box.top) / placed.cell];
  return { cell, x: key - (x - placed.box.left) / cell, y: query - (y - placed.box.top) / cell };
}

// The wheel zooms, a drag moves.
function windowing(over, placed, move) {
  over.addEventListener(
    'wheel',
    (event) => {
      event.preventDefault();
      move(zoomed(placed, 1.0015 ** -event.deltaY, event.offsetX, event.offsetY));
    },
    { passive: false },
  );
  let from = null;
  over.addEventListener('pointerdown', (event) => {
    from = { x: event.offsetX, y: event.offsetY, at: { x: placed.x, y: placed.y } };
    delete over.dataset.dragged;
    over.setPointerCapture?.(event.pointerId);
  });
  over.addEventListener('pointermove', (event) => {
    if (!from) return;
    const [dx, dy] = [event.offsetX - from.x, event.offsetY - from.y];
    if (Math.abs(dx) + Math.abs(dy) > 3) over.dataset.dragged = 'yes';
    if (over.dataset.dragged) move({ x: from.at.x - dx / placed.cell, y: from.at.y - dy / placed.cell });
  });
  for (const end of ['pointerup', 'pointercancel']) over.addEventListener(end, () => (from = null));
}

function windowButtons(view, placed, move) {
  const zoom = (factor) => () => move(zoomed(placed, factor));
  return el(
    'div',
    { class: 'zoom' },
    el('span', { class: 'buttons', role: 'group', 'aria-label': 'zoom' }, [
      button('+', zoom(2), { 'aria-label': 'zoom in' }),
      button('\u2212', zoom(0.5), { 'aria-label': 'zoom out' }),
      button('all', () => move({ cell: placed.smallest, x: 0, y: 0 })),
      button('row', () => centre(view, placed, move), { title: 'go to the row that is chosen' }),
    ]),
    el('span', { class: 'soft' }, `${whole(view.queries.length)} by ${whole(view.keys.length)} tokens: wheel to zoom, drag to move`),
  );
}

function centre(view, placed, move) {
  const row = chosenRow(view);
  const best = strongest(view, row);
  const cell = Math.max(placed.cell, LABELLED_CELL);
  move({ cell, y: row - placed.box.height / cell / 2, x: best - placed.box.width / cell / 2 });
}

// A row that was chosen by keys or by search comes into the window.
function keepInSight(view, placed, move) {
  if (state.row === null) return;
  const shown = placed.box.height / placed.cell;
  if (state.row < placed.y || state.row > placed.y + shown - 1) move({ y: state.row - shown / 2 });
}

// The row that is chosen, the row and column under the pointer, and their labels whatever the zoom.
function drawMarks(context, view, placed, hovered) {
  const { colours } = theme;
  const { box, cell } = placed;
  context.clearRect(0, 0, placed.width, placed.height);
  const row = hovered?.query ?? chosenRow(view);
  const frame = (x, y, width, height) => {
    context.save();
    context.beginPath();
    context.rect(box.left - 2, box.top - 2, box.width + 4, box.height + 4);
    context.clip();
    context.strokeRect(x, y, width, height);
    context.restore();
  };
  context.strokeStyle = colours.mark;
  context.lineWidth = 2;
  frame(box.left - 1, topOf(placed, chosenRow(view)) - 1, box.width + 2, Math.max(cell, 2) + 2);
  if (hovered) {
    context.lineWidth = 1;
    context.strokeStyle = colours.ink;
    frame(leftOf(placed, hovered.key) - 0.5, box.top - 0.5, Math.max(cell, 2) + 1, box.height + 1);
    frame(box.left - 0.5, topOf(placed, hovered.query) - 0.5, box.width + 1, Math.max(cell, 2) + 1);
  }
  const thin = cell < LABELLED_CELL;
  if (!thin && !hovered) return;
  context.font = `600 12px ${FONT}`;
  const y = topOf(placed, row) + cell / 2;
  context.fillStyle = colours.page;
  if (y > box.top - 1 && y < box.top + box.height + 1) context.fillRect(0, y - 8, box.left - 3, 16);
  context.fillStyle = colours.mark;
  queryLabel(context, view.queries[row], y, placed);
  const key = hovered?.key ?? (thin ? strongest(view, row) : null);
  if (key === null) return;
  const x = leftOf(placed, key) + cell / 2;
  plate(context, x, box, colours);
  context.fillStyle = colours.mark;
  keyLabel(context, view.keys[key], x, placed);
}

// A clean ground for the label of a column.
function plate(context, x, { top, left, width }, colours) {
  if (x < left || x > left + width + 1) return;
  context.save();
  context.translate(x, top - 7);
  context.rotate(-SLANT);
  context.fillStyle = colours.page;
  context.fillRect(-2, -8, MOST_LABEL + 4, 16);
  context.restore();
}

// The key with the largest weight of a row; the first if there is none.
function strongest(view, row) {
  const found = rowOf(view.weights, view.head, row);
  return found.length ? found.reduce((best, entry) => (entry.share > best.share ? entry : best)).key : 0;
}

function cellText(view, { query, key }) {
  const title = `${view.queries[query]} \u2192 ${view.keys[key]}`;
  if (view.causal && key > query) return [title, 'not visible from here'];
  const found = rowOf(view.weights, view.head, query).find((entry) => entry.key === key);
  if (!found) return [title, 'exactly 0'];
  const share = view.normal ? [] : [`${percent(found.share)} of its row`];
  return [title, `weight ${weightText(found.weight)}`, ...share];
}

function describe({ run, head, site, weights }) {
  const rows = weights.queries;
  const count = weights.start[(head + 1) * rows] - weights.start[head * rows];
  return `${run.name}, ${site}, head ${head}: ${rows} by ${weights.keys} tokens, ${count} weights that are not zero`;
}
