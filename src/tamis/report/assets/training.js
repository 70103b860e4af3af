// Figures about training.

const CURVES = {
  loss: 'training loss',
  valid_loss: 'validation loss',
  valid_bleu: 'validation BLEU',
  density: 'density of all heads',
};

// One figure that was noted while training.
function trainingPanel(name, colours) {
  return {
    title: CURVES[name],
    lines: runs
      .filter((run) => run.curves[name])
      .map((run) => ({
        points: run.curves[name],
        colour: colourOf(run, colours),
        tip: ([step, value]) => [run.name, `step ${whole(step)}`, `${CURVES[name]} ${value.toPrecision(4)}`],
      })),
  };
}

function trainingCurves() {
  const names = Object.keys(CURVES).filter((name) => runs.some((run) => run.curves[name]));
  const rows = names.flatMap((name) =>
    runs.flatMap((run) => (run.curves[name] ?? []).map(([step, value]) => [run.name, name, step, value])),
  );
  return (
    names.length && {
      name: 'training',
      title: 'Training curves',
      caption:
        'Loss on the training data, then what was measured on the validation set at every checkpoint. ' +
        'Panels have scales of their own.',
      draw: (colours) => ({
        panels: names.map((name) => trainingPanel(name, colours)),
        x: { label: 'step', hold: [0], least: 1 },
        y: { own: true },
        entries: entriesOf(runs, colours),
      }),
      rows: [['run', 'figure', 'step', 'value'], ...rows],
    }
  );
}

// Panels of what was measured at some lengths, which stand side by side as they grow by factors.  A series is
// { run, points: [[length, value]], dashed, of }, where `of` is what it is of, if not of all.
function lengthFigure({ name, title, caption, unit, panels }) {
  const lengths = [...new Set(panels.flatMap(({ series }) => series.flatMap(({ points }) => points.map(([length]) => length))))].sort((a, b) => a - b);
  return (
    lengths.length && {
      name,
      title,
      caption,
      draw: (colours) => ({
        panels: panels.map(({ title: about, text, y, series }) => ({
          title: about,
          x: [-0.25, lengths.length - 0.75],
          y,
          ticks: lengths.map((length, at) => [at, tickText(length)]),
          lines: series.map(({ run, points, dashed, of = '' }) => ({
            points: points.map(([length, found]) => [lengths.indexOf(length), found]),
            colour: colourOf(run, colours),
            dashed,
            tip: ([at, found]) => [run.name + of, `${unit} ${whole(lengths[at])}`, `${about} ${text(found)}`],
          })),
        })),
        x: { label: unit },
        y: { own: true },
        columns: 2,
        entries: entriesOf(runs, colours),
      }),
      rows: [
        ['run', 'figure', unit, 'value'],
        ...panels.flatMap(({ title: about, series }) => series.flatMap(({ run, points, of = '' }) => points.map(([length, found]) => [run.name, about + of, length, found]))),
      ],
    }
  );
}

const roughly = (found) => percent(found, 0);
const AT_LENGTH = {
  perplexity: { title: 'perplexity', text: (found) => fixed(found, 2) },
  passkeys: { title: 'pass keys found', text: roughly, y: [0, 1] },
  exact_match: { title: 'exact match', text: roughly, y: [0, 1] },
  token_accuracy: { title: 'token accuracy', text: roughly, y: [0, 1] },
};

// What language models and models of tasks score at each length.
function scoresByLength() {
  const names = Object.keys(AT_LENGTH).filter((name) => runs.some((run) => run.lengths?.[name]));
  const series = (name) => runs.filter((run) => run.lengths?.[name]).map((run) => ({ run, points: run.lengths[name] }));
  return lengthFigure({
    name: 'lengths',
    title: 'Scores by length',
    caption:
      'Of language models: the perplexity of the same tokens in windows of each length, and the share of pass keys that are ' +
      'found in texts of that length. Of tasks: the share of sequences, and of tokens, that are right.',
    unit: names.includes('exact_match') ? 'length' : 'tokens',
    panels: names.map((name) => ({ ...AT_LENGTH[name], series: series(name) })),
  });
}

const SPREAD = {
  entropy: { title: 'entropy / log n', text: (found) => fixed(found, 3), y: [0, 1] },
  support: { title: 'keys with a weight', text: (found) => fixed(found, 1) },
};
const BIASED = { without: '', with: ', heads with a bias' };

// How heads spread as texts grow.
function spreadByLength() {
  const names = Object.keys(SPREAD).filter((name) => runs.some((run) => run.spread?.[name]));
  const kinds = Object.keys(BIASED);
  const series = (name) =>
    kinds.flatMap((kind) =>
      runs
        .filter((run) => run.spread?.[name]?.[kind])
        .map((run) => ({ run, points: run.spread[name][kind], dashed: kind === 'with', of: BIASED[kind] })),
    );
  const biased = names.some((name) => series(name).some(({ dashed }) => dashed));
  return lengthFigure({
    name: 'spread',
    title: 'How heads spread as texts grow',
    caption:
      'Entropy of the last rows of a text over the log of their keys, and how many keys they keep, means over heads. The first ' +
      'length is that of training. With softmax the entropy goes to 1.' +
      (biased ? ' Dashed: heads whose ALiBi bias holds them near.' : ''),
    unit: 'tokens',
    panels: names.map((name) => ({ ...SPREAD[name], series: series(name) })),
  });
}

// Which colour is which layer: all of a few, the ends and the middle of many.
function layerEntries(run, colours) {
  const layers = Math.max(...run.kinds.map((kind) => run.layers[kind].length));
  const some = layers <= 8 ? Array.from({ length: layers }, (_, layer) => layer) : [0, layers >> 1, layers - 1];
  const colour = (layer) => `rgb(${along(colours.layers, layer / Math.max(1, layers - 1)).join(' ')})`;
  return some.map((layer) => ({ name: `layer ${layer}`, colour: colour(layer) }));
}

function alphaTrajectories() {
  const some = runs.filter((run) => run.trajectories?.steps?.length > 1 && Object.keys(run.trajectories.sites).length);
  return some.map((run) => {
    const { steps, sites } = run.trajectories;
    const heads = Object.entries(sites)
      .filter(([site]) => site in run.sites)
      .flatMap(([site, rows]) => {
        const [kind, layer] = run.place(site);
        return rows[0].map((_, head) => ({ kind, layer, head, alphas: rows.map((row) => row[head]) }));
      });
    return {
      name: `alpha-trajectories-${run.name}`,
      title: runs.length > 1 ? `Alpha over training, ${run.name}` : 'Alpha over training',
      caption:
        'One line for each head: its alpha at every step that was noted. 1 is softmax, 2 is sparsemax. The ' +
        'stronger the colour, the later the layer.',
      draw: (colours) => ({
        panels: kindsOf([run]).map((kind) => ({
          title: KIND_NAMES[kind],
          lines: heads
            .filter((head) => head.kind === kind)
            .map((head) => ({
              points: head.alphas.map((alpha, k) => [steps[k], alpha]),
              colour: `rgb(${along(colours.layers, head.layer / Math.max(1, layersOf([run], kind) - 1)).join(' ')})`,
              thin: true,
              tip: ([step, alpha]) => [headName(head), `step ${whole(step)}`, `alpha ${fixed(alpha, 3)}`],
            })),
        })),
        x: { label: 'step', least: 1 },
        y: { domain: [1, 2] },
        entries: layerEntries(run, colours),
      }),
      rows: [
        ['attention', 'layer', 'head', 'step', 'alpha'],
        ...heads.flatMap(({ kind, layer, head, alphas }) =>
          alphas.map((alpha, k) => [kind, layer, head, steps[k], alpha]),
        ),
      ],
    };
  });
}
