// Keys, and the panel that lists them.

const next = (all, current) => all[(all.indexOf(current) + 1) % all.length];
const nextRun = () => next([null, ...comparable(state).map((run) => run.number)], state.others[0] ?? null);
const compared = (other) => (other === null ? [] : [other]);

// Each key with the step that it takes; those of the explorer do nothing elsewhere.
const EXPLORER_KEYS = [
  {
    keys: { ArrowLeft: -1, ArrowRight: 1 },
    shown: '\u2190 \u2192',
    what: 'head before, after',
    act: (by) => go({ head: state.head + by }),
  },
  {
    keys: { ArrowUp: -1, ArrowDown: 1 },
    shown: '\u2191 \u2193',
    what: 'word before, after',
    act: (by) => panels[0]?.view && go({ row: chosenRow(panels[0].view) + by }),
  },
  {
    keys: { '[': -1, ']': 1 },
    shown: '[ ]',
    what: 'layer before, after',
    act: (by) => go({ layer: state.layer + by }),
  },
  { keys: { p: -1, n: 1 }, shown: 'p n', what: 'sentence before, after', act: (by) => stepSentence(by) },
  {
    keys: { t: 1 },
    shown: 't',
    what: 'next type of attention',
    act: () => go({ kind: next(runs[state.run].kinds, state.kind), row: null }),
  },
  { keys: { v: 1 }, shown: 'v', what: 'next view', act: () => go({ view: next(Object.keys(VIEWS), state.view) }) },
  { keys: { r: 1 }, shown: 'r', what: 'next run', act: () => go({ run: (state.run + 1) % runs.length }) },
  { keys: { c: 1 }, shown: 'c', what: 'compare with the next run, or none', act: () => go({ others: compared(nextRun()) }) },
];
const OTHER_KEYS = [
  { keys: { o: 1 }, shown: 'o', what: 'overview', act: () => go({ part: 'overview' }) },
  { keys: { e: 1 }, shown: 'e', what: 'explorer', act: () => go({ part: 'explorer' }) },
  { keys: { d: 1 }, shown: 'd', what: 'light or dark', act: () => theme.toggle() },
  { keys: { '?': 1 }, shown: '?', what: 'this help', act: () => toggleHelp() },
];

function keyboard() {
  document.addEventListener('keydown', (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName))
      return;
    if (byId('help').open && event.key !== '?') return;
    const known = state.part === 'explorer' ? [...EXPLORER_KEYS, ...OTHER_KEYS] : OTHER_KEYS;
    const found = known.find(({ keys }) => Object.hasOwn(keys, event.key));
    if (!found) return;
    event.preventDefault();
    found.act(found.keys[event.key]);
  });
}

function toggleHelp() {
  const box = byId('help');
  if (box.open) box.close();
  else box.showModal();
}

function help() {
  const line = ({ shown, what }) =>
    el(
      'div',
      {},
      el(
        'dt',
        {},
        shown.split(' ').map((key) => el('kbd', {}, key)),
      ),
      el('dd', {}, what),
    );
  byId('help').append(
    el('h2', {}, 'How to read and move'),
    el(
      'p',
      {},
      'A row is a query, the token that looks; a column is a key, a token that is looked at. Colour is a ' +
        'weight\u2019s share of its row, on a scale that spreads small ones. A cell without colour is exactly zero.',
    ),
    el(
      'p',
      {},
      'Point at a cell or a word for its weight: the list follows. Press one to keep its row. In links, switch on more ' +
        'heads and choose from which share on links are drawn. The address holds what is shown: copy it to come back.',
    ),
    el('dl', { class: 'keys' }, [...EXPLORER_KEYS, ...OTHER_KEYS].map(line)),
    el(
      'p',
      { class: 'soft' },
      'Layers and heads are counted from 0, as in the code. Nothing is loaded from a network.',
    ),
    button('Close', toggleHelp),
  );
  byId('help').addEventListener('click', (event) => event.target === byId('help') && toggleHelp());
}
