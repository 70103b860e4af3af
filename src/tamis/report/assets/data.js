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
  const [written, read] = [readable(target), readable(source.length ? source : target)];
  return { queries: kind === 'encoder' ? read : written, keys: kind === 'decoder' ? written : read };
};

const unpacked = new Map();

// The weights of one layer on one sentence: a promise, kept for the next time.
Run.prototype.weights = function (sentence, site) {
  const name = `${this.number}/${sentence}/${site}`;
  if (!unpacked.has(name)) unpacked.set(name, unpack(this.shown[sentence].weights[site]));
  return unpacked.get(name);
};

async function unpack({ shape: [heads, queries, keys], data }) {
  const packed = Uint8Array.from(atob(data), (character) => character.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream('deflate'));
  const view = new DataView(await new Response(stream).arrayBuffer());
  const rows = heads * queries;
  const start = new Uint32Array(rows + 1);
  for (let row = 0; row < rows; row++) start[row + 1] = start[row] + view.getUint16(2 * row, true);
  const size = start[rows];
  const column = new Uint16Array(size);
  const bits = new Uint32Array(size);
  const value = new Float32Array(bits.buffer);
  const total = new Float32Array(rows);
  const gaps = 2 * rows;
  const bytes = gaps + 2 * size;
  for (let row = 0; row < rows; row++) {
    let key = 0;
    for (let k = start[row]; k < start[row + 1]; k++) {
      key += view.getUint16(gaps + 2 * k, true);
      column[k] = key;
      const [low, middle, high] = [0, 1, 2].map((plane) => view.getUint8(bytes + plane * size + k));
      bits[k] = (high << 24) | (middle << 16) | (low << 8);
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

// What stands for a space before a word, in SentencePiece and in byte-level vocabularies.
const SPACES = /^[\u2581\u0120]+/u;

// Pieces as one reads them.  Where a mark stands for a space, a piece that goes on with a word gets a dot instead.
function readable(tokens) {
  const marked = tokens.some((token) => SPACES.test(token));
  return tokens.map((token) => {
    if (!marked || /^<.*>$/.test(token)) return token || '\u2423';
    const text = token.replace(SPACES, ' ');
    if (text.startsWith(' ')) return text.slice(1) || '\u2423';
    return /[\p{L}\p{N}]/u.test(text) ? `\u00b7${text}` : text;
  });
}
