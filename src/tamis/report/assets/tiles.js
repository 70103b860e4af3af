// Weights as tiles of pixels, at any zoom: a pixel has the largest share of the cells under it, so no weight is lost.

const TILE = 256;
const MOST_TILES = 192;
const tileCache = new Map();

const RAMPS = new WeakMap();

// 256 colours from the smallest weight to 1, as bytes.
function rampOf(colours) {
  if (!RAMPS.has(colours)) RAMPS.set(colours, Array.from({ length: 256 }, (_, place) => along(colours.ramp, place / 255)));
  return RAMPS.get(colours);
}

// A tile of 2^level cells to a pixel, drawn once and kept while there is room.
function tile(weights, head, level, across, down, colours) {
  weights.name ??= Symbol('weights');
  const own = tileCache.get(weights.name) ?? tileCache.set(weights.name, new Map()).get(weights.name);
  const name = `${theme.name}/${colours === THEMES.light}/${head}/${level}/${across}/${down}`;
  if (!own.has(name)) {
    const all = [...tileCache.values()].reduce((sum, tiles) => sum + tiles.size, 0);
    if (all >= MOST_TILES) tileCache.delete(tileCache.keys().next().value);
    if (!tileCache.has(weights.name)) tileCache.set(weights.name, own);
    own.set(name, drawTile(weights, head, level, across, down, colours));
  }
  return own.get(name);
}

function drawTile(weights, head, level, across, down, colours) {
  const cells = TILE * 2 ** level;
  const [left, top] = [across * cells, down * cells];
  const [right, bottom] = [Math.min(left + cells, weights.keys), Math.min(top + cells, weights.queries)];
  const width = Math.max(1, Math.ceil((right - left) / 2 ** level));
  const height = Math.max(1, Math.ceil((bottom - top) / 2 ** level));
  const most = new Float32Array(width * height);
  for (let query = top; query < bottom; query++) {
    const row = head * weights.queries + query;
    const line = ((query - top) >> level) * width;
    const end = weights.start[row + 1];
    const k0 = left ? lowerBound(weights, row, left) : weights.start[row];
    for (let k = k0; k < end && weights.column[k] < right; k++) {
      const share = Math.abs(weights.value[k]) / weights.total[row];
      const at = line + ((weights.column[k] - left) >> level);
      if (share > most[at]) most[at] = share;
    }
  }
  const image = new ImageData(width, height);
  const ramp = rampOf(colours);
  for (let at = 0; at < most.length; at++) {
    if (most[at] === 0) continue;
    const [r, g, b] = ramp[Math.round(255 * rampPlace(most[at]))];
    image.data[4 * at] = r;
    image.data[4 * at + 1] = g;
    image.data[4 * at + 2] = b;
    image.data[4 * at + 3] = 255;
  }
  const canvas = el('canvas', { width, height });
  canvas.getContext('2d').putImageData(image, 0, 0);
  return canvas;
}

// Grey where a query may not look, light where it may, and the weights.  `place` says where cell (0, 0) is, how large a
// cell is, and what part of the picture may be drawn on.
function paintWeights(context, { weights, head, causal }, { left, top, cell, box }, colours) {
  context.save();
  context.beginPath();
  context.rect(box.left, box.top, box.width, box.height);
  context.clip();
  context.fillStyle = colours.empty;
  context.fillRect(left, top, weights.keys * cell, weights.queries * cell);
  if (causal) paintUnseen(context, weights, left, top, cell, box, colours);
  const level = Math.max(0, Math.ceil(Math.log2(1 / cell) - 1e-9));
  const side = TILE * 2 ** level * cell;
  context.imageSmoothingEnabled = false;
  const first = (edge, from) => Math.max(0, Math.floor((edge - from) / side));
  for (let down = first(box.top, top); top + down * side < box.top + box.height; down++) {
    if (down * TILE * 2 ** level >= weights.queries) break;
    for (let across = first(box.left, left); left + across * side < box.left + box.width; across++) {
      if (across * TILE * 2 ** level >= weights.keys) break;
      const made = tile(weights, head, level, across, down, colours);
      const size = cell * 2 ** level;
      context.drawImage(made, left + across * side, top + down * side, made.width * size, made.height * size);
    }
  }
  context.restore();
}

// The stairs above the diagonal, of what is on the screen.
function paintUnseen(context, weights, left, top, cell, box, colours) {
  context.fillStyle = colours.unseen;
  const right = left + weights.keys * cell;
  if (cell < 1) {
    context.beginPath();
    context.moveTo(left, top);
    context.lineTo(right, top);
    context.lineTo(right, top + weights.queries * cell);
    context.fill();
    return;
  }
  const from = Math.max(0, Math.floor((box.top - top) / cell));
  const to = Math.min(weights.queries, Math.ceil((box.top + box.height - top) / cell));
  for (let query = from; query < to; query++) {
    const begin = left + (query + 1) * cell;
    if (begin < right) context.fillRect(begin, top + query * cell, right - begin, cell);
  }
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
