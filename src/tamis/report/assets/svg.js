// Figures as SVG, in one set of colours; what is drawn can be saved as it is.

const FONT = 'system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif';

const label = (text, x, y, attributes = {}) =>
  svg('text', { x, y, 'font-size': 11, 'font-family': FONT, ...attributes }, text);

function scale([low, high], [from, to]) {
  const slope = (to - from) / (high - low || 1);
  return (value) => from + (value - low) * slope;
}

const path = (points) => points.map(([x, y], k) => `${k ? 'L' : 'M'}${x.toFixed(1)} ${y.toFixed(1)}`).join('');

function legend(entries, x, y, colours) {
  const group = svg('g', { class: 'legend' });
  for (const { name, colour, dashed, dot } of entries) {
    const line = { x1: x, x2: x + 18, y1: y - 4, y2: y - 4, stroke: colour, 'stroke-width': 3 };
    group.append(
      dot
        ? svg('circle', { cx: x + 9, cy: y - 4, r: 4, fill: colour })
        : svg('line', { ...line, 'stroke-dasharray': dashed && '4 3' }),
      label(name, x + 24, y, { fill: colours.ink }),
    );
    x += 24 + 6.4 * name.length + 22;
  }
  return group;
}

// A figure without the page around it, on the page's background.
function standalone(figure) {
  return new Blob([new XMLSerializer().serializeToString(figure)], { type: 'image/svg+xml;charset=utf-8' });
}

function saveSvg(name, figure) {
  save(`${name}.svg`, standalone(figure));
}

async function savePng(name, figure) {
  const image = new Image();
  image.src = URL.createObjectURL(standalone(figure));
  await image.decode();
  const zoom = 3;
  const canvas = el('canvas', { width: zoom * image.width, height: zoom * image.height });
  canvas.getContext('2d').drawImage(image, 0, 0, canvas.width, canvas.height);
  URL.revokeObjectURL(image.src);
  canvas.toBlob((blob) => save(`${name}.png`, blob));
}
