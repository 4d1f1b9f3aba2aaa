// A chart: curves over steps as a picture, with a cursor that the pointer or arrow keys move.

// Sizes of the picture, in units of its view box.
const WIDTH = 520;
const HEIGHT = 190;
const TOP = 8;
const BOTTOM = 22;
const LEAST_LEFT = 52;
const LEAST_RIGHT = 10;
const LABEL_GAP = 6;

const NUM_COLOURS = 6;
const DASHES = ["", "6 3", "2 3"];

/** The colour of the curve of a number. */
function curveColour(index) {
  return `var(--c${index % NUM_COLOURS})`;
}

/** The dashes of the curve of a number: another pattern each time that colours begin again. */
function curveDash(index) {
  return DASHES[Math.floor(index / NUM_COLOURS) % DASHES.length];
}

/** [first, last] of the steps that a picture is as wide as; steps: ascending. */
function stepRange(steps) {
  const first = steps[0];
  if (steps.length === 1) return [first - 1, first + 1];
  return [first, steps[steps.length - 1]];
}

/** Steps that are written below the picture; steps: ascending. */
function stepMarksOf(steps) {
  if (steps.length === 1) return steps;
  const [first, last] = stepRange(steps);
  const distance = tickStep(first, last, 6);
  return multiples(first, last, distance).filter(Number.isInteger);
}

/** The index of the step, of ascending ones, that is nearest to `wanted`. */
function nearestIndex(steps, wanted) {
  let best = 0;
  steps.forEach((step, i) => {
    if (Math.abs(step - wanted) < Math.abs(steps[best] - wanted)) best = i;
  });
  return best;
}

/** Where steps and values lie in a picture, in units of its view box, and the marks of its axes.
 *  steps: ascending; values: finite. */
function frameOf(steps, values, isLogarithmic) {
  const [low, high] = extent(values);
  const marks = axisMarks(low, high, isLogarithmic);
  const stepMarks = stepMarksOf(steps);
  const widestLabel = most(marks.map(([, label]) => widthOf(label)));
  const widestStep = most(stepMarks.map(step => widthOf(String(step))));
  const left = Math.max(LEAST_LEFT, widestLabel + LABEL_GAP + 2);
  const right = Math.max(LEAST_RIGHT, widestStep / 2 + 1);
  const width = WIDTH - left - right;
  const height = HEIGHT - TOP - BOTTOM;

  const [first, last] = stepRange(steps);
  const scaled = value => (isLogarithmic ? Math.log10(value) : value);
  const bottom = scaled(low);
  const top = scaled(high);
  const margin = (top - bottom) * 0.05;
  return {
    marks,
    stepMarks,
    left,
    right,
    x: step => left + (step - first) / (last - first) * width,
    y: value => TOP + (top + margin - scaled(value)) / (top - bottom + 2 * margin) * height,
    /** The step, maybe a fraction, at a share of the picture's width. */
    stepAt: share => first + (share * WIDTH - left) / width * (last - first),
  };
}

/** Lines and labels of the axes. */
function axesOf({ marks, stepMarks, left, right, x, y }) {
  const parts = [];
  for (const [mark, label] of marks) {
    const height = y(mark);
    const ends = { x1: left, x2: WIDTH - right, y1: height, y2: height };
    const place = { x: left - LABEL_GAP, y: height + 4, "text-anchor": "end" };
    parts.push(svg("line", { class: "axis", ...ends }));
    parts.push(svg("text", place, label));
  }
  for (const step of stepMarks) {
    const place = { x: x(step), y: HEIGHT - 6, "text-anchor": "middle" };
    parts.push(svg("text", place, String(step)));
  }
  return parts;
}

/** Unbroken runs of finite points. gaps: see `chart`. */
function runsOf(points, gaps) {
  const found = [];
  let run = null;
  let last = null;
  for (const point of points) {
    const [step, value] = point;
    const isBetween = ([before, after]) => last !== null && last <= before && after <= step;
    const isBroken = gaps.some(isBetween);
    last = step;
    if (!isNumber(value)) {
      run = null;
    } else if (run && !isBroken) {
      run.push(point);
    } else {
      run = [point];
      found.push(run);
    }
  }
  return found;
}

/** A curve's run of points as a line, or a dot where it is one point; index: of the curve. */
function drawnRun(run, index, { x, y }) {
  const colour = curveColour(index);
  if (run.length === 1) {
    const [step, value] = run[0];
    return svg("circle", { class: "point", cx: x(step), cy: y(value), r: 2.5, fill: colour });
  }
  const corners = run.map(([step, value]) => x(step).toFixed(1) + "," + y(value).toFixed(1));
  return svg("polyline", {
    class: "curve",
    stroke: colour,
    "stroke-dasharray": curveDash(index),
    points: corners.join(" "),
  });
}

/** What a chart is made of; see `chart` for what it takes. */
class Chart {
  constructor(title, series, gaps) {
    this.title = title;
    this.series = series;
    this.gaps = gaps;
    const finite = series.flatMap(one => one.points.filter(point => isNumber(point[1])));
    const steps = new Set(finite.map(point => point[0]));
    this.steps = [...steps].sort((a, b) => a - b);
    this.values = finite.map(point => point[1]);
    this.digits = digitsOf(this.values);
    this.valueAt = series.map(one => new Map(one.points));
    this.where = el("li", { class: "muted" });
    this.readouts = series.map(() => el("b"));
    this.plot = el("div");
    this.isLogarithmic = false;
    this.at = this.steps.length - 1; // where the cursor stands, as an index of `steps`
    this.draw();
  }

  /** Draws the picture anew, with the cursor where it was. */
  draw() {
    const { title, series, steps, values, gaps } = this;
    this.frame = frameOf(steps, values, this.isLogarithmic);
    this.cursor = svg("line", { class: "cursor", y1: TOP, y2: HEIGHT - BOTTOM });
    this.dots = series.map((_, i) => svg("circle", { r: 4, fill: curveColour(i) }));
    const curves = series.map(({ points }, i) => {
      return runsOf(points, gaps).map(run => drawnRun(run, i, this.frame));
    });
    const labels = series.map(one => one.label).join(", ");
    const attributes = {
      viewBox: `0 0 ${WIDTH} ${HEIGHT}`,
      tabindex: 0,
      role: "img",
      "aria-label": `${title}: ${labels}; arrow keys move along the steps`,
      pointermove: event => this.followPointer(event),
      keydown: event => this.followKey(event),
    };
    const axes = axesOf(this.frame);
    this.picture = svg("svg", attributes, axes, curves, this.cursor, this.dots);
    this.moveTo(this.at);
    this.plot.replaceChildren(this.picture);
  }

  /** Moves the cursor to the step that is nearest to the pointer. */
  followPointer(event) {
    const box = this.picture.getBoundingClientRect();
    const share = (event.clientX - box.left) / box.width;
    this.moveTo(nearestIndex(this.steps, this.frame.stepAt(share)));
  }

  /** Moves the cursor where a key says. */
  followKey(event) {
    const index = this.indexAfter(event.key);
    if (index === null) return;
    event.preventDefault();
    this.moveTo(index);
  }

  /** The index of the step to which a key moves the cursor; null: it does not move it. */
  indexAfter(key) {
    const last = this.steps.length - 1;
    if (key === "ArrowLeft") return Math.max(this.at - 1, 0);
    if (key === "ArrowRight") return Math.min(this.at + 1, last);
    if (key === "Home") return 0;
    if (key === "End") return last;
    return null;
  }

  /** Puts the cursor at the step of an index, and shows the values there. */
  moveTo(index) {
    this.at = index;
    const step = this.steps[index];
    const x = this.frame.x(step);
    this.cursor.setAttribute("x1", x);
    this.cursor.setAttribute("x2", x);
    this.where.textContent = "step " + step;
    this.valueAt.forEach((valueAt, i) => this.showValue(i, x, valueAt.get(step)));
  }

  /** Shows the value of the curve of a number, or that it has none, at x of the picture. */
  showValue(number, x, value) {
    const dot = this.dots[number];
    this.readouts[number].textContent = show(value, this.digits);
    if (!isNumber(value)) {
      dot.setAttribute("visibility", "hidden");
      return;
    }
    dot.setAttribute("visibility", "visible");
    dot.setAttribute("cx", x);
    dot.setAttribute("cy", this.frame.y(value));
  }

  /** The choice of a logarithmic axis; null where the values have no logarithms. */
  toggle() {
    const arePositive = this.values.every(value => value > 0);
    if (!arePositive || this.values.length < 2) return null;
    const box = el("input", {
      type: "checkbox",
      change: () => {
        this.isLogarithmic = box.checked;
        this.draw();
      },
    });
    return el("label", null, box, " log");
  }

  /** The step of the cursor, and a row with the colour, the label and the value of each curve. */
  legend() {
    const rows = this.series.map(({ label }, i) => {
      const line = curveDash(i) ? "dashed" : "solid";
      const style = `border-color: ${curveColour(i)}; border-top-style: ${line}`;
      return el("li", null, el("i", { style }), label + " ", this.readouts[i]);
    });
    return el("ul", { class: "legend", "aria-live": "off" }, this.where, rows);
  }
}

/** A chart as a figure. series: [{label, points: [[step, value]]}], of which each has a finite
 *  value at least once; null breaks a curve. notes: texts below it. gaps: [last step before, first
 *  step after, words] of missing steps, which break curves too. */
function chart(title, series, notes = [], gaps = []) {
  const drawn = new Chart(title, series, gaps);
  const head = el("div", { class: "head" }, el("h4", null, title), drawn.toggle());
  const captions = notes.map(note => el("figcaption", null, note));
  return el("figure", { class: "plot" }, head, drawn.legend(), drawn.plot, captions);
}
