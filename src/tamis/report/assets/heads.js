// All heads of a type of attention, small, on one sentence.

const SMALLEST = 100;
const LARGEST = 210;
const AROUND = 30; // padding, border and gap

async function headsView(run, { sentence, kind }, width) {
  const most = Math.max(...run.layers[kind].map((site) => run.heads(site)));
  const across = Math.min(most, Math.floor(width / (SMALLEST + AROUND)));
  const side = Math.floor(Math.min(LARGEST, width / across - AROUND));
  const rows = run.layers[kind].map(async (site, layer) => {
    const weights = await run.weights(sentence, site);
    const heads = Array.from({ length: weights.heads }, (_, head) =>
      smallHead({ run, site, weights, head, layer, kind, causal: run.causal.includes(site) }, side),
    );
    return el('div', { class: 'layer' }, el('h3', {}, `layer ${layer}`), el('div', { class: 'smalls' }, heads));
  });
  return el('div', {}, await Promise.all(rows));
}

function smallHead(view, side) {
  const { run, weights, head, layer, site } = view;
  const ratio = weights.queries / Math.max(1, weights.keys);
  const [width, height] = [side / Math.max(1, ratio), side * Math.min(1, ratio)].map((size) => Math.max(8, size));
  const [canvas, context] = sharp(width, height, { 'aria-hidden': true });
  const cell = Math.min(width / Math.max(1, weights.keys), height / Math.max(1, weights.queries));
  paintWeights(context, view, { left: 0, top: 0, cell, box: { left: 0, top: 0, width, height } }, theme.colours);
  const alpha = run.alpha(site, head);
  const text = [
    `head ${head}`,
    alpha === null ? null : `alpha ${fixed(alpha, 2)}`,
    `density ${fixed(run.sites[site].density[head] ?? densityHere(view), 2)}`,
  ].filter(Boolean);
  const roles = rolesOf(run, site, head);
  const made = button(
    [
      canvas,
      el('span', { class: 'name' }, el('span', { class: 'unseen' }, `layer ${layer} `), text[0]),
      text.slice(1).map((fact) => el('small', {}, fact)),
      el('small', { class: 'role' }, roles.map(({ role }) => role).join(', ')),
    ],
    () => go({ run: run.number, layer, head, view: 'matrix' }),
    {
      class: 'small',
      'aria-current': String(layer === state.layer && head === state.head),
      'data-layer': layer,
      'data-head': head,
      'data-run': run.number,
    },
  );
  made.style.width = `${side + 18}px`;
  return made;
}

// The share of weights that are not zero, where no analysis has the mean over many texts.
function densityHere({ weights, head, causal }) {
  const { start, queries, keys } = weights;
  return (start[(head + 1) * queries] - start[head * queries]) / Math.max(1, causal ? (queries * (queries + 1)) / 2 : queries * keys);
}

const rolesOf = (run, site, head) =>
  (run.named_heads ?? []).filter((named) => named.site === site && named.head === head);
