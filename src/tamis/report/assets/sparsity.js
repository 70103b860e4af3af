// Figures about how sparse heads are.

function alphaHistograms() {
  const some = runs.filter((run) => Object.keys(run.alphas ?? {}).length);
  const bins = 20;
  const counts = (run, kind) => {
    const found = Array(bins).fill(0);
    for (const site of run.layers[kind] ?? []) {
      for (const alpha of run.alphas[site] ?? [])
        found[Math.min(bins - 1, Math.max(0, Math.floor((alpha - 1) * bins)))] += 1;
    }
    return found;
  };
  return (
    some.length && {
      name: 'alpha-histograms',
      title: 'Learned alphas',
      caption:
        'How many heads of each type of attention ended up with which alpha. Two humps mean that heads chose to ' +
        'be either dense or sparse.',
      draw: (colours) => ({
        panels: kindsOf(some).map((kind) => ({
          title: KIND_NAMES[kind],
          bars: some.flatMap((run, place) =>
            counts(run, kind)
              .map((count, bin) => ({ count, bin }))
              .filter(({ count }) => count)
              .map(({ count, bin }) => ({
                x0: 1 + (bin + place / some.length) / bins,
                x1: 1 + (bin + (place + 1) / some.length) / bins,
                y: count,
                colour: colourOf(run, colours),
                tip: () => [
                  run.name,
                  `alpha ${fixed(1 + bin / bins, 2)} to ${fixed(1 + (bin + 1) / bins, 2)}`,
                  `${count} ${count > 1 ? 'heads' : 'head'}`,
                ],
              })),
          ),
        })),
        x: { label: 'alpha', domain: [1, 2] },
        y: { hold: [0] },
        entries: entriesOf(some, colours),
        height: 170,
      }),
      rows: [
        ['run', 'attention', 'from', 'to', 'heads'],
        ...some.flatMap((run) =>
          kindsOf([run]).flatMap((kind) =>
            counts(run, kind).map((count, bin) => [run.name, kind, 1 + bin / bins, 1 + (bin + 1) / bins, count]),
          ),
        ),
      ],
    }
  );
}

function densityHistograms() {
  const some = runs.filter((run) => run.density_histograms);
  const shares = (run, kind) => {
    const counts = run.density_histograms[kind] ?? [];
    const total = counts.reduce((sum, count) => sum + count, 0);
    return counts.map((count) => count / Math.max(1, total));
  };
  return (
    some.length && {
      name: 'density-histograms',
      title: 'How dense rows are',
      caption:
        'Share of attention rows by their density: the part of the visible keys that got any weight at all. ' +
        'Softmax stands at 1.',
      draw: (colours) => ({
        panels: kindsOf(some).map((kind) => ({
          title: KIND_NAMES[kind],
          bars: some.flatMap((run, place) =>
            shares(run, kind).map((share, bin, all) => ({
              x0: (bin + place / some.length) / all.length,
              x1: (bin + (place + 1) / some.length) / all.length,
              y: share,
              colour: colourOf(run, colours),
              tip: () => [
                run.name,
                `density ${fixed(bin / all.length, 2)} to ${fixed((bin + 1) / all.length, 2)}`,
                `${percent(share)} of rows`,
              ],
            })),
          ),
        })),
        x: { label: 'density of a row', domain: [0, 1] },
        y: { domain: [0, 1], format: (value) => percent(value, 0) },
        entries: entriesOf(some, colours),
      }),
      rows: [
        ['run', 'attention', 'from', 'to', 'rows'],
        ...some.flatMap((run) =>
          kindsOf([run]).flatMap((kind) =>
            run.density_histograms[kind].map((count, bin, all) => [
              run.name,
              kind,
              bin / all.length,
              (bin + 1) / all.length,
              count,
            ]),
          ),
        ),
      ],
    }
  );
}

const headDensity = () =>
  headFigure(
    {
      name: 'head-density',
      title: 'Density of every head',
      caption:
        'Each dot is a head, sorted within its layer: the mean share of visible keys that it gives any weight. ' +
        'Press a dot to look into the head.',
    },
    measured('density'),
    [0, 1.05],
    (head) => `density ${fixed(measured('density')(head), 3)}${head.alpha === null ? '' : `, alpha ${fixed(head.alpha, 2)}`}`,
  );

const layerDensity = () =>
  layerLines({
    name: 'layer-density',
    title: 'Density per layer',
    caption: 'The mean over the heads of each layer.',
    value: (run, site) => mean(run.sites[site].density),
    ytitle: 'density',
    hold: [0, 1.05],
  });

// Lengths are counted one by one up to here, then in bins that end at powers of two.
const ONE_BY_ONE = 16;

// A line through single lengths, then a level piece for each bin.
function stretches(points) {
  const single = points.filter(([keys]) => keys <= ONE_BY_ONE);
  const bins = points
    .filter(([keys]) => keys > ONE_BY_ONE)
    .map(([keys, found]) => [
      [keys, found],
      [2 * (keys - 1), found],
    ]);
  return [...(single.length ? [single] : []), ...bins];
}

function supportByLength() {
  const points = (run, kind) => {
    const sites = (run.layers[kind] ?? []).map((site) => run.support_by_length[site]).filter(Boolean);
    return (sites[0]?.keys ?? []).map((keys, k) => [
      keys,
      mean(sites.map((site) => mean(site.support.map((head) => head[k])))),
    ]);
  };
  const some = runs.filter((run) => run.support_by_length);
  return (
    some.length && {
      name: 'support-by-length',
      title: 'How many keys a query keeps',
      caption:
        'Non-zero weights of a row against the number of keys that it sees, averaged over heads; from 17 keys on,' +
        ' level pieces are means of many lengths. A line that flattens keeps its focus in longer sentences.',
      draw: (colours) => ({
        panels: kindsOf(some).map((kind) => ({
          title: KIND_NAMES[kind],
          lines: some.flatMap((run) =>
            stretches(points(run, kind)).map((stretch) => ({
              points: stretch,
              colour: colourOf(run, colours),
              tip: ([keys, found]) => [
                run.name,
                stretch.length === 2 && keys > ONE_BY_ONE
                  ? `${stretch[0][0]} to ${stretch[1][0]} visible keys`
                  : `${keys} visible keys`,
                `${fixed(found, 1)} kept`,
              ],
            })),
          ),
        })),
        x: { label: 'visible keys', hold: [0], least: 1 },
        y: { hold: [0] },
        entries: entriesOf(some, colours),
      }),
      rows: [
        ['run', 'attention', 'visible keys', 'non-zero weights'],
        ...some.flatMap((run) =>
          kindsOf([run]).flatMap((kind) => points(run, kind).map(([keys, found]) => [run.name, kind, keys, found])),
        ),
      ],
    }
  );
}

const nullShare = () =>
  runs.some((run) => run.everyHead().some((head) => measured('null_share')(head) > 0)) &&
  headFigure(
    {
      name: 'null-share',
      title: 'Null attention',
      caption:
        'Share of rows in which a head attends to nothing at all, as ReLU attention can; entmax and softmax never do.',
    },
    measured('null_share'),
    [0],
    (head) => `${percent(measured('null_share')(head))} of rows are null`,
  );

// The middle and the spread of the scales of ASEntmax, a figure for each run that has them.
function scales() {
  return runs
    .filter((run) => Object.keys(run.scales ?? {}).length)
    .map((run) => {
      const sites = Object.entries(run.scales);
      const middle = (site) => site.quantiles.indexOf(0.5);
      return {
        name: `scales-${run.name}`,
        title: `Scale by length, ${run.name}`,
        caption:
          'The median factor on the scores of each head of ASEntmax against the number of keys that a query sees.',
        draw: (colours) => ({
          panels: kindsOf([run]).map((kind) => ({
            title: KIND_NAMES[kind],
            lines: sites
              .filter(([site]) => run.sites[site].kind === kind)
              .flatMap(([site, found]) =>
                found.heads.map((head, row) => ({
                  points: found.keys.map((keys, k) => [keys, found.by_keys.scale[row][k][middle(found)]]),
                  colour: colourOf(run, colours),
                  thin: true,
                  tip: ([keys, value]) => [`${site}, head ${head}`, `${keys} visible keys`, `scale ${fixed(value, 3)}`],
                })),
              ),
          })),
          x: { label: 'visible keys', hold: [0], least: 1 },
          y: { hold: [0] },
        }),
        rows: [
          ['site', 'head', 'visible keys', 'figure', ...sites[0][1].quantiles],
          ...sites.flatMap(([site, found]) =>
            Object.entries(found.by_keys).flatMap(([name, heads]) =>
              heads.flatMap((rows, row) =>
                rows.map((values, k) => [site, found.heads[row], found.keys[k], name, ...values]),
              ),
            ),
          ),
        ],
      };
    });
}
