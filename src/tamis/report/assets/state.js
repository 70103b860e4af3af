// What is being looked at.  It stands in the address, so that a link opens the same view:
//   #run/type/sentence/layer/head?view=links&with=run&row=3
// A row that nobody chose, null, is one that tells something.

const VIEWS = { matrix: 'Matrix', links: 'Links', heads: 'All heads' };
const START = {
  part: 'overview',
  run: 0,
  kind: 'cross',
  sentence: 0,
  layer: 0,
  head: 0,
  view: 'matrix',
  others: [],
  row: null,
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
    others: wanted.others.filter((other) => others.includes(other)),
    row: Number.isInteger(wanted.row) && rows ? clamp(wanted.row, rows) : null,
  };
}

// Runs that have the same sentence and type of attention.
function comparable({ run, kind, sentence }) {
  return runs.filter((other) => other.number !== run && (content.live || sentence in other.shown) && kind in other.layers);
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
  if (wanted.others.length) more.set('with', wanted.others.map((other) => runs[other].name).join(','));
  if (wanted.row !== null) more.set('row', wanted.row);
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
  const others = more.has('with') ? withNames(more.get('with')) : [];
  notice([...(named(name) === undefined ? [name] : []), ...others.filter((other) => typeof other === 'string')]);
  return {
    part: 'explorer',
    run: named(name) ?? 0,
    kind,
    sentence,
    layer,
    head,
    view: more.get('view') ?? START.view,
    others: others.filter((other) => typeof other === 'number'),
    row: more.has('row') ? Number(more.get('row')) : null,
  };
}

// The numbers of runs whose names stand between commas, which may be part of a name; what is no name stays text.
function withNames(text) {
  const found = [];
  let rest = text;
  while (rest) {
    const fits = runs.filter(({ name }) => rest === name || rest.startsWith(`${name},`));
    const run = fits.sort((a, b) => b.name.length - a.name.length)[0];
    const size = run ? run.name.length : (rest.indexOf(',') + 1 || rest.length + 1) - 1;
    found.push(run ? run.number : rest.slice(0, size));
    rest = rest.slice(size + 1);
  }
  return found;
}

// Says that an address names what is not here, in place of showing something else in silence.
function notice(missing) {
  const box = byId('notice');
  box.hidden = !missing.length;
  const there = runs.map((run) => run.name).join(', ');
  box.textContent = missing.length ? `There is no run called ${missing.join(' or ')} here, only ${there}.` : '';
}

// An address that somebody has mangled is no reason to stop.
function decoded(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}
