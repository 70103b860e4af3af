// Charts of small panels side by side.  A panel has a title, two axes and marks:
//   { lines: [{ points: [[x, y]], colour, tip }], dots: [{ x, y, colour, tip }], bars: [{ x0, x1, y, colour, tip }] }

const WIDEST = 480;
const MARGIN = { left: 46, right: 10, top: 28, bottom: 38 };

function chart({ panels, x, y, entries = [], height = 190, columns = 3 }, room, colours) {
  const width = Math.min(room, WIDEST * panels.length);
  const across = Math.max(1, Math.min(columns, panels.length, Math.floor(width / 230)));
  const top = entries.length ? 22 : 2;
  const size = { width: width / across, height };
  const total = top + Math.ceil(panels.length / across) * height;
  const figure = svg('svg', { xmlns: SVG, width, height: total, viewBox: `0 0 ${width} ${total}`, role: 'img' });
  figure.append(svg('rect', { width, height: total, fill: colours.page }));
  figure.append(legend(entries, MARGIN.left, 13, colours));
  const domain = (axis, options, some) => options.domain ?? extent(some.flatMap(valuesOf(axis)), options.hold);
  panels.forEach((panel, number) => {
    const group = svg('g', {
      transform: `translate(${(number % across) * size.width} ${top + Math.floor(number / across) * height})`,
    });
    figure.append(
      drawPanel(
        group,
        panel,
        { ...x, domain: panel.x ?? domain('x', x, panels) },
        { ...y, domain: panel.y ?? domain('y', y, y.own ? [panel] : panels) },
        size,
        colours,
      ),
    );
  });
  return figure;
}

const valuesOf =
  (axis) =>
  ({ lines = [], dots = [], bars = [] }) => [
    ...lines.flatMap(({ points }) => points.map((point) => point[axis === 'x' ? 0 : 1])),
    ...dots.map((dot) => dot[axis]),
    ...bars.flatMap((bar) => (axis === 'x' ? [bar.x0, bar.x1] : [bar.y])),
  ];

function drawPanel(group, panel, x, y, size, colours) {
  const frame = {
    left: MARGIN.left,
    right: size.width - MARGIN.right,
    top: MARGIN.top,
    bottom: size.height - MARGIN.bottom,
  };
  const across = scale(x.domain, [frame.left, frame.right]);
  const up = scale(y.domain, [frame.bottom, frame.top]);
  group.append(label(panel.title, frame.left, 14, { fill: colours.ink, 'font-weight': 600, 'font-size': 12 }));
  drawAxes(group, panel, x, y, frame, across, up, colours);
  for (const bar of panel.bars ?? []) group.append(drawBar(bar, across, up));
  for (const line of panel.lines ?? []) group.append(drawLine(line, across, up));
  for (const dot of panel.dots ?? []) group.append(drawDot(dot, across, up));
  if (!(panel.bars?.length || panel.lines?.length || panel.dots?.length)) {
    const middle = (frame.left + frame.right) / 2;
    group.append(
      label(panel.empty ?? 'nothing was measured', middle, (frame.top + frame.bottom) / 2, {
        fill: colours.soft,
        'text-anchor': 'middle',
      }),
    );
  }
  return group;
}

function drawAxes(group, panel, x, y, frame, across, up, colours) {
  for (const tick of y.ticks ?? ticks(...y.domain, 4, { fewest: 3 })) {
    group.append(
      svg('line', { x1: frame.left, x2: frame.right, y1: up(tick), y2: up(tick), stroke: colours.grid }),
      label((y.format ?? tickText)(tick), frame.left - 6, up(tick) + 4, { fill: colours.soft, 'text-anchor': 'end' }),
    );
  }
  const places = panel.ticks ?? x.ticks ?? ticks(...x.domain, Math.min(5, (frame.right - frame.left) / 60), x);
  for (const tick of places) {
    const [place, text] = Array.isArray(tick) ? tick : [tick, (x.format ?? tickText)(tick)];
    group.append(label(text, across(place), frame.bottom + 15, { fill: colours.soft, 'text-anchor': 'middle' }));
  }
  for (const place of panel.rules ?? []) {
    group.append(
      svg('line', { x1: across(place), x2: across(place), y1: frame.top, y2: frame.bottom, stroke: colours.line }),
    );
  }
  group.append(
    svg('line', { x1: frame.left, x2: frame.right, y1: frame.bottom, y2: frame.bottom, stroke: colours.line }),
    label(x.label, (frame.left + frame.right) / 2, frame.bottom + 31, { fill: colours.soft, 'text-anchor': 'middle' }),
  );
}

function drawLine({ points, colour, dashed, thin, tip: lines }, across, up) {
  const known = points.filter(([, value]) => isNumber(value));
  const drawn = known.map(([at, value]) => [across(at), up(value)]);
  const look = { stroke: colour, 'stroke-width': thin ? 1.4 : 2, 'stroke-dasharray': dashed && '4 3' };
  const group = svg('g', { class: 'mark', fill: 'none' }, svg('path', { d: path(drawn), ...look }));
  if (drawn.length < 8) group.append(...drawn.map(([cx, cy]) => svg('circle', { cx, cy, r: 2.5, fill: colour })));
  // Nobody can point at two pixels: what is pointed at is wider than what is seen.
  group.append(svg('path', { d: path(drawn), stroke: 'transparent', 'stroke-width': 12 }));
  return pointed(group, (x) => {
    const away = ([at]) => Math.abs(across(at) - x);
    return lines(known.reduce((best, point) => (away(point) < away(best) ? point : best)));
  });
}

function drawDot({ x, y, colour, tip: lines, press, small }, across, up) {
  const look = { fill: colour, 'fill-opacity': 0.85 };
  const circle = svg('circle', {
    class: press ? 'mark press' : 'mark',
    cx: across(x),
    cy: up(y),
    r: small ? 2.8 : 4,
    ...look,
    onclick: press,
  });
  return pointed(circle, lines);
}

function drawBar({ x0, x1, y, base = 0, colour, tip: lines }, across, up) {
  const [top, bottom] = [Math.min(up(y), up(base)), Math.max(up(y), up(base))];
  const box = { x: across(x0), width: Math.max(1, across(x1) - across(x0) - 1), y: top, height: bottom - top };
  return pointed(svg('rect', { class: 'mark', ...box, fill: colour, 'fill-opacity': 0.85 }), lines);
}

// Says what a mark is while the pointer is on it.
function pointed(mark, lines) {
  mark.addEventListener('pointermove', (event) => {
    const figure = mark.ownerSVGElement.getBoundingClientRect();
    const panel = mark.parentNode.transform.baseVal[0]?.matrix.e ?? 0;
    tip.show(lines(event.clientX - figure.left - panel), event.clientX, event.clientY);
  });
  mark.addEventListener('pointerleave', tip.hide);
  return mark;
}
