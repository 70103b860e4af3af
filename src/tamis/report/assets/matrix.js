// A matrix of weights on canvas: a row for each query, a column for each key, nothing where a weight is zero.

// One pixel for each weight that is not zero; to be drawn larger.
function weightImage(weights, head, colours) {
  const { queries, keys } = weights;
  const ramp = Array.from({ length: 256 }, (_, place) => along(colours.ramp, place / 255));
  const image = new ImageData(Math.max(1, keys), Math.max(1, queries));
  for (let query = 0; query < queries; query++) {
    const row = head * queries + query;
    for (let k = weights.start[row]; k < weights.start[row + 1]; k++) {
      const share = Math.abs(weights.value[k]) / weights.total[row];
      const [r, g, b] = ramp[Math.round(255 * rampPlace(share))];
      image.data.set([r, g, b, 255], 4 * (query * keys + weights.column[k]));
    }
  }
  const canvas = el('canvas', { width: image.width, height: image.height });
  canvas.getContext('2d').putImageData(image, 0, 0);
  return canvas;
}

// A canvas that is sharp on every screen, and its context in CSS pixels.
function sharp(width, height, attributes = {}) {
  const zoom = Math.min(devicePixelRatio || 1, 3);
  const canvas = el('canvas', { width: Math.round(width * zoom), height: Math.round(height * zoom), ...attributes });
  canvas.style.width = `${width}px`;
  canvas.style.height = `${height}px`;
  const context = canvas.getContext('2d');
  context.scale(zoom, zoom);
  return [canvas, context];
}

// Grey where a query may not look, light where it may, and the weights.
function paintWeights(context, { weights, head, causal }, box, colours) {
  const [across, down] = [box.width / weights.keys, box.height / weights.queries];
  context.fillStyle = colours.empty;
  context.fillRect(box.left, box.top, box.width, box.height);
  if (causal) {
    context.fillStyle = colours.unseen;
    for (let query = 0; query < weights.queries; query++) {
      context.fillRect(box.left + (query + 1) * across, box.top + query * down, box.width - (query + 1) * across, down);
    }
  }
  context.imageSmoothingEnabled = false;
  context.drawImage(weightImage(weights, head, colours), box.left, box.top, box.width, box.height);
}

function shortened(context, text, room) {
  if (context.measureText(text).width <= room) return text;
  let end = text.length;
  while (end > 1 && context.measureText(`${text.slice(0, end)}\u2026`).width > room) end -= 1;
  return `${text.slice(0, end)}\u2026`;
}

const MOST_LABEL = 110;
const SLANT = Math.PI / 3.4;
const ruler = el('canvas').getContext('2d');

// The room that the longest of some tokens takes.
function widest(tokens, font) {
  ruler.font = font;
  return Math.min(MOST_LABEL, Math.max(0, ...tokens.map((token) => ruler.measureText(token).width)));
}

// How large cells are and where they begin.
function layout({ queries, keys }, width) {
  const most = Math.max(queries.length, keys.length);
  const smallest = most <= 64 ? 13 : most <= 160 ? 7 : 2;
  const labelled = most <= 64;
  const largest = `13px ${FONT}`;
  const left = labelled ? Math.ceil(widest(queries, largest)) + 12 : 4;
  const last = labelled ? Math.ceil(widest(keys.slice(-3), largest) * Math.cos(SLANT)) + 4 : 4;
  const cell = Math.max(smallest, Math.min(34, Math.floor((width - left - last) / Math.max(1, keys.length))));
  const font = `${Math.min(13, Math.max(10, cell * 0.55))}px ${FONT}`;
  const top = labelled ? Math.ceil(widest(keys, font) * Math.sin(SLANT)) + 16 : 4;
  const box = { left, top, width: cell * keys.length, height: cell * queries.length };
  return { cell, labelled, box, font, width: left + box.width + last, height: top + box.height + 4 };
}

function drawLabels(context, { queries, keys }, { cell, box, font }, colours) {
  context.font = font;
  context.fillStyle = colours.ink;
  context.textBaseline = 'middle';
  context.textAlign = 'right';
  queries.forEach((token, row) => {
    context.fillText(shortened(context, token, MOST_LABEL), box.left - 7, box.top + (row + 0.5) * cell);
  });
  context.textAlign = 'left';
  keys.forEach((token, column) => {
    context.save();
    context.translate(box.left + (column + 0.5) * cell, box.top - 7);
    context.rotate(-SLANT);
    context.fillText(shortened(context, token, MOST_LABEL), 0, 0);
    context.restore();
  });
}

// Lines between cells, and the weight in each cell where there is room for two digits.
function drawCells(context, { weights, head }, { cell, box }, colours) {
  context.strokeStyle = colours.page;
  context.lineWidth = 1;
  context.beginPath();
  for (let k = 0; k <= weights.keys; k++) {
    context.moveTo(box.left + k * cell, box.top);
    context.lineTo(box.left + k * cell, box.top + box.height);
  }
  for (let k = 0; k <= weights.queries; k++) {
    context.moveTo(box.left, box.top + k * cell);
    context.lineTo(box.left + box.width, box.top + k * cell);
  }
  context.stroke();
  if (cell < 24) return;
  context.font = `10px ${FONT}`;
  context.textAlign = 'center';
  for (let query = 0; query < weights.queries; query++) {
    for (const { key, share } of rowOf(weights, head, query)) {
      if (share < 0.095) continue;
      context.fillStyle = inkOn(along(colours.ramp, rampPlace(share)));
      context.fillText(
        share > 0.995 ? '1' : share.toFixed(2).slice(1),
        box.left + (key + 0.5) * cell,
        box.top + (query + 0.5) * cell + 0.5,
      );
    }
  }
}

function matrixView(view, width) {
  const { colours } = theme;
  const placed = layout(view, width);
  const [canvas, context] = sharp(placed.width, placed.height, { role: 'img', 'aria-label': describe(view) });
  paintWeights(context, view, placed.box, colours);
  if (placed.cell >= 5) drawCells(context, view, placed, colours);
  if (placed.labelled) drawLabels(context, view, placed, colours);
  const [over, marks] = sharp(placed.width, placed.height, { class: 'over' });
  const at = ({ offsetX, offsetY }) => {
    const [key, query] = [
      Math.floor((offsetX - placed.box.left) / placed.cell),
      Math.floor((offsetY - placed.box.top) / placed.cell),
    ];
    return key >= 0 && query >= 0 && key < view.keys.length && query < view.queries.length ? { key, query } : null;
  };
  const mark = (hovered) => drawMarks(marks, placed, hovered);
  over.addEventListener('pointermove', (event) => {
    const found = at(event);
    mark(found);
    if (found) tip.show(cellText(view, found), event.clientX, event.clientY);
    else tip.hide();
  });
  over.addEventListener('pointerleave', () => (tip.hide(), mark(null)));
  over.addEventListener('click', (event) => at(event) && go({ row: at(event).query }));
  mark(null);
  return { element: el('div', { class: 'stack' }, canvas, over), mark: () => mark(null), layers: [canvas, over] };
}

// The row that is chosen, and the row and column under the pointer.
function drawMarks(context, { box, cell, width, height }, hovered) {
  const { colours } = theme;
  context.clearRect(0, 0, width, height);
  context.strokeStyle = colours.mark;
  context.lineWidth = 2;
  context.strokeRect(box.left - 1, box.top + state.row * cell - 1, box.width + 2, Math.max(cell, 3) + 2);
  if (!hovered) return;
  context.lineWidth = 1;
  context.strokeStyle = colours.ink;
  context.strokeRect(box.left + hovered.key * cell - 0.5, box.top - 0.5, cell + 1, box.height + 1);
  context.strokeRect(box.left - 0.5, box.top + hovered.query * cell - 0.5, box.width + 1, cell + 1);
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
