// Tables of runs and of all heads.

// Columns are [title, whether it holds numbers]; cells are text or elements.
function table(name, columns, rows) {
  const look = (place) => ({ class: columns[place][1] ? 'number' : null });
  const head = columns.map(([title], place) => el('th', look(place), title));
  const body = rows.map((cells) =>
    el(
      'tr',
      {},
      cells.map((cell, place) => el('td', look(place), cell)),
    ),
  );
  const made = el('table', { class: name }, el('thead', {}, el('tr', {}, head)), el('tbody', {}, body));
  return el('div', { class: 'scroll', tabindex: 0, role: 'group', 'aria-label': `table: ${name}` }, made);
}

// A box of the run's colour.  Its name always stands beside it.
function swatch(run) {
  const box = el('span', { class: 'swatch', 'aria-hidden': true });
  box.style.background = `var(--run-${run.number % THEMES.light.runs.length})`;
  return box;
}

const interval = (text) => ({ low, high }) => (isNumber(low) ? `95 % interval ${text(low)} to ${text(high)}` : 'no interval');
const withInterval = (text) => ({ score, low, high }) => text(score) + (isNumber(low) ? ` \u00b1${text((high - low) / 2)}` : '');
const points = (value) => fixed(value, 1);
const hundredths = (value) => fixed(100 * value, 1);

// The figures of runs; `sense` is 1 where more is better and -1 where less is, of those that have an interval.
const FIGURES = [
  { name: 'bleu', title: 'BLEU', text: withInterval(points), about: interval(points), sense: 1 },
  { name: 'chrf', title: 'chrF', text: withInterval(points), about: interval(points), sense: 1 },
  { name: 'perplexity', title: 'perplexity', text: (found) => fixed(found, 2), about: () => 'per token' },
  { name: 'aer', title: 'AER %', text: withInterval(hundredths), about: interval(hundredths), sense: -1 },
  { name: 'density', title: 'density', text: (found) => fixed(found, 3), about: () => 'share of keys with a weight' },
  { name: 'diversity', title: 'diversity', text: (found) => fixed(found, 3), about: () => 'how heads differ, 0 to 1' },
  { name: 'null_share', title: 'null rows', text: (found) => percent(found), about: () => 'rows without any weight' },
  { name: 'tokens_per_second', title: 'tokens/s', text: whole, about: () => 'while training, all in all' },
];

const plainFigure = (found) => (typeof found === 'object' ? found?.score : found);

// The run that is ahead of every other by more than their intervals allow, if there is one.
function leader({ name, sense }) {
  const found = runs.map((run) => run.figures[name]);
  if (!sense || runs.length < 2 || !found.every((figure) => isNumber(figure?.low))) return null;
  const ahead = (one, other) => (sense > 0 ? one.low > other.high : one.high < other.low);
  const place = found.findIndex((one) => found.every((other) => other === one || ahead(one, other)));
  return runs[place] ?? null;
}

function runsTable() {
  // Zero null rows are worth a column only beside a run that has some.
  const shown = FIGURES.filter(({ name }) =>
    runs.some((run) => name in run.figures && (name !== 'null_share' || run.figures[name] > 0)),
  );
  const cell = (run, figure) => {
    const found = run.figures[figure.name];
    if (found === undefined) return '';
    const mark = leader(figure) === run ? 'best' : null;
    return el('span', { class: mark, title: figure.about(found) }, figure.text(found));
  };
  const rows = runs.map((run) => [
    el('strong', {}, swatch(run), run.name),
    run.mechanism ?? '',
    ...shown.map((figure) => cell(run, figure)),
  ]);
  const csv = runs.map((run) => [run.name, run.mechanism, ...shown.map(({ name }) => plainFigure(run.figures[name]))]);
  const titles = shown.map(({ title }) => title);
  const caption = 'Scores on the test set, heads over all layers. Point at a number to see its interval or meaning.';
  return card(
    {
      name: 'runs',
      title: runs.length > 1 ? 'Runs' : 'Run',
      caption: runs.length > 1 ? `${caption} Bold is ahead of all others by more than the intervals allow.` : caption,
      rows: [['run', 'attention', ...titles], ...csv],
    },
    table('runs', [['run'], ['attention'], ...titles.map((title) => [title, true])], rows),
  );
}

// Title, value, digits of a number that is not whole, and what it is.
const HEAD_COLUMNS = [
  ['run', (head) => head.run.name],
  ['attention', (head) => head.kind],
  ['layer', (head) => head.layer, 0],
  ['head', (head) => head.head, 0],
  ['alpha', (head) => head.alpha, 2, 'learned'],
  ...content.columns
    .filter(({ listed }) => listed !== false)
    .map((column) => [column.title, (head) => valueOf(head, column), column.digits, column.about]),
  ['loss without', (head) => head.importance, 4, 'how much the loss grows without the head'],
];

// Numbers from the largest down, text from A to Z, and what is missing last.
function inOrder(a, b) {
  if (a === null || b === null) return (a === null) - (b === null);
  return isNumber(a) ? b - a : a.localeCompare(b);
}

function headLink(head, text) {
  const place = { part: 'explorer', run: head.run.number, kind: head.kind, layer: head.layer, head: head.head };
  return el('a', { href: hashOf(place) }, text);
}

function everyHeadTable() {
  const heads = runs.flatMap((run) => run.everyHead());
  const columns = HEAD_COLUMNS.filter(([, value]) => heads.some((head) => value(head) !== null));
  const place = el('div');
  const cell = (head, [title, value, digits]) => {
    if (digits === undefined) return value(head);
    return title === 'head' ? headLink(head, String(value(head))) : fixed(value(head), digits);
  };
  const draw = () => {
    const titles = columns.map((column) => [
      button(column[0], () => sort(column), { class: 'plain' }),
      column.length > 2,
    ]);
    const rows = heads.map((head) => columns.map((column) => cell(head, column)));
    place.replaceChildren(table('every', titles, rows));
  };
  let last = null;
  const sort = (column) => {
    if (column === last) heads.reverse();
    else heads.sort((a, b) => inOrder(column[1](a), column[1](b)));
    last = column;
    draw();
  };
  draw();
  return card(
    {
      name: 'every-head',
      title: 'Every head',
      caption:
        'Press the title of a column to sort by it, again to turn it round. ' +
        columns.filter(([, , , about]) => about).map(([title, , , about]) => `${title}: ${about}`).join('; ') + '.',
      rows: [columns.map(([title]) => title), ...heads.map((head) => columns.map(([, value]) => value(head)))],
    },
    el('details', {}, el('summary', {}, `${heads.length} heads`), place),
  );
}

function nullSignals() {
  const some = runs.filter((run) => run.null_signal);
  if (!some.length) return null;
  const rates = some.flatMap((run) => {
    const { overall, sites } = run.null_signal;
    return Object.entries({ 'all layers': overall, ...sites }).map(([name, rate]) => ({ run, name, ...rate }));
  });
  const titles = ['run', 'cross-attention', 'null rows, true pairs', 'shuffled pairs', 'AUC'];
  const rows = rates.map((rate) => [
    rate.run.name,
    rate.name,
    percent(rate.true),
    percent(rate.shuffled),
    fixed(rate.auc, 3),
  ]);
  return card(
    {
      name: 'null-signal',
      title: 'Does null attention tell wrong pairs?',
      caption:
        'Share of null rows when a target is read with its own source and with that of another sentence. ' +
        'AUC: how often the wrong pair has more; 0.5 says nothing.',
      rows: [titles, ...rates.map((rate) => [rate.run.name, rate.name, rate.true, rate.shuffled, rate.auc])],
    },
    table(
      'nulls',
      titles.map((title, place) => [title, place > 1]),
      rows,
    ),
  );
}
