// Making elements.  Text is always text: nothing here, or anywhere, parses markup.

const SVG = 'http://www.w3.org/2000/svg';

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith('on')) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? '' : String(value));
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined));
  return element;
}

const el = (name, attributes = {}, ...children) => fill(document.createElement(name), attributes, children);
const svg = (name, attributes = {}, ...children) => fill(document.createElementNS(SVG, name), attributes, children);
const byId = (id) => document.getElementById(id);

function button(label, press, attributes = {}) {
  return el('button', { type: 'button', onclick: press, ...attributes }, label);
}

function save(name, blob) {
  const link = el('a', { href: URL.createObjectURL(blob), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

// A field is quoted where it must be.  One that a spreadsheet would take for a formula gets a quote before it.
function csvField(value) {
  if (value === null || value === undefined) return '';
  if (typeof value === 'number') return String(value);
  const text = /^[=+\-@\t\r]/.test(value) ? `'${value}` : String(value);
  return /[",\r\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
}

function saveCsv(name, rows) {
  const text = rows.map((row) => row.map(csvField).join(',') + '\r\n').join('');
  save(`${name}.csv`, new Blob([text], { type: 'text/csv;charset=utf-8' }));
}

// What is under the pointer, in words.
const tip = {
  show(lines, x, y) {
    const box = byId('tip');
    box.replaceChildren(...lines.map((line, number) => el(number ? 'div' : 'strong', { dir: 'auto' }, line)));
    box.hidden = false;
    const { width, height } = box.getBoundingClientRect();
    const left = x + 16 + width > innerWidth ? x - 16 - width : x + 16;
    const top = y + 16 + height > innerHeight ? y - 16 - height : y + 16;
    box.style.left = `${Math.max(4, left)}px`;
    box.style.top = `${Math.max(4, top)}px`;
  },
  hide() {
    byId('tip').hidden = true;
  },
};
