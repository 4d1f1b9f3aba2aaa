// Elements and numbers.

const SVG = "http://www.w3.org/2000/svg";

/** An element with attributes (functions listen) and children; null children are left out. */
function element(make, tag, attributes, children) {
  const node = make(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (typeof value === "function") node.addEventListener(name, value);
    else if (value !== null && value !== undefined && value !== false) node.setAttribute(name, value);
  }
  node.append(...children.flat(Infinity).filter(child => child !== null && child !== undefined));
  return node;
}
const el = (tag, attributes, ...children) => element(t => document.createElement(t), tag, attributes, children);
const svg = (tag, attributes, ...children) => element(t => document.createElementNS(SVG, t), tag, attributes, children);

const isNumber = value => typeof value === "number";

/** Up to `digits` digits; what is not known is a dash. */
function show(value, digits = 4) {
  if (!isNumber(value)) return "–";
  const size = Math.abs(value), rounded = Number(value.toPrecision(digits));
  if (Number.isInteger(value) && size < 1e7) return value.toLocaleString("en");
  if (size !== 0 && (size < 1e-3 || size >= 1e6)) return rounded.toExponential();
  return String(rounded);
}
const signed = value => (isNumber(value) && value > 0 ? "+" : "") + show(value);

function duration(seconds) {
  if (!isNumber(seconds)) return null;
  if (seconds < 120) return show(Number(seconds.toPrecision(3))) + " s";
  const minutes = Math.round(seconds / 60);
  return minutes < 120 ? minutes + " min" : Math.floor(minutes / 60) + " h " + (minutes % 60) + " min";
}

function bytes(value) {
  const [unit, name] = value >= 2 ** 30 ? [2 ** 30, "GiB"] : value >= 2 ** 20 ? [2 ** 20, "MiB"] : [2 ** 10, "KiB"];
  return show(Number((value / unit).toPrecision(3))) + " " + name;
}

/** head: column names; rows: cells (text or elements); text: columns that are not numbers. */
function table(head, rows, text = [0]) {
  const kind = column => (text.includes(column) ? "text" : null);
  return el("div", { class: "scroll" }, el("table", null,
    el("thead", null, el("tr", null, head.map((name, i) => el("th", { class: kind(i), scope: "col" }, name)))),
    el("tbody", null, rows.map(cells => el("tr", { class: cells.total ? "total" : null },
      cells.map((cell, i) => el("td", { class: kind(i) }, cell)))))));
}

/** Facts as labelled boxes; those without a value are left out. */
const facts = pairs => el("dl", { class: "facts" }, pairs.filter(([, value]) => value || value === 0).map(
  ([label, value]) => el("div", null, el("dt", null, label), el("dd", null, String(value)))));
