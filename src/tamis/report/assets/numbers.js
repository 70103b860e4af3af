// Numbers as text, and axes that end on round ones.

const isNumber = (value) => typeof value === 'number' && Number.isFinite(value);

function fixed(value, digits) {
  return isNumber(value) ? value.toFixed(digits) : '';
}

const percent = (value, digits = 1) => (isNumber(value) ? `${(100 * value).toFixed(digits)} %` : '');
const whole = (value) => (isNumber(value) ? Math.round(value).toLocaleString('en') : '');

// Four digits that count: a weight of 0.00001 is not 0.
function weightText(value) {
  if (value === 0) return '0';
  return Math.abs(value) < 0.001 || Math.abs(value) >= 10000 ? value.toExponential(2) : value.toPrecision(4);
}

function tickText(value) {
  if (value === 0) return '0';
  if (Math.abs(value) >= 10000) return `${+(value / 1000).toPrecision(4)}k`;
  return String(+value.toPrecision(4));
}

// Round numbers from low to high: about as many as are wanted, and not fewer than `fewest` where steps may be so small.
function ticks(low, high, wanted, { fewest = 1, least = 0 } = {}) {
  const rough = (high - low || 1) / Math.max(1, wanted);
  const power = 10 ** Math.floor(Math.log10(rough));
  const sizes = [10, 5, 2, 1, 0.5].map((k) => k * power).filter((size) => size >= least);
  const enough = (size) => Math.floor(high / size + 1e-9) - Math.ceil(low / size - 1e-9) + 1 >= fewest;
  const from = Math.max(0, sizes.findLastIndex((size) => size >= rough * 0.999));
  const step = sizes.slice(from).find(enough) ?? sizes[from] ?? least;
  const found = [];
  for (let k = Math.ceil(low / step - 1e-9); k * step <= high + 1e-9 * step; k++)
    found.push(+(k * step).toPrecision(12));
  return found;
}

// The smallest and largest of some values, with a little air; `hold` are values that must be inside.
function extent(values, hold = []) {
  const all = [...values.filter(isNumber), ...hold];
  if (!all.length) return [0, 1];
  let low = all[0];
  let high = all[0];
  for (const value of all) {
    low = Math.min(low, value);
    high = Math.max(high, value);
  }
  const air = (high - low || Math.abs(high) || 1) * 0.06;
  return [hold.includes(low) ? low : low - air, hold.includes(high) ? high : high + air];
}

const mean = (values) => values.reduce((sum, value) => sum + value, 0) / Math.max(1, values.length);
