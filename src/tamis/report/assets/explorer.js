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

const controls = {
  run: choice('run', 'run'),
  kind: choice('attention', 'kind'),
  layer: choice('layer', 'layer'),
  head: choice('head', 'head'),
  view: choice('view', 'view'),
  other: list('compare with', (other) => go({ other })),
  sentence: list('sentence', (sentence) => go({ sentence, row: 0 })),
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
  controls.other.element.hidden = !others.length;
  controls.other.update([[null, 'none'], ...others.map((other) => [other.number, other.name])], state.other);
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
  go({ sentence: own[clamp(own.indexOf(state.sentence) + by, own.length)], row: 0 });
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

// What is known about a head, over all sentences and in this one.
function facts({ run, site, head, weights, causal }) {
  const figures = run.sites[site];
  const alpha = run.alpha(site, head);
  const change = run.importance?.change?.[site]?.[head];
  const { start, queries, keys } = weights;
  const kept = start[(head + 1) * queries] - start[head * queries];
  const all = causal ? (queries * (queries + 1)) / 2 : queries * keys;
  const entries = [
    ['alpha', alpha === null ? null : fixed(alpha, 2)],
    ['density', fixed(figures.density[head], 3)],
    ['keys kept', fixed(figures.support_size[head], 1)],
    ['entropy', fixed(figures.normalised_entropy[head], 2)],
    ['null rows', figures.null_share[head] ? percent(figures.null_share[head]) : null],
    ['loss without it', isNumber(change) ? `${change < 0 ? '' : '+'}${fixed(change, 3)}` : null],
    ['here', `${whole(kept)} of ${whole(all)} weights are not zero`],
  ].filter(([, value]) => value !== null);
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

const panelTitle = (run, text) => el('h3', {}, runs.length > 1 ? [swatch(run), `${run.name}: `] : null, text);

// One head: its facts, its weights, and the chosen row.
function headPanel(view, width) {
  const { run, site, head } = view;
  const beside = state.other === null && width > 900;
  const drawn = (state.view === 'links' ? linksView : matrixView)(view, beside ? width - ROW_WIDTH - 32 : width);
  const list = el('div', { class: 'list' }, rowList(view));
  const name = `${run.name}-${site}-head-${head}-sentence-${state.sentence}`;
  const links = [
    button('CSV', () => saveCsv(name, headRows(view)), { title: 'the weights that are not zero' }),
    button('PNG', () => picture(drawn.layers).toBlob((blob) => save(`${name}.png`, blob))),
  ];
  const [kind, layer] = run.place(site);
  const title = panelTitle(run, `${KIND_NAMES[kind]}, layer ${layer}, head ${head}`);
  const element = el(
    'div',
    { class: 'panel', 'data-run': run.number },
    el('div', { class: 'title' }, title, el('div', { class: 'links' }, links)),
    facts(view),
    el('div', { class: beside ? 'body beside' : 'body' }, el('div', { class: 'scroll' }, drawn.element), list),
  );
  const move = () => {
    drawn.mark();
    list.replaceChildren(...rowList(view));
  };
  return { element, move };
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
let panels = [];

// Draws what is chosen.  Unpacking takes a moment: a newer wish overtakes an older one.
async function drawExplorer() {
  const own = ++drawing;
  updateControls();
  const place = byId('views');
  if (!Object.keys(runs[state.run].shown).length) {
    place.replaceChildren(el('p', {}, 'This run keeps no sentences to look at.'));
    return;
  }
  const chosen = [state.run, state.other].filter((number) => number !== null).map((number) => runs[number]);
  const width = Math.floor(
    place.clientWidth > 860 ? (place.clientWidth - 32 * (chosen.length - 1)) / chosen.length : place.clientWidth,
  );
  const made = await Promise.all(
    chosen.map(async (run) => (state.view === 'heads' ? headsPanel(run, width) : headPanel(await viewOf(run), width))),
  );
  if (own !== drawing) return;
  panels = made;
  place.dataset.count = chosen.length;
  place.replaceChildren(...panels.map(({ element }) => element));
  const { source, target } = content.sentences[state.sentence];
  byId('sentence').replaceChildren(...[source, target].filter(Boolean).map((text) => el('p', { dir: 'auto' }, text)));
  byId('shades').replaceChildren(...shades());
  drawn();
}

// Only the row changed: what is drawn stays.
function moveRow() {
  panels.forEach(({ move }) => move());
  drawn();
}

// Says, to who asks, what is on the screen.
function drawn() {
  document.body.dataset.drawn = hashOf({});
}

function explorer() {
  const arrows = [
    button('\u2039', () => stepSentence(-1), { 'aria-label': 'sentence before' }),
    button('\u203a', () => stepSentence(1), { 'aria-label': 'sentence after' }),
  ];
  controls.sentence.element.append(el('span', { class: 'buttons' }, arrows));
  controls.sentence.element.classList.add('wide');
  const { run, kind, layer, head, view, other, sentence } = controls;
  byId('explorer').append(
    el(
      'div',
      { class: 'controls' },
      [run, other, kind, layer, head, view, sentence].map(({ element }) => element),
    ),
    el('div', { id: 'sentence' }),
    el('div', { id: 'shades' }),
    el('div', { id: 'views' }),
  );
  watchers.push((before) => {
    if (state.part !== 'explorer') return;
    const same = Object.keys(state).every((name) => name === 'row' || before[name] === state[name]);
    if (same && before.row !== state.row) moveRow();
    else drawExplorer();
  });
  theme.listeners.push(() => state.part === 'explorer' && drawExplorer());
  let width = 0;
  new ResizeObserver(() => {
    const now = byId('explorer').clientWidth;
    if (now && width && now !== width) drawExplorer();
    width = now;
  }).observe(byId('explorer'));
}
