// Colours, by theme: those of runs, and one ramp of lightness for weights.  Pictures by matplotlib have the same.

const THEMES = JSON.parse(byId('palette').textContent);

const theme = {
  listeners: [],
  get name() {
    return document.documentElement.dataset.theme;
  },
  get colours() {
    return THEMES[theme.name];
  },
  start() {
    const system = matchMedia('(prefers-color-scheme: dark)');
    theme.use(remembered('theme') ?? (system.matches ? 'dark' : 'light'));
    system.addEventListener('change', () => remembered('theme') ?? theme.use(system.matches ? 'dark' : 'light'));
  },
  use(name) {
    document.documentElement.dataset.theme = name in THEMES ? name : 'light';
    theme.listeners.forEach((listen) => listen());
  },
  toggle() {
    theme.use(theme.name === 'dark' ? 'light' : 'dark');
    remember('theme', theme.name);
  },
};

// A page in a sandbox has no storage.
function remembered(name) {
  try {
    return localStorage.getItem(`tamis-${name}`);
  } catch {
    return null;
  }
}

function remember(name, value) {
  try {
    localStorage.setItem(`tamis-${name}`, value);
  } catch {
    // Then it is not remembered.
  }
}

function channels(colour) {
  return [1, 3, 5].map((place) => parseInt(colour.slice(place, place + 2), 16));
}

// Red, green and blue at a place in [0, 1] along some colours.
function along(colours, place) {
  const at = Math.min(1, Math.max(0, place)) * (colours.length - 1);
  const low = Math.min(colours.length - 2, Math.floor(at));
  const [from, to] = [channels(colours[low]), channels(colours[low + 1])];
  return from.map((channel, k) => Math.round(channel + (at - low) * (to[k] - channel)));
}

// The square root spreads small weights, and the ramp does not begin at the background: no weight looks like none.
const rampPlace = (share) => Math.sqrt(Math.min(1, share));
const weightColour = (share, colours = theme.colours) => `rgb(${along(colours.ramp, rampPlace(share)).join(' ')})`;
const inkOn = ([r, g, b]) => (0.299 * r + 0.587 * g + 0.114 * b > 140 ? '#101418' : '#ffffff');
