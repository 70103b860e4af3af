// Heads that do something one can name.

const MOST_NAMED = 4;

// The column that gives each role, in the order in which figures are declared.
const ROLES = content.columns.filter(({ role, listed }) => role && listed !== false);

const threshold = (run, column) => run.thresholds[column.threshold];

// Why no head of a run can have a role: its data hold nothing to measure it on.
function whyNobody(run, { counted, missing }) {
  const counts = Object.values(run.sites)
    .map((site) => site[counted])
    .filter(isNumber);
  return counts.length && counts.every((count) => !count) ? missing : '\u2013';
}

// The heads of a run that can have a role, best first.
function ranked(run, role) {
  // A key of cross-attention has no place beside the query.
  const heads = run.everyHead().filter((head) => !(role.self_only && head.kind === 'cross'));
  const scored = heads.map((head) => ({ head, score: valueOf(head, role) }));
  return scored.filter(({ score }) => score).sort((a, b) => b.score - a.score);
}

// Roles that a head of some run has, and what there is to say of the others.
function namedHeads() {
  const named = (run, role) => ranked(run, role).filter(({ score }) => score >= threshold(run, role));
  const held = ROLES.filter((role) => runs.some((run) => named(run, role).length));
  const title = (role) => [
    el('strong', {}, role.role),
    el('small', {}, `${role.about}, at least ${percent(threshold(runs[0], role), 0)}`),
  ];
  const csv = runs.flatMap((run) =>
    ROLES.flatMap((role) =>
      ranked(run, role).map(({ head: { kind, layer, head, alpha }, score }) => {
        return [run.name, role.role, kind, layer, head, alpha, score, score >= threshold(run, role) ? 1 : 0];
      }),
    ),
  );
  const rows = held.map((role) => [title(role), ...runs.map((run) => namedCell(named(run, role)))]);
  const others = ROLES.filter((role) => !held.includes(role));
  return card(
    {
      name: 'named-heads',
      title: 'Heads one can name',
      caption: 'Heads whose score reaches the threshold of a role, best first, as type layer.head.',
      rows: [['run', 'role', 'attention', 'layer', 'head', 'alpha', 'score', 'named'], ...csv],
    },
    [
      rows.length ? table('named', [['role'], ...runs.map((run) => [[swatch(run), run.name]])], rows) : null,
      others.length ? el('p', { class: 'soft nobody' }, 'Nobody is: ', others.map((role, place) => `${place ? '; ' : ''}${role.role} (${nearest(role)})`), '.') : null,
    ],
  );
}

// How near the best head comes to a role that nobody has.
function nearest(role) {
  const best = runs.flatMap((run) => ranked(run, role).slice(0, 1)).sort((a, b) => b.score - a.score)[0];
  if (best) return `at most ${percent(best.score, 0)}`;
  return runs.map((run) => whyNobody(run, role)).find((why) => why !== '\u2013') ?? 'not measured';
}

function namedCell(named) {
  if (!named.length) return el('span', { class: 'far' }, '\u2013');
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
