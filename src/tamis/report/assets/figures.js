// What figures of the overview have in common.  Each has a name, a caption, what to draw in some colours, and its
// numbers as rows.

const colourOf = (run, colours) => colours.runs[run.number % colours.runs.length];

const entriesOf = (some, colours) =>
  runs.length > 1 ? some.map((run) => ({ name: run.name, colour: colourOf(run, colours) })) : [];

// The same where a run is drawn as dots.
const dotsOf = (some, colours) => entriesOf(some, colours).map((entry) => ({ ...entry, dot: true }));

const kindsOf = (some) => KINDS.filter((kind) => some.some((run) => kind in run.layers));
const layersOf = (some, kind) => Math.max(...some.map((run) => run.layers[kind]?.length ?? 0));
const headName = ({ kind, layer, head }) => `${kind}, layer ${layer}, head ${head}`;
const open = (run, kind, layer, head) => () => go({ part: 'explorer', run: run.number, kind, layer, head });

// From so many on, dots are small.
const MANY = 200;

// A dot for each head of a type of attention: layers side by side, in each of them runs, in each of these heads from
// the lowest up.
function headDots(kind, value, text, colours) {
  const dots = [];
  const small = runs.reduce((sum, run) => sum + run.everyHead().length, 0) > MANY;
  runs.forEach((run, place) => {
    (run.layers[kind] ?? []).forEach((site, layer) => {
      const heads = run.everyHead().filter((head) => head.site === site && isNumber(value(head)));
      heads.sort((a, b) => value(a) - value(b));
      heads.forEach((head, rank) => {
        const within = place + 0.1 + (0.8 * (rank + 0.5)) / heads.length;
        dots.push({
          x: layer + 0.06 + (0.88 * within) / runs.length,
          y: value(head),
          colour: colourOf(run, colours),
          small,
          tip: () => [run.name, headName(head), text(head), 'press to look into it'],
          press: open(run, kind, layer, head.head),
        });
      });
    });
  });
  return dots;
}

// A figure of all heads: their value, what the axis must hold, and the value in words.
function headFigure(options, value, hold, text) {
  const panel = (kind, colours) => {
    const layers = layersOf(runs, kind);
    return {
      title: KIND_NAMES[kind],
      dots: headDots(kind, value, text, colours),
      x: [0, layers],
      ticks: Array.from({ length: layers }, (_, layer) => [layer + 0.5, String(layer)]),
      rules: Array.from({ length: Math.max(0, layers - 1) }, (_, layer) => layer + 1),
    };
  };
  const rows = runs.flatMap((run) =>
    run.everyHead().map((head) => [run.name, head.kind, head.layer, head.head, value(head)]),
  );
  return {
    ...options,
    draw: (colours) => ({
      panels: kindsOf(runs).map((kind) => panel(kind, colours)),
      x: { label: 'layer, its heads sorted' },
      y: { hold },
      entries: dotsOf(runs, colours),
    }),
    rows: [['run', 'attention', 'layer', 'head', options.name], ...rows],
  };
}

// One value for each layer and run.
function layerLines({ name, title, caption, value, ytitle, hold = [0], format }) {
  const points = (run, kind) => run.layers[kind].map((site, layer) => [layer, value(run, site)]);
  return {
    name,
    title,
    caption,
    draw: (colours) => ({
      panels: kindsOf(runs).map((kind) => ({
        title: KIND_NAMES[kind],
        x: [-0.25, layersOf(runs, kind) - 0.75],
        ticks: Array.from({ length: layersOf(runs, kind) }, (_, layer) => layer),
        lines: runs
          .filter((run) => run.layers[kind])
          .map((run) => ({
            points: points(run, kind),
            colour: colourOf(run, colours),
            tip: ([layer, found]) => [run.name, `${KIND_NAMES[kind]}, layer ${layer}`, `${ytitle} ${fixed(found, 3)}`],
          })),
      })),
      x: { label: 'layer' },
      y: { hold, format },
      entries: entriesOf(runs, colours),
      height: 180,
    }),
    rows: [
      ['run', 'attention', 'layer', name],
      ...runs.flatMap((run) =>
        kindsOf([run]).flatMap((kind) => points(run, kind).map(([layer, found]) => [run.name, kind, layer, found])),
      ),
    ],
  };
}
