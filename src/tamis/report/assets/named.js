// Heads that do something one can name.

const MOST_NAMED = 4;

// The threshold of a role, the score of a head, and what the score is.
const ROLES = {
  'previous position': ['position', (head) => atOffset(head, -1), 'weight on the token before'],
  'same position': ['position', (head) => atOffset(head, 0), 'weight on the token itself'],
  'next position': ['position', (head) => atOffset(head, 1), 'weight on the token after'],
  'subword merging': ['subword_merging', (head) => head.merging, 'weight of a split word\u2019s pieces on one another'],
  interrogation: ['interrogation', (head) => head.interrogation, 'weight on \u201c?\u201d from words that ask'],
  'first token': ['first_token', (head) => head.first, 'weight on the first token'],
  'near one-hot': ['one_hot', (head) => head.oneHot, 'rows with a weight above 0.95'],
  null: ['null', (head) => head.nulls || null, 'rows that attend to nothing'],
};

const threshold = (run, role) => run.thresholds[ROLES[role][0]];

// A key of cross-attention has no place beside the query.
const canHave = (role, { kind }) => ROLES[role][0] !== 'position' || kind !== 'cross';

// What the data must hold for a role: how many there are at a layer, null where nobody told, and what if there is none.
const NEEDED = {
  'subword merging': ['split_words', 'no word is split in the data'],
  interrogation: ['questions', 'no question in the data'],
};

function whyNobody(run, role) {
  const [name, reason] = NEEDED[role] ?? [];
  const counts = Object.values(run.sites)
    .map((site) => site[name])
    .filter(isNumber);
  return counts.length && counts.every((count) => !count) ? reason : '\u2013';
}

// The heads of a run that can have a role, best first.
function ranked(run, role) {
  const [, score] = ROLES[role];
  const heads = run.everyHead().filter((head) => canHave(role, head) && isNumber(score(head)));
  return heads.map((head) => ({ head, score: score(head) })).sort((a, b) => b.score - a.score);
}

function namedHeads() {
  const roles = Object.keys(ROLES);
  const title = (role) => [
    el('strong', {}, role),
    el('small', {}, `${ROLES[role][2]}, at least ${percent(threshold(runs[0], role), 0)}`),
  ];
  const csv = runs.flatMap((run) =>
    roles.flatMap((role) =>
      ranked(run, role).map(({ head: { kind, layer, head, alpha }, score }) => {
        const named = score >= threshold(run, role) ? 1 : 0;
        return [run.name, role, kind, layer, head, alpha, score, named];
      }),
    ),
  );
  return card(
    {
      name: 'named-heads',
      title: 'Heads one can name',
      caption:
        'Heads whose score reaches the threshold of a role, best first, as type layer.head. ' +
        'Where no head does, the nearest one is shown in grey.',
      rows: [['run', 'role', 'attention', 'layer', 'head', 'alpha', 'score', 'named'], ...csv],
    },
    table(
      'named',
      [['role'], ...runs.map((run) => [[swatch(run), run.name]])],
      roles.map((role) => [title(role), ...runs.map((run) => namedCell(run, role))]),
    ),
  );
}

function namedCell(run, role) {
  const all = ranked(run, role);
  if (!all.length) return el('span', { class: 'far' }, whyNobody(run, role));
  const named = all.filter(({ score }) => score >= threshold(run, role));
  if (!named.length) return el('div', { class: 'far' }, scored(all[0]));
  const more = named.length - MOST_NAMED;
  return [
    named.slice(0, MOST_NAMED).map((found) => el('div', {}, scored(found))),
    more > 0 ? el('div', { class: 'far' }, `and ${more} more`) : null,
  ];
}

function scored({ head, score }) {
  const alpha = head.alpha === null ? null : el('span', { class: 'soft' }, ` alpha ${fixed(head.alpha, 2)}`);
  return [headLink(head, `${head.kind} ${head.layer}.${head.head}`), ` ${percent(score)}`, alpha];
}
