// Curves as SVG and heat maps as canvas: a cursor shows values, by pointer or arrow keys.

const WIDTH = 520, HEIGHT = 190, TOP = 8, BOTTOM = 22;
const LEAST_LEFT = 52, LEAST_RIGHT = 10, LABEL_GAP = 6;
/** Values whose difference is at most this share of them differ by rounding. */
const ROUNDING = 1e-10;

const least = values => values.reduce((a, b) => Math.min(a, b), Infinity);
const most = values => values.reduce((a, b) => Math.max(a, b), -Infinity);
const largest = values => most(values.map(Math.abs));

/** A function that measures a text in the font of the page's pictures, in units of their view boxes. */
function textRuler() {
  const text = svg("text"), picture = svg("svg", null, text);
  document.body.append(picture);
  const context = el("canvas").getContext("2d");
  context.font = getComputedStyle(text).font;
  picture.remove();
  return words => context.measureText(words).width;
}
const widthOf = textRuler();

/** The round distance at which about `count` numbers cover [low, high]. */
function tickStep(low, high, count) {
  const raw = (high - low) / count, power = 10 ** Math.floor(Math.log10(raw));
  return [1, 2, 2.5, 5, 10].map(multiple => multiple * power).find(size => size >= raw * 0.999);
}

/** Multiples of `step` in [low, high]. */
function multiples(low, high, step) {
  const found = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) found.push(Number((i * step).toPrecision(12)));
  return found;
}

/** Digits behind the point that a round number has. */
function decimalsOf(round) {
  let count = 0;
  while (Math.abs(round * 10 ** count - Math.round(round * 10 ** count)) > 1e-6 * round * 10 ** count) count++;
  return count;
}

/** Multiples of `step` as texts that tell them apart. */
function tickLabels(marks, step) {
  const size = largest(marks);
  if (size < 1e-3 || size >= 1e7) {
    const digits = decimalsOf(step / 10 ** Math.floor(Math.log10(size)));
    return marks.map(mark => (mark === 0 ? "0" : mark.toExponential(digits)));
  }
  const digits = decimalsOf(step);
  return marks.map(mark => mark.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits }));
}

/** [value, label] of the marks of an axis from `low` to `high`. */
function axisMarks(low, high, logarithmic) {
  if (!logarithmic) {
    const step = tickStep(low, high, 5), marks = multiples(low, high, step), labels = tickLabels(marks, step);
    return marks.map((mark, i) => [mark, labels[i]]);
  }
  const [first, last] = [low, high].map(Math.log10), step = tickStep(first, last, 5);
  const digits = Math.min(Math.max(Math.ceil(-Math.log10(step)) + 2, 3), 15);
  return multiples(first, last, step).map(power => Number((10 ** power).toPrecision(digits)))
    .map(mark => [mark, show(mark, digits)]);
}

const isFlat = (low, high) => high - low <= ROUNDING * largest([low, high]);

/** Lowest and highest, apart from each other. */
function extent(values) {
  const low = least(values), high = most(values);
  if (!isFlat(low, high)) return [low, high];
  const pad = largest([low, high]) * 0.1 || 0.5;
  return [low - pad, high + pad];
}

/** Digits, at least four, at which values between the lowest and the highest can be told apart. */
function digitsOf(values) {
  const low = least(values), high = most(values);
  if (isFlat(low, high)) return 4;
  return Math.min(Math.max(Math.ceil(Math.log10(largest([low, high]) / (high - low))) + 3, 4), 15);
}

/** series: [{label, points: [[step, value]]}] with a finite value at least once each; null breaks a
 *  curve. gaps: [last step before, first step after, words] of missing steps, which do so too. */
function chart(title, series, notes = [], gaps = []) {
  const finite = series.flatMap(s => s.points.filter(p => isNumber(p[1])));
  const xs = [...new Set(finite.map(p => p[0]))].sort((a, b) => a - b);
  const canLog = finite.every(p => p[1] > 0) && finite.length > 1;
  const digits = digitsOf(finite.map(p => p[1]));
  const values = series.map(s => new Map(s.points)), readouts = series.map(() => el("b"));
  const where = el("li", { class: "muted" }), plot = el("div");
  let logarithmic = false, at = xs.length - 1;

  const colour = i => `var(--c${i % 6})`;
  const dash = i => ["", "6 3", "2 3"][Math.floor(i / 6) % 3];

  function draw() {
    const forward = logarithmic ? Math.log10 : v => v;
    const [x0, x1] = xs.length > 1 ? [xs[0], xs[xs.length - 1]] : [xs[0] - 1, xs[0] + 1];
    const [low, high] = extent(finite.map(p => p[1])), [y0, y1] = [low, high].map(forward);
    const margin = (y1 - y0) * 0.05;
    const marks = axisMarks(low, high, logarithmic);
    const steps = xs.length > 1 ? multiples(x0, x1, tickStep(x0, x1, 6)).filter(Number.isInteger) : xs;
    const left = Math.max(LEAST_LEFT, most(marks.map(([, label]) => widthOf(label))) + LABEL_GAP + 2);
    const right = Math.max(LEAST_RIGHT, most(steps.map(s => widthOf(String(s)))) / 2 + 1);
    const x = step => left + (step - x0) / (x1 - x0) * (WIDTH - left - right);
    const y = value => TOP + (y1 + margin - forward(value)) / (y1 - y0 + 2 * margin) * (HEIGHT - TOP - BOTTOM);
    const cursor = svg("line", { class: "cursor", y1: TOP, y2: HEIGHT - BOTTOM });
    const dots = series.map((_, i) => svg("circle", { r: 4, fill: colour(i) }));
    const picture = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, tabindex: 0, role: "img",
      "aria-label": `${title}: ${series.map(s => s.label).join(", ")}; arrow keys move along the steps`,
      pointermove: event => {
        const box = picture.getBoundingClientRect();
        const step = x0 + ((event.clientX - box.left) / box.width * WIDTH - left) / (WIDTH - left - right) * (x1 - x0);
        move(xs.reduce((best, s, i) => (Math.abs(s - step) < Math.abs(xs[best] - step) ? i : best), 0));
      },
      keydown: event => {
        const to = { ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: xs.length - 1 }[event.key];
        if (to === undefined) return;
        event.preventDefault();
        move(Math.min(Math.max(to, 0), xs.length - 1));
      } },
    marks.map(([mark, label]) => [svg("line", { class: "axis", x1: left, x2: WIDTH - right, y1: y(mark), y2: y(mark) }),
      svg("text", { x: left - LABEL_GAP, y: y(mark) + 4, "text-anchor": "end" }, label)]).flat(),
    steps.map(s => svg("text", { x: x(s), y: HEIGHT - 6, "text-anchor": "middle" }, String(s))),
    series.flatMap((s, i) => runs(s.points, gaps).map(run => (run.length === 1
      ? svg("circle", { class: "point", cx: x(run[0][0]), cy: y(run[0][1]), r: 2.5, fill: colour(i) })
      : svg("polyline", { class: "curve", stroke: colour(i), "stroke-dasharray": dash(i),
        points: run.map(p => `${x(p[0]).toFixed(1)},${y(p[1]).toFixed(1)}`).join(" ") })))),
    cursor, dots);

    function move(to) {
      at = to;
      const step = xs[at];
      cursor.setAttribute("x1", x(step));
      cursor.setAttribute("x2", x(step));
      where.textContent = "step " + step;
      values.forEach((value, i) => {
        const there = value.get(step);
        readouts[i].textContent = show(there, digits);
        dots[i].setAttribute("visibility", isNumber(there) ? "visible" : "hidden");
        if (isNumber(there)) { dots[i].setAttribute("cx", x(step)); dots[i].setAttribute("cy", y(there)); }
      });
    }
    move(at);
    plot.replaceChildren(picture);
  }
  draw();
  const toggle = canLog ? el("label", null, el("input", { type: "checkbox", change: event => {
    logarithmic = event.target.checked;
    draw();
  } }), " log") : null;
  return el("figure", { class: "plot" }, el("div", { class: "head" }, el("h4", null, title), toggle),
    el("ul", { class: "legend", "aria-live": "off" }, where, series.map((s, i) => el("li", null,
      el("i", { style: `border-color: ${colour(i)}; border-top-style: ${dash(i) ? "dashed" : "solid"}` }), s.label + " ", readouts[i]))),
    plot, notes.map(note => el("figcaption", null, note)));
}

/** Unbroken runs of finite points. */
function runs(points, gaps) {
  const found = [];
  let run = null, last = null;
  for (const point of points) {
    const isBroken = gaps.some(([before, after]) => last !== null && last <= before && after <= point[0]);
    last = point[0];
    if (!isNumber(point[1])) run = null;
    else if (run && !isBroken) run.push(point);
    else found.push(run = [point]);
  }
  return found;
}

const RAMP = [[68, 1, 84], [59, 82, 139], [33, 145, 140], [94, 201, 98], [253, 231, 37]];

function ramp(share) {
  const place = Math.min(Math.max(share, 0), 1) * (RAMP.length - 1), i = Math.min(Math.floor(place), RAMP.length - 2);
  return "rgb(" + RAMP[i].map((low, c) => Math.round(low + (RAMP[i + 1][c] - low) * (place - i))).join(" ") + ")";
}

/** rowNames, columns: names. values: rows by columns; null is grey. One pixel a cell, scaled up by the page. */
function heatMap(rowNames, columns, values, what) {
  const finite = values.flat().filter(isNumber), low = least(finite);
  const high = most(finite), digits = digitsOf(finite);
  const canvas = el("canvas", { width: columns.length, height: rowNames.length, tabindex: 0, role: "img",
    style: `height: ${rowNames.length * 1.15}rem`, "aria-label": `${what}; arrow keys move over the cells` });
  const context = canvas.getContext("2d"), readout = el("figcaption", { role: "status" });
  values.forEach((row, r) => row.forEach((value, c) => {
    context.fillStyle = isNumber(value) ? ramp(high > low ? (value - low) / (high - low) : 0.5) : "#999";
    context.fillRect(c, r, 1, 1);
  }));
  let r = 0, c = columns.length - 1;
  const tell = () => { readout.textContent = `${rowNames[r]}, ${columns[c]}: ${show(values[r][c], digits)}`; };
  canvas.addEventListener("pointermove", event => {
    const box = canvas.getBoundingClientRect();
    c = Math.min(Math.max(Math.floor((event.clientX - box.left) / box.width * columns.length), 0), columns.length - 1);
    r = Math.min(Math.max(Math.floor((event.clientY - box.top) / box.height * rowNames.length), 0), rowNames.length - 1);
    tell();
  });
  canvas.addEventListener("keydown", event => {
    const [dr, dc] = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key] || [0, 0];
    if (!dr && !dc) return;
    event.preventDefault();
    r = Math.min(Math.max(r + dr, 0), rowNames.length - 1);
    c = Math.min(Math.max(c + dc, 0), columns.length - 1);
    tell();
  });
  tell();
  const scale = el("span", { class: "ramp", style: `background: linear-gradient(90deg, ${[0, .25, .5, .75, 1].map(ramp).join(", ")})` });
  return el("div", { class: "plot" }, el("div", { class: "heat" },
    el("ol", null, rowNames.map(name => el("li", null, name))), canvas,
    el("span"), el("span", { class: "head" }, el("span", null, columns[0]), el("span", null, columns[columns.length - 1]))),
  el("figcaption", null, show(low, digits), " ", scale, " ", show(high, digits)), readout);
}

