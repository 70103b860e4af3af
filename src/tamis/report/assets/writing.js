// The text as it was written, with its tokens as marks on it: those of the keys are as dark as the weight they get.

const MOST_MARKED = 3000;

function writtenText(side, name, press) {
  const line = el('p', { dir: 'auto', 'data-side': name });
  let count = 0;
  for (const [text, token] of side.segments) {
    if (token === null || ++count > MOST_MARKED) line.append(text);
    else line.append(el('span', { class: 'piece', 'data-token': token, onclick: press ? () => press(token) : null }, text));
  }
  return line;
}

// Both sides of what is looked at.  Those that are queries can be pressed.
function writeSentence() {
  const { source, target } = runs[state.run].shown[state.sentence];
  const press = (token) => go({ row: token });
  const lines = [];
  if (source?.pieces.length) lines.push(writtenText(source, 'source', state.kind === 'encoder' ? press : null));
  if (target.segments.length) lines.push(writtenText(target, 'target', state.kind === 'encoder' ? null : press));
  byId('sentence').replaceChildren(...lines);
}

// Marks the row that is looked at, and what it looks at.
function markSentence(view) {
  const box = byId('sentence');
  const [queries, keys] = { encoder: ['source', 'source'], decoder: ['target', 'target'], cross: ['target', 'source'] }[state.kind];
  const both = box.querySelector('[data-side=source]') ? [queries, keys] : ['target', 'target'];
  for (const piece of box.querySelectorAll('.looks, .seen')) {
    piece.classList.remove('looks', 'seen');
    piece.style.background = piece.style.color = '';
  }
  const row = shownRow(view);
  for (const { key, share } of rowOf(view.weights, view.head, row).slice(0, MOST_MARKED)) {
    const piece = box.querySelector(`[data-side=${both[1]}] [data-token="${key}"]`);
    if (!piece || share < 0.02) continue;
    piece.classList.add('seen');
    piece.style.background = weightColour(share);
    piece.style.color = inkOn(along(theme.colours.ramp, rampPlace(share)));
  }
  box.querySelector(`[data-side=${both[0]}] [data-token="${row}"]`)?.classList.add('looks');
}

// Search by token: which tokens are called so, and who attends to one of them.
function finder(view) {
  const box = el('input', { type: 'search', placeholder: 'a token', 'aria-label': 'find a token', size: 14, dir: 'auto' });
  const found = el('div', { class: 'found' });
  const bare = (label) => label.replace(/^\u00b7/u, '').toLocaleLowerCase();
  const search = () => {
    const wanted = box.value.trim().toLocaleLowerCase();
    const places = wanted ? view.keys.flatMap((label, key) => (bare(label) === wanted || label.toLocaleLowerCase() === wanted ? [key] : [])) : [];
    const others = wanted && !places.length ? view.keys.flatMap((label, key) => (bare(label).includes(wanted) ? [key] : [])) : places;
    const total = others.length;
    found.replaceChildren(...(wanted ? [el('p', { class: 'soft' }, total ? `${whole(total)} of ${whole(view.keys.length)} tokens` : 'no such token')] : []), ...others.slice(0, 12).map((key) => attendedBy(view, key)));
  };
  box.addEventListener('input', search);
  return el('details', { class: 'finder' }, el('summary', {}, 'Who attends to \u2026?'), box, found);
}

function attendedBy(view, key) {
  const all = queriesOf(view.weights, view.head, key);
  const shown = all.slice(0, 8).map(({ query, share }) =>
    button(`${view.queries[query]} ${percent(share, 0)}`, () => go({ row: query }), { class: 'hit', dir: 'auto', title: `token ${query + 1}` }),
  );
  const text = all.length ? ` (token ${whole(key + 1)}) gets a weight from ${whole(all.length)}: ` : ` (token ${whole(key + 1)}) gets no weight from any query`;
  return el('p', {}, el('strong', { dir: 'auto' }, view.keys[key]), text, shown);
}
