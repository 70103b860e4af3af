// The overview: tables and figures, each with its caption and its numbers.

const figuresShown = [];

const SECTIONS = [
  ['Training', () => [trainingCurves(), scoresByLength(), ...alphaTrajectories()]],
  [
    'How sparse',
    () => [
      alphaHistograms(),
      densityHistograms(),
      headDensity(),
      layerDensity(),
      supportByLength(),
      spreadByLength(),
      nullShare(),
      ...scales(),
    ],
  ],
  ['What heads do', () => [diversity(), positions(), alignment(), headImportance()]],
];

// A figure or table with its title, caption and links.
function card({ name, title, caption, rows }, body, actions = []) {
  const links = [button('CSV', () => saveCsv(name, rows), { title: 'the numbers, for a spreadsheet' }), ...actions];
  return el(
    'figure',
    { id: `figure-${name}` },
    el('div', { class: 'title' }, el('h3', {}, title), el('div', { class: 'links' }, links)),
    body,
    el('figcaption', {}, caption),
  );
}

function figureCard(figure) {
  const place = el('div', { class: 'drawing' });
  // Papers are white: what is saved is light whatever the page is.
  const paper = () => drawFigure(figure, 900, THEMES.light);
  const actions = [
    button('SVG', () => saveSvg(figure.name, paper())),
    button('PNG', () => savePng(figure.name, paper())),
  ];
  figuresShown.push({ figure, place, width: 0, colours: null });
  return card(figure, place, actions);
}

function drawFigure(figure, width, colours) {
  const drawn = chart(figure.draw(colours), width, colours);
  drawn.setAttribute('aria-label', `${figure.title}. ${figure.caption}`);
  return drawn;
}

// Draws what has no drawing of the right width and colours yet.
function redraw() {
  const { colours } = theme;
  for (const shown of figuresShown) {
    const width = Math.floor(shown.place.clientWidth);
    if (!width || (width === shown.width && colours === shown.colours)) continue;
    Object.assign(shown, { width, colours });
    shown.place.replaceChildren(drawFigure(shown.figure, width, colours));
  }
}

function overview() {
  const section = (title, parts) => el('div', { class: 'section', id: anchorOf(title) }, el('h2', { tabindex: -1 }, title), parts);
  const drawn = SECTIONS.map(([title, figures]) => [title, figures().filter(Boolean).map(figureCard)]).filter(
    ([, cards]) => cards.length,
  );
  const heads = section('Heads by name', [namedHeads(), nullSignals(), everyHeadTable()]);
  byId('part-overview').append(
    el('p', { class: 'about' }, about()),
    contents(['Runs', ...drawn.map(([title]) => title), 'Heads by name']),
    el('div', { class: 'section', id: anchorOf('Runs') }, el('h2', { class: 'unseen', tabindex: -1 }, 'Runs'), runsTable()),
    ...drawn.map(([title, cards]) => section(title, cards)),
    heads,
  );
  new ResizeObserver(redraw).observe(byId('part-overview'));
  theme.listeners.push(redraw);
}

const anchorOf = (title) => `section-${title.toLowerCase().replaceAll(' ', '-')}`;

// Where sections begin, on a line that stays.  The address stays what it is: it names a view.
function contents(titles) {
  const jump = (title) => () => {
    byId(anchorOf(title)).scrollIntoView({ block: 'start' });
    byId(anchorOf(title)).querySelector('h2').focus({ preventScroll: true });
  };
  return el('nav', { id: 'contents', 'aria-label': 'Contents' }, titles.map((title) => button(title, jump(title))));
}

// What was looked at, in one sentence.
function about() {
  const data = [...new Set(runs.flatMap((run) => run.data ?? []))];
  const some = runs.length > 1 ? `${runs.length} runs` : 'One run';
  const where = data.length ? ` of ${data.join(', ')}` : '';
  const sizes = [...new Set(runs.map((run) => whole(run.sentences)))].join(' and ');
  const seen = `heads were looked at on ${sizes} sentences${where}`;
  return `${some}; ${seen}. Layers and heads are counted from 0, as in the code.`;
}
