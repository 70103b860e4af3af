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

const AT_LENGTH = { perplexity: 'perplexity', passkeys: 'pass keys found' };

// What language models score at each length; lengths stand side by side, as they grow by factors.
function scoresByLength() {
  const names = Object.keys(AT_LENGTH).filter((name) => runs.some((run) => run.lengths?.[name]));
  const lengths = [...new Set(runs.flatMap((run) => names.flatMap((name) => (run.lengths?.[name] ?? []).map(([length]) => length))))].sort((a, b) => a - b);
  const place = (length) => lengths.indexOf(length);
  const value = (name, found) => (name === 'passkeys' ? percent(found, 0) : fixed(found, 2));
  const every = runs.flatMap((run) => names.flatMap((name) => (run.lengths?.[name] ?? []).map(([length, found]) => [run.name, name, length, found])));
  return (
    names.length && {
      name: 'lengths',
      title: 'How far a language model carries',
      caption: 'Perplexity of the same tokens in windows of each length, and the share of pass keys that are found in texts of that length.',
      draw: (colours) => ({
        panels: names.map((name) => ({
          title: AT_LENGTH[name],
          x: [-0.25, lengths.length - 0.75],
          ticks: lengths.map((length, at) => [at, tickText(length)]),
          lines: runs
            .filter((run) => run.lengths?.[name])
            .map((run) => ({
              points: run.lengths[name].map(([length, found]) => [place(length), found]),
              colour: colourOf(run, colours),
              tip: ([at, found]) => [run.name, `${whole(lengths[at])} tokens`, `${AT_LENGTH[name]} ${value(name, found)}`],
            })),
        })),
        x: { label: 'tokens' },
        y: { own: true },
        columns: 2,
        entries: entriesOf(runs, colours),
      }),
      rows: [['run', 'figure', 'tokens', 'value'], ...every],
    }
  );
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
