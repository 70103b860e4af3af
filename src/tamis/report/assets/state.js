// What is being looked at.  It stands in the address, so that a link opens the same view:
//   #run/type/sentence/layer/head?view=links&with=run&row=3

const VIEWS = { matrix: 'Matrix', links: 'Links', heads: 'All heads' };
const START = {
  part: 'overview',
  run: 0,
  kind: 'cross',
  sentence: 0,
  layer: 0,
  head: 0,
  view: 'matrix',
  other: null,
  row: 0,
};

let state = { ...START };
const watchers = [];

const clamp = (value, size) => Math.min(Math.max(0, Number.isInteger(value) ? value : 0), Math.max(0, size - 1));
const layersIn = (run, kind) => run.layers[kind].length;
const siteOf = (run, { kind, layer }) => run.layers[kind][clamp(layer, layersIn(run, kind))];

// The nearest view there is.
function possible(wanted) {
  const run = runs[clamp(wanted.run, runs.length)];
  const kind = run.kinds.includes(wanted.kind) ? wanted.kind : run.kinds.at(-1);
  const own = Object.keys(run.shown).map(Number);
  const sentence = own.includes(wanted.sentence) ? wanted.sentence : (own[0] ?? 0);
  const layer = clamp(wanted.layer, layersIn(run, kind));
  const head = clamp(wanted.head, run.heads(run.layers[kind][layer]));
  const others = comparable({ run: run.number, kind, sentence }).map((other) => other.number);
  const rows = own.length ? run.sides(sentence, kind).queries.length : 0;
  return {
    part: content.overview ? wanted.part : 'explorer',
    run: run.number,
    kind,
    sentence,
    layer,
    head,
    view: wanted.view in VIEWS ? wanted.view : 'matrix',
    other: others.includes(wanted.other) ? wanted.other : null,
    row: clamp(wanted.row, rows),
  };
}

// Runs that have the same sentence and type of attention.
function comparable({ run, kind, sentence }) {
  return runs.filter((other) => other.number !== run && sentence in other.shown && kind in other.layers);
}

// Changes what is looked at.  The address follows without filling the history, but for going to the other part.
function go(changes) {
  const before = state;
  state = possible({ ...state, ...changes });
  const step = before.part === state.part ? 'replaceState' : 'pushState';
  if (location.protocol !== 'about:' && location.hash !== hashOf({})) history[step](null, '', hashOf({}));
  watchers.forEach((watch) => watch(before));
}

function hashOf(changes) {
  const wanted = possible({ ...state, ...changes });
  if (wanted.part === 'overview') return '#overview';
  const where = [runs[wanted.run].name, wanted.kind, wanted.sentence, wanted.layer, wanted.head]
    .map(encodeURIComponent)
    .join('/');
  const more = new URLSearchParams();
  if (wanted.view !== START.view) more.set('view', wanted.view);
  if (wanted.other !== null) more.set('with', runs[wanted.other].name);
  if (wanted.row) more.set('row', wanted.row);
  const query = more.toString();
  return `#${where}${query ? `?${query}` : ''}`;
}

function fromHash(hash) {
  const [where, query = ''] = hash.replace(/^#/, '').split('?');
  if (!where || where === 'overview') return { ...state, part: 'overview' };
  const [name, kind, ...numbers] = where.split('/').map(decoded);
  const [sentence, layer, head] = numbers.map(Number);
  const more = new URLSearchParams(query);
  const named = (wanted) => runs.find((run) => run.name === wanted)?.number;
  return {
    part: 'explorer',
    run: named(name) ?? 0,
    kind,
    sentence,
    layer,
    head,
    view: more.get('view') ?? START.view,
    other: named(more.get('with')) ?? null,
    row: Number(more.get('row') ?? 0),
  };
}

// An address that somebody has mangled is no reason to stop.
function decoded(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}
