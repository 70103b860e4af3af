// The live page: a box to type in, what each model answers, and what becomes of it when heads are changed.

const PAUSE = 500; // milliseconds after the last key until models are asked
const live = {
  text: '',
  // By number of run: the answer that it is made to write, null for its own; what is changed; what runs; what is said.
  of: new Map(runs.map((run) => [run.number, { answer: null, silent: new Set(), alphas: new Map(), job: null, asked: null, said: '' }])),
};
const ASKS = { translation: 'Translate', continuation: 'Continue', nothing: 'Look' };
const headKey = (site, head) => `${site} ${head}`;
const keyParts = (key) => [key.slice(0, key.lastIndexOf(' ')), Number(key.slice(key.lastIndexOf(' ') + 1))];
const isChanged = (own) => own.silent.size + own.alphas.size > 0;

function wishOf(run) {
  const own = live.of.get(run.number);
  return {
    run: run.number,
    text: live.text,
    ...(own.answer === null ? {} : { answer: own.answer }),
    silent: [...own.silent].map(keyParts),
    alphas: [...own.alphas].map(([key, alpha]) => [...keyParts(key), alpha]),
  };
}

const later = { timer: 0 };
function soon(act) {
  clearTimeout(later.timer);
  later.timer = setTimeout(act, PAUSE);
}

// Asks those models that are looked at and have not answered to just this.
function askAll() {
  for (const number of [state.run, ...state.others]) ask(runs[number]);
}

async function ask(run) {
  const own = live.of.get(run.number);
  const wish = JSON.stringify(wishOf(run));
  if (!live.text.trim() || own.asked === wish) return;
  own.job?.abort();
  own.job = new AbortController();
  own.asked = wish;
  say(own, 'asking \u2026');
  try {
    const found = await answerTo(wish, own.job.signal);
    run.shown = { 0: found };
    run.causal = found.causal;
    say(own, '');
    go({ sentence: 0 });
  } catch (error) {
    if (error.name === 'AbortError') return;
    own.asked = null;
    say(own, error.message);
  }
}

async function answerTo(body, signal) {
  const headers = { 'Content-Type': 'application/json' };
  return (await patiently('api/look', { method: 'POST', headers, body, signal })).json();
}

// A server that is busy is asked again, a little later each time.
async function patiently(address, options = {}) {
  for (let tries = 1; ; tries++) {
    const response = await fetch(address, options).catch((error) => {
      throw error.name === 'AbortError' ? error : new Error('the server does not answer: is it still running?');
    });
    if (response.ok) return response;
    if (![429, 503].includes(response.status) || tries > 6) throw new Error((await response.json()).error);
    await new Promise((done) => setTimeout(done, 300 * 2 ** tries * (0.5 + Math.random())));
  }
}

async function fetchedWeights(shown, site) {
  const response = await patiently(`api/weights/${shown.id}/${encodeURIComponent(site)}`);
  return unpack(shown.sites[site].shape, await inflated(response.body));
}

// What was seen is gone from the server, or it is gone itself: say so, and ask anew when the reader asks.
function lostWeights(error) {
  for (const number of [state.run, ...state.others]) {
    const own = live.of.get(number);
    own.asked = null;
    say(own, error.message);
  }
}

function say(own, text) {
  own.said = text;
  drawAnswers();
}

function liveBox() {
  const box = el('textarea', {
    id: 'text', rows: 2, maxlength: 131072, dir: 'auto', 'aria-label': 'text to look at', spellcheck: 'false',
  });
  const take = () => {
    live.text = box.value;
    for (const own of live.of.values()) own.answer = null;
    askAll();
  };
  box.addEventListener('input', () => soon(take));
  box.addEventListener('keydown', (event) => {
    if (event.key === 'Enter' && !event.shiftKey) {
      event.preventDefault();
      clearTimeout(later.timer);
      take();
    }
  });
  const press = button('', take, { class: 'strong', id: 'ask' });
  watchers.push((before) => {
    if (before.run !== state.run || String(before.others) !== String(state.others)) askAll();
    const { writes } = runs[state.run];
    press.textContent = ASKS[writes];
    box.placeholder = writes === 'translation' ? 'Type a sentence to translate' : 'Type a text';
    drawAnswers();
  });
  return el(
    'div',
    { id: 'live' },
    el('div', { class: 'ask' }, box, press),
    el('div', { id: 'answers' }),
    el('div', { id: 'changes' }),
  );
}

const answerCards = new Map();

// What each of the models answered, in a box that can be written into.
function drawAnswers() {
  const chosen = [state.run, ...state.others];
  const cards = chosen.map((number) => {
    if (!answerCards.has(number)) answerCards.set(number, answerCard(runs[number]));
    answerCards.get(number).update();
    return answerCards.get(number).element;
  });
  const place = byId('answers');
  if (String([...place.children].map((card) => card.dataset.run)) !== String(chosen)) place.replaceChildren(...cards);
  drawChanges();
}

function answerCard(run) {
  const own = live.of.get(run.number);
  const box = el('textarea', { rows: 2, dir: 'auto', class: 'answer', 'aria-label': `answer of ${run.name}: write another to see how attention moves`, placeholder: 'What it answers, to change as you like', spellcheck: 'false' });
  const said = el('p', { class: 'said', role: 'status' });
  const facts = el('p', { class: 'soft score' });
  const chances = el('p', { class: 'chances', dir: 'auto' });
  const links = el('div', { class: 'scroll', tabindex: 0, role: 'group', 'aria-label': 'word alignment' });
  const back = button('its own answer', () => {
    own.answer = null;
    ask(run);
  });
  box.addEventListener('input', () => {
    own.answer = box.value;
    soon(() => ask(run));
  });
  let drawn = null;
  const update = () => {
    said.textContent = own.said;
    said.hidden = !own.said;
    const shown = run.shown[0];
    back.hidden = own.answer === null;
    if (!shown || shown === drawn) return;
    drawn = shown;
    if (own.answer === null || document.activeElement !== box) box.value = shown.answer;
    box.hidden = run.writes === 'nothing';
    facts.replaceChildren(...scoreLines(run, shown).filter(Boolean));
    chances.replaceChildren(...chanceMarks(shown));
    links.replaceChildren(...(shown.links ? [alignmentPicture(shown.links)] : []));
    links.hidden = !shown.links;
  };
  const name = runs.length > 1 ? el('h2', { class: 'panel-title' }, swatch(run), run.name) : null;
  const element = el('div', { class: 'card', 'data-run': run.number }, name, said, box, facts, chances, links, back);
  return { element, update };
}

const logText = (value) => value.toFixed(2).replace('-', '\u2212');

// How likely the answer is, and what was so before something was changed.
function scoreLines(run, shown) {
  if (!shown.chances.length) return [`${fixed(shown.seconds, 1)} s`];
  const one = `log-probability ${logText(shown.score)} over ${shown.chances.length} tokens, ${fixed(shown.seconds, 1)} s`;
  const other = shown.own === null || shown.own === shown.answer ? null : el('span', { class: 'line' }, 'by itself it writes: ', el('q', { dir: 'auto' }, shown.own));
  if (!shown.before) return [one, other];
  const change = shown.score - shown.before.score;
  const times = Math.exp(change);
  return [
    one,
    other,
    el('span', { class: 'line changed' }, `the change makes this answer ${times >= 1 ? `${factor(times)} times likelier` : `${factor(1 / times)} times less likely`} (${logText(shown.before.score)} before)`),
    shown.own === null || shown.before.own === shown.own
      ? el('span', { class: 'line' }, 'its own answer stays the same')
      : el('span', { class: 'line' }, 'before the change it wrote: ', el('q', { dir: 'auto' }, shown.before.own)),
  ];
}

const factor = (times) => (times < 10 ? times.toFixed(2) : times < 1e6 ? whole(times) : times.toExponential(1));

// Each token that was written, underlined the more the less likely it was.
function chanceMarks({ chances }) {
  return chances.slice(0, 400).map(({ row, token, chance, best }) => {
    const text = token.replace(/[\u2581\u0120]/gu, ' ');
    const made = button(text, () => go({ row }), {
      class: 'chance',
      title: `${percent(chance)}${best === token ? '' : `; likeliest: ${best.replace(/[\u2581\u0120]/gu, '')}`}`,
      'aria-label': `${text.trim()}, ${percent(chance)}`,
    });
    made.style.borderBottomWidth = `${Math.round(1 + 4 * (1 - chance))}px`;
    return made;
  });
}

// Words of both sides and the links between them.
function alignmentPicture({ source, target, pairs }) {
  const font = `14px ${FONT}`;
  ruler.font = font;
  const places = (words) => {
    let x = 4;
    return words.map((word) => {
      const width = ruler.measureText(word).width;
      const middle = x + width / 2;
      x += width + 14;
      return { word, middle, end: x };
    });
  };
  const [above, below] = [places(source), places(target)];
  const width = Math.ceil(Math.max(above.at(-1)?.end ?? 0, below.at(-1)?.end ?? 0));
  const text = (y) => ({ word, middle }) => label(word, middle, y, { 'text-anchor': 'middle', class: 'word' });
  const named = pairs.map(([i, j]) => `${source[i]} \u2013 ${target[j]}`).join(', ');
  const picture = svg('svg', { width, height: 92, viewBox: `0 0 ${width} 92`, role: 'img', class: 'alignment', 'aria-label': `word alignment: ${named || 'no links'}` });
  for (const [i, j] of pairs) picture.append(svg('line', { x1: above[i].middle, y1: 22, x2: below[j].middle, y2: 68, class: 'link' }));
  picture.append(...above.map(text(15)), ...below.map(text(84)));
  return picture;
}

// The switch and the slider of the head that is looked at, and the list of all that is changed.
function drawChanges() {
  const run = runs[state.run];
  const own = live.of.get(run.number);
  const site = siteOf(run, state);
  const key = headKey(site, state.head);
  const name = `${site} head ${state.head}`;
  const now = JSON.stringify([run.number, key, [...own.silent], [...own.alphas]]);
  const place = byId('changes');
  if (place.dataset.now === now) return;
  place.dataset.now = now;
  const again = () => (drawChanges(), soon(() => ask(run)));
  const silence = el('input', { type: 'checkbox', id: 'silence', onchange: () => (own.silent[silence.checked ? 'add' : 'delete'](key), again()) });
  silence.checked = own.silent.has(key);
  const listed = [
    ...[...own.silent].map((one) => [`${one.replace(/ (\d+)$/, ' head $1')} silent`, () => own.silent.delete(one)]),
    ...[...own.alphas].map(([one, alpha]) => [`${one.replace(/ (\d+)$/, ' head $1')} alpha ${fixed(alpha, 2)}`, () => own.alphas.delete(one)]),
  ];
  const chips = listed.slice(0, 24).map(([text, undo]) => button([text, ' \u00d7'], () => (undo(), again()), { 'aria-label': `undo: ${text}` }));
  const clear = listed.length > 1 ? button('undo all', () => (own.silent.clear(), own.alphas.clear(), again())) : null;
  place.replaceChildren(
    el(
      'fieldset',
      {},
      el('legend', {}, `Change ${runs.length > 1 ? `${run.name}: ` : ''}${name}`),
      el('label', { class: 'choice' }, silence, 'silent'),
      alphaSlider(run, own, site, key, again),
      el('div', { class: 'chips' }, chips, listed.length > 24 ? `and ${listed.length - 24} more` : null, clear),
    ),
  );
}

const SCOPES = { head: 'this head', layer: 'all heads of this layer', all: 'all heads of the model' };
let scope = 'head';

function alphaSlider(run, own, site, key, again) {
  if (!run.adjustable.includes(site)) return el('span', { class: 'soft' }, 'no alpha: this attention is not entmax');
  const known = own.alphas.get(key) ?? run.alpha(site, state.head);
  const shown = el('output', { class: 'soft' }, known === null ? 'as it is' : fixed(known, 2));
  const slider = el('input', {
    type: 'range', min: 1, max: 2, step: 0.01, id: 'alpha', 'aria-label': 'alpha: 1 is softmax, 2 is sparsemax',
    oninput: () => (shown.textContent = fixed(Number(slider.value), 2)),
    onchange: () => {
      const sites = scope === 'all' ? run.adjustable : [site];
      const heads = scope === 'head' ? [key] : sites.flatMap((one) => Array.from({ length: run.heads(one) }, (_, head) => headKey(one, head)));
      for (const one of heads) own.alphas.set(one, Number(slider.value));
      again();
    },
  });
  slider.value = known ?? 1.5;
  const pick = el('select', { 'aria-label': 'of which heads', onchange: () => (scope = pick.value) }, Object.entries(SCOPES).map(([value, text]) => el('option', { value }, text)));
  pick.value = scope;
  return el('span', { class: 'choice' }, el('label', { for: 'alpha' }, 'alpha'), slider, shown, pick);
}
