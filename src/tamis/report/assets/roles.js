// Figures about what heads do, and which of them matter.

const diversity = () =>
  layerLines({
    name: 'diversity',
    title: 'How differently heads attend',
    caption:
      'Jensen-Shannon divergence between the heads of a layer, scaled to lie between 0 (all alike) and 1, ' +
      'averaged over queries. Null rows are left out.',
    value: (run, site) => run.sites[site].diversity,
    ytitle: 'divergence',
  });

// Distances at which some row sees a key, each with the weight there.
const seenOffsets = (head) =>
  head.run.offsets.map((offset, place) => [offset, valueOf(head, { name: 'confidence', place })]).filter(([, weight]) => isNumber(weight));

function positions() {
  const heads = runs.flatMap((run) => run.everyHead()).filter((head) => head.kind !== 'cross');
  return (
    heads.length && {
      name: 'positions',
      title: 'Attention by position',
      caption:
        'Each dot is a head: its mean weight on the key at each distance from the query, -1 being the token ' +
        'before. A head that puts most of its weight on one distance is positional. Press a dot to look into the ' +
        'head.',
      draw: (colours) => ({
        panels: kindsOf(runs)
          .filter((kind) => kind !== 'cross')
          .map((kind) => ({
            title: KIND_NAMES[kind],
            dots: heads
              .filter((head) => head.kind === kind)
              .flatMap((head) =>
                seenOffsets(head).map(([offset, weight]) => ({
                  x: offset + (0.7 * (head.run.number + 0.5)) / runs.length - 0.35,
                  y: weight,
                  colour: colourOf(head.run, colours),
                  tip: () => [
                    head.run.name,
                    headName(head),
                    `${percent(weight)} at ${offset > 0 ? '+' : ''}${offset}`,
                  ],
                  press: open(head.run, kind, head.layer, head.head),
                })),
              ),
          })),
        x: { label: 'distance of the key from the query', ticks: runs[0].offsets, domain: [-3.5, 3.5] },
        y: { domain: [0, 1], format: (value) => percent(value, 0) },
        entries: dotsOf(runs, colours),
        columns: 2,
      }),
      rows: [
        ['run', 'attention', 'layer', 'head', 'distance', 'confidence'],
        ...heads.flatMap((head) =>
          seenOffsets(head).map(([offset, weight]) => [
            head.run.name,
            head.kind,
            head.layer,
            head.head,
            offset,
            weight,
          ]),
        ),
      ],
    }
  );
}

function alignment() {
  const some = runs.filter((run) => run.alignment?.normal);
  const measures = {
    'best head': (layer) => Math.min(...layer.heads.map((score) => score.aer)),
    'average of heads': (layer) => layer.average.aer,
  };
  const each = (visit) =>
    some.flatMap((run) =>
      ['normal', 'shifted'].flatMap((mode) =>
        Object.keys(measures).map((measure) =>
          visit(
            run,
            mode,
            measure,
            run.alignment[mode].map((layer, number) => [number, measures[measure](layer)]),
          ),
        ),
      ),
    );
  const layers = Math.max(0, ...some.map((run) => run.alignment.normal.length));
  return (
    some.length && {
      name: 'alignment',
      title: 'Alignment error rate of cross-attention',
      caption:
        'Word alignments read off the weights against gold ones, lower is better. Normal: at the step that ' +
        'predicts a word; shifted: at the step that reads it.',
      draw: (colours) => ({
        panels: ['normal', 'shifted'].map((mode) => ({
          title: mode,
          x: [-0.25, layers - 0.75],
          ticks: Array.from({ length: layers }, (_, layer) => layer),
          lines: each(
            (run, its, measure, points) =>
              its === mode && {
                points,
                colour: colourOf(run, colours),
                dashed: measure !== 'best head',
                tip: ([layer, aer]) => [run.name, `layer ${layer}, ${measure}`, `AER ${percent(aer)}`],
              },
          ).filter(Boolean),
        })),
        x: { label: 'layer' },
        y: { domain: [0, 1], format: (value) => percent(value, 0) },
        columns: 2,
        entries: [
          ...entriesOf(some, colours),
          { name: 'best head', colour: colours.soft },
          { name: 'average of heads', colour: colours.soft, dashed: true },
        ],
      }),
      rows: [
        ['run', 'step', 'layer', 'measure', 'AER'],
        ...each((run, mode, measure, points) =>
          points.map(([layer, aer]) => [run.name, mode, layer, measure, aer]),
        ).flat(),
      ],
    }
  );
}

const headImportance = () =>
  runs.some((run) => run.importance) &&
  headFigure(
    {
      name: 'head-importance',
      title: 'Which heads matter',
      caption:
        'How much the loss on the validation set grows, in nats per token, when one head is silenced. Near 0 a ' +
        'head is idle.',
    },
    (head) => head.importance,
    [0],
    (head) => `loss ${head.importance < 0 ? '' : '+'}${fixed(head.importance, 4)} without it`,
  );
