// One query at a time: every key that it sees, with the weight that it gets, in the order of the sentence.

// Past some number of keys only those with a weight are worth their place.
const MOST_KEYS = 64;

function rowList(view) {
  const row = Math.min(state.row, view.queries.length - 1);
  const found = new Map(rowOf(view.weights, view.head, row).map((entry) => [entry.key, entry]));
  const visible = view.causal ? row + 1 : view.keys.length;
  const keys = view.keys.slice(0, visible).map((token, key) => ({ token, entry: found.get(key) }));
  const shown = keys.length > MOST_KEYS ? keys.filter(({ entry }) => entry) : keys;
  const largest = Math.max(...[...found.values()].map(({ share }) => share), 0);
  const sum = found.size
    ? `${found.size} of ${visible} visible keys have a weight`
    : `all ${visible} weights are exactly 0`;
  return [
    stepper(view.queries, row),
    el('div', { class: 'soft' }, keys.length > shown.length ? `${sum}; only these are listed` : sum),
    el(
      'div',
      { class: 'bars' },
      shown.map(({ token, entry }) => bar(token, entry, largest)),
    ),
  ];
}

function stepper(queries, row) {
  const step = (by, text, name) =>
    button(text, () => go({ row: row + by }), {
      'aria-label': name,
      disabled: row + by < 0 || row + by >= queries.length,
    });
  return el(
    'div',
    { class: 'step' },
    el('span', { class: 'buttons' }, step(-1, '\u2039', 'token before'), step(1, '\u203a', 'token after')),
    el('strong', { class: 'word', dir: 'auto', 'aria-live': 'polite' }, queries[row] ?? ''),
    el('span', { class: 'soft' }, `token ${row + 1} of ${queries.length}`),
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
