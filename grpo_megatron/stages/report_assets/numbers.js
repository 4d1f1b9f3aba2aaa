// Numbers: what several of them have together, and how one is written.

/** Whether a value is a number; what is absent is null, undefined or "". */
function isNumber(value) {
  return typeof value === "number";
}

/** The smallest of some numbers, infinity of none. */
function least(values) {
  return values.reduce((a, b) => Math.min(a, b), Infinity);
}

/** The largest of some numbers, minus infinity of none. */
function most(values) {
  return values.reduce((a, b) => Math.max(a, b), -Infinity);
}

/** The largest of the numbers' sizes, minus infinity of none. */
function largest(values) {
  return most(values.map(Math.abs));
}

/** The sum of some numbers, 0 of none. */
function sumOf(values) {
  return values.reduce((sum, value) => sum + value, 0);
}

/** The mean of some numbers, 0 of none. */
function mean(values) {
  return sumOf(values) / Math.max(values.length, 1);
}

/** The number in [low, high] that is nearest to `value`. */
function clamped(value, low, high) {
  return Math.min(Math.max(value, low), high);
}

/** The number rounded to `digits` digits, wherever its point is. */
function rounded(value, digits) {
  return Number(value.toPrecision(digits));
}

/** A text of up to `digits` digits; a dash for what is no number. */
function show(value, digits = 4) {
  if (!isNumber(value)) return "–";
  const size = Math.abs(value);
  if (Number.isInteger(value) && size < 1e7) return value.toLocaleString("en");
  const isFarFromOne = size !== 0 && (size < 1e-3 || size >= 1e6);
  if (isFarFromOne) return rounded(value, digits).toExponential();
  return String(rounded(value, digits));
}

/** The number as a text with its sign, rounded to `decimals` digits behind the point. */
function signed(value, decimals) {
  const number = Number(value.toFixed(decimals));
  const sign = number > 0 ? "+" : "";
  return sign + show(number);
}

/** A time in seconds as a text in seconds, minutes or hours; null for what is no number. */
function duration(seconds) {
  if (!isNumber(seconds)) return null;
  if (seconds < 120) return show(rounded(seconds, 3)) + " s";
  const minutes = Math.round(seconds / 60);
  if (minutes < 120) return minutes + " min";
  const hours = Math.floor(minutes / 60);
  const others = minutes % 60;
  return `${hours} h ${others} min`;
}

/** A number of bytes as a text in KiB, MiB or GiB. */
function bytes(value) {
  let unit = 2 ** 10;
  let name = "KiB";
  if (value >= 2 ** 30) {
    unit = 2 ** 30;
    name = "GiB";
  } else if (value >= 2 ** 20) {
    unit = 2 ** 20;
    name = "MiB";
  }
  return show(rounded(value / unit, 3)) + " " + name;
}

/** A probability as a percentage, with digits enough to tell a small one from 0. */
function percent(probability) {
  const percents = probability * 100;
  if (probability >= 0.0995) return percents.toFixed(1) + " %";
  return rounded(percents, 2) + " %";
}
