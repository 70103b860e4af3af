// One query at a time: every key that it sees, with the weight that it gets, in the order of the sentence.

// Past some number of keys only those with a weight are worth their place, and of very many of them the largest.
const MOST_KEYS = 32;
const MOST_BARS = 200;
// The row under the pointer, and the one that tells something where nobody chose.
let pointedRow = null;
let tellingRow = 0;

const chosenRow = (view) => Math.min(state.row ?? tellingRow, view.queries.length - 1);
const shownRow = (view) => Math.min(pointedRow ?? chosenRow(view), view.queries.length - 1);

// A row that tells something in all pictures: no mark such as <s>, and most on one key of several.
function mostTelling(views) {
  const rows = Math.min(...views.map((view) => view.queries.length));
  let best = { row: 0, score: -1 };
  for (let row = 0; row < rows; row++) {
    const score = views.reduce((sum, view) => sum + telling(view, row), 0) / (isSpecial(views[0].queries[row]) ? 100 : 1);
    if (score > best.score) best = { row, score };
  }
  return best.row;
}

function telling({ weights, head }, row) {
  const at = head * weights.queries + row;
  const [from, to] = [weights.start[at], weights.start[at + 1]];
  if (from === to) return -1;
  let largest = 0;
  for (let k = from; k < to; k++) largest = Math.max(largest, Math.abs(weights.value[k]));
  return largest / weights.total[at] / (to - from > 1 ? 1 : 4);
}

function rowList(view) {
  const row = shownRow(view);
  const found = new Map(rowOf(view.weights, view.head, row).map((entry) => [entry.key, entry]));
  const visible = view.causal ? row + 1 : view.keys.length;
  const sum = found.size
    ? `${whole(found.size)} of ${whole(visible)} visible keys have a weight`
    : `all ${whole(visible)} weights are exactly 0`;
  const [shown, only] = barsOf(view, found, visible);
  const largest = Math.max(...shown.map(({ entry }) => entry?.share ?? 0), 0);
  return [
    stepper(view, row),
    el('div', { class: 'soft' }, only ? `${sum}; ${only}` : sum),
    el('div', { class: 'bars', tabindex: 0, role: 'group', 'aria-label': 'weights of the chosen token' }, shown.map(({ token, entry }) => bar(token, entry, largest))),
  ];
}

function barsOf(view, found, visible) {
  const one = (key) => ({ token: view.keys[key], entry: found.get(key) });
  if (visible <= MOST_KEYS) return [Array.from({ length: visible }, (_, key) => one(key)), ''];
  if (found.size <= MOST_BARS) return [[...found.keys()].map(one), 'only these are listed'];
  const largest = [...found.values()].sort((a, b) => b.share - a.share).slice(0, MOST_BARS);
  return [largest.map(({ key }) => one(key)), `the ${MOST_BARS} largest are listed`];
}

function stepper(view, row) {
  const { queries } = view;
  const step = (by, text, name) =>
    button(text, () => go({ row: row + by }), {
      'aria-label': name,
      disabled: row + by < 0 || row + by >= queries.length,
    });
  const own = view.run.shown[state.sentence].chances?.find((one) => one.row === row);
  const kind = view.run.sites[view.site].kind;
  return el(
    'div',
    { class: 'step' },
    el('span', { class: 'buttons' }, step(-1, '\u2039', 'token before'), step(1, '\u203a', 'token after')),
    el('strong', { class: 'word', dir: 'auto' }, queries[row] ?? ''),
    el('span', { class: 'soft' }, `token ${whole(row + 1)} of ${whole(queries.length)}${state.row === null ? '' : ', kept'}`),
    own && kind !== 'encoder' ? el('span', { class: 'soft' }, `writes ${own.token.replace(/^[\u2581\u0120]/u, '')}: ${percent(own.chance)}`) : null,
  );
}

function bar(token, entry, largest) {
  const fill = el('span', { class: 'fill' });
  if (entry) {
    fill.style.width = `${(100 * entry.share) / largest}%`;
    fill.style.background = weightColour(entry.share);
  }
  return el(
    'div',
    { class: entry ? 'bar' : 'bar zero' },
    el('span', { class: 'token', dir: 'auto' }, token),
    el('span', { class: 'room' }, fill),
    el('span', { class: 'weight' }, entry ? weightText(entry.weight) : '0'),
  );
}
