// Axes of charts: where marks stand, and their labels, which tell one from the next.

/** Values whose difference is at most this share of them differ by rounding. */
const ROUNDING = 1e-10;
/** Digits behind which a number of 64 bits has nothing to tell. */
const MOST_DIGITS = 15;

/** A function that measures a text in the font of the page's pictures, in units of their view
 *  boxes. */
function textRuler() {
  const text = svg("text");
  const picture = svg("svg", null, text);
  document.body.append(picture);
  const context = el("canvas").getContext("2d");
  context.font = getComputedStyle(text).font;
  picture.remove();
  return words => context.measureText(words).width;
}
const widthOf = textRuler();

/** The round distance at which about `count` numbers cover [low, high]. */
function tickStep(low, high, count) {
  const exact = (high - low) / count;
  const power = 10 ** Math.floor(Math.log10(exact));
  const sizes = [1, 2, 2.5, 5, 10].map(multiple => multiple * power);
  return sizes.find(size => size >= exact * 0.999);
}

/** Multiples of `step` in [low, high], ends included that only rounding leaves outside. */
function multiples(low, high, step) {
  const found = [];
  const first = Math.ceil(low / step - 1e-9);
  const end = high + step * 1e-9;
  for (let i = first; i * step <= end; i++) {
    found.push(rounded(i * step, 12));
  }
  return found;
}

/** How many digits behind the point a round number has. */
function decimalsOf(round) {
  let count = 0;
  const hasMore = () => {
    const shifted = round * 10 ** count;
    return Math.abs(shifted - Math.round(shifted)) > 1e-6 * round * 10 ** count;
  };
  while (hasMore()) count++;
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
  const format = { minimumFractionDigits: digits, maximumFractionDigits: digits };
  return marks.map(mark => mark.toLocaleString("en", format));
}

/** [value, label] of the marks of an axis from `low` to `high`. */
function linearMarks(low, high) {
  const step = tickStep(low, high, 5);
  const marks = multiples(low, high, step);
  const labels = tickLabels(marks, step);
  return marks.map((mark, i) => [mark, labels[i]]);
}

/** [value, label] of the marks of a logarithmic axis from `low` to `high`, both above 0. */
function logarithmicMarks(low, high) {
  const first = Math.log10(low);
  const last = Math.log10(high);
  const step = tickStep(first, last, 5);
  const wanted = Math.ceil(-Math.log10(step)) + 2;
  const digits = clamped(wanted, 3, MOST_DIGITS);
  const marks = multiples(first, last, step).map(power => rounded(10 ** power, digits));
  return marks.map(mark => [mark, show(mark, digits)]);
}

/** Whether the two ends differ by rounding alone. */
function isFlat(low, high) {
  return high - low <= ROUNDING * largest([low, high]);
}

/** [lowest, highest] of some values, drawn apart where they are the same. */
function extent(values) {
  const low = least(values);
  const high = most(values);
  if (!isFlat(low, high)) return [low, high];
  const margin = largest([low, high]) * 0.1 || 0.5;
  return [low - margin, high + margin];
}

/** How many digits, at least four, tell values between the lowest and the highest apart. */
function digitsOf(values) {
  const low = least(values);
  const high = most(values);
  if (isFlat(low, high)) return 4;
  const ratio = largest([low, high]) / (high - low);
  return clamped(Math.ceil(Math.log10(ratio)) + 3, 4, MOST_DIGITS);
}

/** [value, label] of the marks of an axis from `low` to `high`, both above 0 where it is
 *  logarithmic. */
function axisMarks(low, high, isLogarithmic) {
  if (isLogarithmic) return logarithmicMarks(low, high);
  return linearMarks(low, high);
}
