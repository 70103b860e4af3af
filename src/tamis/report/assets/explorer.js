// The explorer: what to look at on top, below it the weights, and beside them one query at a time.

const ROW_WIDTH = 320;

// A row of buttons of which one is pressed.  Buttons stay in place while they can, and so does the focus.
function choice(name, key) {
  const group = el('div', { class: 'buttons', role: 'group', 'aria-label': name });
  let shown = '';
  const update = (options, current) => {
    const now = JSON.stringify(options);
    if (now !== shown) {
      group.replaceChildren(
        ...options.map(([value, text]) => button(text, () => go({ [key]: value }), { 'data-value': value })),
      );
      shown = now;
    }
    [...group.children].forEach((child, place) => child.setAttribute('aria-pressed', options[place][0] === current));
  };
  return { element: el('div', { class: 'choice' }, el('span', { class: 'soft' }, name), group), update };
}

// A list to pick from, where buttons would be too many or too long.
function list(name, pick) {
  const select = el('select', {
    'aria-label': name,
    onchange: () => pick(select.value === '' ? null : Number(select.value)),
  });
  let shown = '';
  const update = (options, current) => {
    const now = JSON.stringify(options);
    if (now !== shown)
      select.replaceChildren(...options.map(([value, text]) => el('option', { value: value ?? '' }, text)));
    shown = now;
    select.value = current ?? '';
  };
  return { element: el('label', { class: 'choice' }, el('span', { class: 'soft' }, name), select), update };
}

// Runs that stand beside the chosen one, each on or off.
function toggles(name) {
  const group = el('div', { class: 'buttons', role: 'group', 'aria-label': name });
  const update = (options, current) => {
    const flip = (value) => (current.includes(value) ? current.filter((other) => other !== value) : [...current, value]);
    const focused = group.contains(document.activeElement) ? document.activeElement.dataset.value : null;
    group.replaceChildren(
      ...options.map(([value, text]) =>
        button(text, () => go({ others: flip(value) }), { 'data-value': value, 'aria-pressed': String(current.includes(value)) }),
      ),
    );
    if (focused !== null) group.querySelector(`[data-value="${focused}"]`)?.focus();
  };
  return { element: el('div', { class: 'choice' }, el('span', { class: 'soft' }, name), group), update };
}

const controls = {
  run: choice('run', 'run'),
  kind: choice('attention', 'kind'),
  layer: choice('layer', 'layer'),
  head: choice('head', 'head'),
  view: choice('view', 'view'),
  others: toggles('compare with'),
  sentence: list('sentence', (sentence) => go({ sentence, row: null })),
};

const count = (size) => Array.from({ length: size }, (_, number) => [number, String(number)]);

function updateControls() {
  const run = runs[state.run];
  controls.run.element.hidden = runs.length < 2;
  controls.run.update(
    runs.map((its) => [its.number, its.name]),
    state.run,
  );
  controls.kind.update(
    run.kinds.map((kind) => [kind, kind]),
    state.kind,
  );
  controls.layer.update(count(layersIn(run, state.kind)), state.layer);
  controls.head.update(count(run.heads(siteOf(run, state))), state.head);
  controls.view.update(Object.entries(VIEWS), state.view);
  const others = comparable(state);
  controls.others.element.hidden = !others.length;
  controls.others.update(
    others.map((other) => [other.number, other.name]),
    state.others,
  );
  controls.sentence.element.hidden = Boolean(content.live);
  const sentences = content.sentences
    .map((sentence, place) => [place, sentence])
    .filter(([place]) => place in run.shown);
  controls.sentence.update(
    sentences.map(([place, { number, source, target }]) => [place, `${number}  ${source || target}`]),
    state.sentence,
  );
}

const stepSentence = (by) => {
  const own = Object.keys(runs[state.run].shown).map(Number);
  go({ sentence: own[clamp(own.indexOf(state.sentence) + by, own.length)], row: null });
};

// A run's weights for what is chosen, with all that views need to know.
async function viewOf(run) {
  const site = siteOf(run, state);
  const head = clamp(state.head, run.heads(site));
  const weights = await run.weights(state.sentence, site);
  return {
    run,
    site,
    head,
    weights,
    ...run.sides(state.sentence, state.kind),
    causal: run.causal.includes(site),
    normal: sumsToOne(weights),
  };
}

// What of the declared figures stands beside a head; null rows only where there are some.
const FACTS = ['density', 'support_size', 'normalised_entropy', 'null_share'];
const factText = (value, { name, digits }) => (value === null || (name === 'null_share' && !value) ? null : fixed(value, digits));

// What is known about a head, over all sentences and in this one.
function facts({ run, site, head, weights, causal }) {
  const alpha = run.alpha(site, head);
  const change = run.importance?.change?.[site]?.[head];
  const { start, queries, keys } = weights;
  const kept = start[(head + 1) * queries] - start[head * queries];
  const all = causal ? (queries * (queries + 1)) / 2 : queries * keys;
  const shown = content.columns.filter(({ name }) => FACTS.includes(name));
  const entries = [
    ['alpha', alpha === null ? null : fixed(alpha, 2)],
    ...shown.map((column) => [column.title, factText(valueOf({ run, site, head }, column), column)]),
    ['loss without it', isNumber(change) ? `${change < 0 ? '' : '+'}${fixed(change, 3)}` : null],
    ['here', `${whole(kept)} of ${whole(all)} weights are not zero (${percent(kept / Math.max(1, all), kept / all < 0.01 ? 2 : 0)})`],
  ].filter(([, value]) => value);
  const named = rolesOf(run, site, head).map(({ role, score }) =>
    el('div', { class: 'role' }, el('dt', {}, role), el('dd', {}, percent(score))),
  );
  return el(
    'dl',
    { class: 'facts' },
    named,
    entries.map(([name, value]) => el('div', {}, el('dt', {}, name), el('dd', {}, value))),
  );
}

function headRows(view) {
  const rows = [['query', 'query token', 'key', 'key token', 'weight']];
  view.queries.forEach((token, query) =>
    rowOf(view.weights, view.head, query).forEach(({ key, weight }) =>
      rows.push([query, token, key, view.keys[key], weight]),
    ),
  );
  return rows;
}

// Canvases that lie on one another as one, on the page's background.
function picture(layers) {
  const whole = el('canvas', { width: layers[0].width, height: layers[0].height });
  const context = whole.getContext('2d');
  context.fillStyle = theme.colours.page;
  context.fillRect(0, 0, whole.width, whole.height);
  layers.forEach((layer) => context.drawImage(layer, 0, 0));
  return whole;
}

const panelTitle = (run, text) => el('h2', { class: 'panel-title' }, runs.length > 1 ? [swatch(run), `${run.name}: `] : null, text);

// One head: its facts, its weights, and the chosen row.
function headPanel(view, width) {
  const { run, site, head } = view;
  const beside = !state.others.length && width > 900;
  const drawn = (state.view === 'links' ? linksView : matrixView)(view, beside ? width - ROW_WIDTH - 32 : width);
  const list = el('div', { class: 'list' }, rowList(view));
  const name = `${run.name}-${site}-head-${head}-sentence-${state.sentence}`;
  const links = [
    button('CSV', () => saveCsv(name, headRows(view)), { title: 'the weights that are not zero' }),
    button('PNG', () => picture(drawn.layers).toBlob((blob) => save(`${name}.png`, blob))),
  ];
  const [kind, layer] = run.place(site);
  const title = panelTitle(run, `${KIND_NAMES[kind]}, layer ${layer}, head ${head}`);
  const framed = el('div', { class: 'scroll', tabindex: 0, role: 'group', 'aria-label': `weights of ${describe(view)}` }, drawn.element);
  const element = el(
    'div',
    { class: 'panel', 'data-run': run.number },
    el('div', { class: 'title' }, title, el('div', { class: 'links' }, links)),
    el('div', { class: beside ? 'body beside' : 'body' }, framed, el('div', { class: 'words' }, facts(view), list, finder(view))),
  );
  const point = () => {
    const focused = list.contains(document.activeElement) ? document.activeElement.getAttribute('aria-label') : null;
    list.replaceChildren(...rowList(view));
    if (focused) list.querySelector(`[aria-label="${focused}"]`)?.focus();
  };
  const move = () => (drawn.mark(), point());
  return { element, move, point, view };
}

async function headsPanel(run, width) {
  const grid = await headsView(run, state, width);
  return {
    element: el(
      'div',
      { class: 'panel', 'data-run': run.number },
      panelTitle(run, `${KIND_NAMES[state.kind]}, all heads`),
      grid,
    ),
    move() {},
    point() {},
  };
}

// What shades mean, on the same ramp as the weights.
function shades() {
  const { colours } = theme;
  const box = (text, colour, edge) => {
    const square = el('span', { class: edge ? 'square edge' : 'square' });
    square.style.background = colour;
    return el('span', { class: 'shade' }, square, text);
  };
  const steps = [0, 0.01, 0.05, 0.1, 0.25, 0.5, 1].map((share) =>
    box(share ? percent(share, 0) : 'above 0', weightColour(share)),
  );
  const unseen = state.kind === 'decoder' ? box('not visible', colours.unseen, true) : null;
  return [
    el('span', { class: 'soft' }, 'a weight\u2019s share of its row:'),
    box('exactly 0', colours.empty, true),
    steps,
    unseen,
  ]
    .flat()
    .filter(Boolean);
}

let drawing = 0;
let standing = 0; // the last wish that was drawn, or that failed
let panels = [];

// What a run has no picture of.
function insteadOf(run) {
  const size = tooLarge(run, state.sentence);
  if (!size) return null;
  return el(
    'div',
    { class: 'panel', 'data-run': run.number },
    panelTitle(run, 'too large for a page'),
    el('p', {}, `This text has ${whole(size)} weights that are not zero, too many for one file. The live page shows it: `, el('code', {}, `tamis explore ${run.name}`)),
  );
}

async function panelOf(run, width, view) {
  const missing = insteadOf(run);
  if (missing) return { element: missing, move() {}, point() {} };
  return state.view === 'heads' ? headsPanel(run, width) : headPanel(view, width);
}

// Draws what is chosen.  Unpacking takes a moment: a newer wish overtakes an older one.
async function drawExplorer() {
  const own = ++drawing;
  updateControls();
  const place = byId('views');
  if (!Object.keys(runs[state.run].shown).length) {
    place.replaceChildren(el('p', { class: 'soft' }, content.live ? 'Type a text above.' : 'This run keeps no sentences to look at.'));
    byId('sentence').replaceChildren();
    drawn(own);
    return;
  }
  const chosen = [state.run, ...state.others].map((number) => runs[number]).filter((run) => state.sentence in run.shown);
  const across = place.clientWidth > 860 ? Math.min(chosen.length, place.clientWidth > 1400 ? 3 : 2) : 1;
  const width = Math.floor((place.clientWidth - 32 * (across - 1)) / across);
  if (!place.querySelector('.panel')) place.replaceChildren(el('p', { class: 'soft' }, 'reading weights \u2026'));
  const asked = Promise.all(chosen.map((run) => (tooLarge(run, state.sentence) ? null : viewOf(run))));
  const views = await asked.catch((error) => {
    if (!content.live) throw error;
    if (own === drawing) {
      standing = own;
      lostWeights(error);
    }
    return null;
  });
  if (!views || own !== drawing) return;
  pointedRow = null;
  const seen = views.filter(Boolean);
  tellingRow = seen.length ? mostTelling(seen) : 0;
  const made = await Promise.all(chosen.map((run, number) => panelOf(run, width, views[number])));
  if (own !== drawing) return;
  panels = made;
  place.dataset.count = chosen.length;
  place.style.setProperty('--across', across);
  place.replaceChildren(...panels.map(({ element }) => element));
  writeSentence();
  if (views[0] && state.view !== 'heads') markSentence(views[0]);
  byId('shades').replaceChildren(...shades());
  drawn(own);
}

// Only the row changed: what is drawn stays.  A drawing on its way takes the row along.
function moveRow() {
  if (standing !== drawing) return;
  pointedRow = null;
  panels.forEach(({ move }) => move());
  if (panels[0]?.view) markSentence(panels[0].view);
  drawn(drawing);
}

// The row under the pointer is shown as long as it is there.
function follow(row) {
  if (row === pointedRow) return;
  pointedRow = row;
  panels.forEach(({ point }) => point());
  if (panels[0]?.view) markSentence(panels[0].view);
}

// Says, to who asks, what is on the screen.
function drawn(wish) {
  standing = wish;
  document.body.dataset.drawn = hashOf({});
}

function explorer() {
  const arrows = [
    button('\u2039', () => stepSentence(-1), { 'aria-label': 'sentence before' }),
    button('\u203a', () => stepSentence(1), { 'aria-label': 'sentence after' }),
  ];
  controls.sentence.element.append(el('span', { class: 'buttons' }, arrows));
  controls.sentence.element.classList.add('wide');
  const { run, kind, layer, head, view, others, sentence } = controls;
  byId('part-explorer').append(
    ...(content.live ? [liveBox()] : []),
    el(
      'div',
      { class: 'controls' },
      [run, others, kind, layer, head, view, sentence].map(({ element }) => element),
    ),
    el('div', { id: 'sentence' }),
    el('div', { id: 'shades' }),
    el('div', { id: 'views' }),
  );
  watchers.push((before) => {
    if (state.part !== 'explorer') return;
    const same = Object.keys(state).every((name) => name === 'row' || String(before[name]) === String(state[name]));
    if (same && before.row !== state.row) moveRow();
    else drawExplorer();
  });
  theme.listeners.push(() => state.part === 'explorer' && drawExplorer());
  let width = 0;
  new ResizeObserver(() => {
    const now = byId('part-explorer').clientWidth;
    if (now && width && now !== width) drawExplorer();
    width = now;
  }).observe(byId('part-explorer'));
}
