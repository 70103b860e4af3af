// Colours: those of Okabe and Ito for runs, and one ramp of lightness for weights.  All can be told apart by
// colour-blind readers, in light and in dark.

const THEMES = {
  light: {
    page: '#ffffff',
    panel: '#ffffff',
    ink: '#1c2024',
    soft: '#5b636b',
    line: '#d9dde1',
    grid: '#eceef0',
    empty: '#f6f7f8',
    unseen: '#e3e6e9',
    mark: '#d55e00',
    runs: ['#0072b2', '#d55e00', '#009e73', '#b8589a', '#b07a00', '#3d3d3d', '#2f9ccf', '#7a5ea8'],
    ramp: ['#d3e4f3', '#9ac4e4', '#5a9fd0', '#2a72ae', '#0d4581', '#06244f'],
    layers: ['#8ab8dc', '#0c3c6e'],
  },
  dark: {
    page: '#14171a',
    panel: '#14171a',
    ink: '#e8eaec',
    soft: '#a2abb3',
    line: '#3a4046',
    grid: '#262b30',
    empty: '#1c2125',
    unseen: '#2a2f34',
    mark: '#f5a25d',
    runs: ['#56b4e9', '#f08a4b', '#2fc49a', '#dd95c2', '#e6b13c', '#c9c9c9', '#8ed0f3', '#b39ddb'],
    ramp: ['#23405c', '#2c6690', '#3b8fb8', '#67b9c8', '#aedfc6', '#fdf6c4'],
    layers: ['#3f6f96', '#d6ecfb'],
  },
};

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
