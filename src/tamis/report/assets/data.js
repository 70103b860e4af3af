// What the page is about: runs, their layers, and weights that are unpacked when they are first looked at.

const KINDS = ['encoder', 'decoder', 'cross'];
const KIND_NAMES = { encoder: 'encoder self-attention', decoder: 'decoder self-attention', cross: 'cross-attention' };
const content = JSON.parse(byId('content').textContent);
const runs = content.runs.map((run, number) => new Run(run, number));

function Run(data, number) {
  Object.assign(this, data);
  this.number = number;
  this.layers = {};
  for (const [site, figures] of Object.entries(data.sites)) (this.layers[figures.kind] ??= []).push(site);
  this.kinds = KINDS.filter((kind) => kind in this.layers);
}

Run.prototype.heads = function (site) {
  return this.sites[site].density.length;
};

Run.prototype.alpha = function (site, head) {
  const alphas = this.alphas?.[site];
  return alphas?.length === this.heads(site) ? alphas[head] : null;
};

Run.prototype.place = function (site) {
  return [this.sites[site].kind, this.layers[this.sites[site].kind].indexOf(site)];
};

// Every head, in the order of the model.  What was measured of it is asked for by `valueOf`.
Run.prototype.everyHead = function () {
  return Object.entries(this.sites).flatMap(([site, figures]) =>
    figures.density.map((_, head) => ({
      run: this,
      site,
      head,
      kind: figures.kind,
      layer: this.place(site)[1],
      alpha: this.alpha(site, head),
      importance: this.importance?.change?.[site]?.[head] ?? null,
    })),
  );
};

// The value of a head in one of the columns that the content declares: of a figure, or of one of its places.
function valueOf({ run, site, head }, { name, place }) {
  const found = run.sites[site][name]?.[head];
  return (place === undefined ? found : found?.[place]) ?? null;
}

const columnOf = (name) => content.columns.find((column) => column.name === name);
const measured = (name) => (head) => valueOf(head, columnOf(name));

// The tokens of the queries and of the keys of a kind of attention.
Run.prototype.sides = function (sentence, kind) {
  const { source, target } = this.shown[sentence];
  const [written, read] = [labelled(target), labelled(source?.pieces.length ? source : target)];
  return { queries: kind === 'encoder' ? read : written, keys: kind === 'decoder' ? written : read };
};

const unpacked = new WeakMap();

// The weights of one layer on one sentence: a promise, kept as long as the sentence is.
Run.prototype.weights = function (sentence, site) {
  const shown = this.shown[sentence];
  if (!unpacked.has(shown)) unpacked.set(shown, {});
  return (unpacked.get(shown)[site] ??= shown.id ? fetchedWeights(shown, site) : embeddedWeights(shown.weights[site]));
};

// Why there are no weights to look at, if there are none.
const tooLarge = (run, sentence) => run.shown[sentence]?.too_large ?? 0;

async function embeddedWeights({ shape, data }) {
  const packed = Uint8Array.from(atob(data), (character) => character.charCodeAt(0));
  return unpack(shape, await inflated(new Blob([packed]).stream()));
}

const inflated = (stream) => new Response(stream.pipeThrough(new DecompressionStream('deflate'))).arrayBuffer();

// Numbers of two bytes or of four, then each third byte of all weights together.
function unpack([heads, queries, keys], buffer) {
  const width = new DataView(buffer).getUint32(0, true);
  const numbers = (at, size) => {
    const Kind = width === 2 ? Uint16Array : Uint32Array;
    return new Kind(buffer.slice(at, at + width * size));
  };
  const rows = heads * queries;
  const counts = numbers(4, rows);
  const start = new Uint32Array(rows + 1);
  for (let row = 0; row < rows; row++) start[row + 1] = start[row] + counts[row];
  const size = start[rows];
  const column = new Uint32Array(size);
  const gaps = numbers(4 + width * rows, size);
  const planes = [0, 1, 2].map((plane) => new Uint8Array(buffer, 4 + width * (rows + size) + plane * size, size));
  const bits = new Uint32Array(size);
  const value = new Float32Array(bits.buffer);
  const total = new Float32Array(rows);
  for (let row = 0; row < rows; row++) {
    let key = 0;
    for (let k = start[row]; k < start[row + 1]; k++) {
      key += gaps[k];
      column[k] = key;
      bits[k] = (planes[2][k] << 24) | (planes[1][k] << 16) | (planes[0][k] << 8);
      total[row] += Math.abs(value[k]);
    }
  }
  return { heads, queries, keys, start, column, value, total };
}

// The non-zeros of one row: keys, weights, and the share of the row that each has.
function rowOf(weights, head, query) {
  const row = head * weights.queries + query;
  const found = [];
  for (let k = weights.start[row]; k < weights.start[row + 1]; k++) {
    const weight = weights.value[k];
    found.push({ key: weights.column[k], weight, share: Math.abs(weight) / weights.total[row] });
  }
  return found;
}

// Whether rows sum to one, as far as the page's numbers tell: if not, a weight and its share are two things.
function sumsToOne(weights) {
  return weights.total.every((total) => total === 0 || Math.abs(total - 1) < 1e-3);
}

// Who gives a key any weight, the most first: rows are searched, so nothing has to be kept for it.
function queriesOf(weights, head, key) {
  const found = [];
  for (let query = 0; query < weights.queries; query++) {
    const row = head * weights.queries + query;
    const at = lowerBound(weights, row, key);
    if (at < weights.start[row + 1] && weights.column[at] === key)
      found.push({ query, weight: weights.value[at], share: Math.abs(weights.value[at]) / weights.total[row] });
  }
  return found.sort((a, b) => b.share - a.share);
}

// Where the entries of a row begin whose key is not below one.
function lowerBound({ start, column }, row, key) {
  let [low, high] = [start[row], start[row + 1]];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (column[middle] < key) low = middle + 1;
    else high = middle;
  }
  return low;
}

// Scripts that put no space between words.
const UNSPACED = /[\p{Script=Han}\p{Script=Hiragana}\p{Script=Katakana}\p{Script=Thai}\p{Script=Lao}\p{Script=Khmer}\p{Script=Myanmar}]/u;
const LETTER = /[\p{L}\p{N}\p{M}]/u;

// What tokens are called: the text as it was written, a dot before a piece that goes on with a word, and a mark for a
// space alone.  Tokens without text of their own keep the name that their vocabulary has for them.
const labels = new WeakMap();
function labelled(side) {
  if (!labels.has(side)) labels.set(side, labelsOf(side));
  return labels.get(side);
}

function labelsOf({ pieces, segments }) {
  const own = new Map();
  const joins = new Set();
  let before = '';
  for (const [text, token] of segments) {
    if (token !== null && !own.has(token)) {
      own.set(token, text);
      const [last, first] = [[...before].at(-1) ?? '', [...text][0]];
      if (LETTER.test(last) && LETTER.test(first) && !UNSPACED.test(last) && !UNSPACED.test(first)) joins.add(token);
    }
    before = text;
  }
  return pieces.map((piece, token) => {
    const text = own.get(token);
    if (text === undefined) return piece.replace(/^[\u2581\u0120]+/u, '') || '\u2423';
    if (!text.trim()) return '\u2423';
    return joins.has(token) ? `\u00b7${text}` : text;
  });
}

const isSpecial = (label) => /^(<.*>|\[.*\]|\u2423)$/u.test(label);
