// Elements of the page, and the few shapes of text that several sections have.

const SVG = "http://www.w3.org/2000/svg";

/** An element that `make` has made of its tag. attributes: a function listens to the event of its
 *  name, what is null, undefined or false is left out; children: nodes, texts and lists of them,
 *  of which null and undefined are left out. */
function element(make, tag, attributes, children) {
  const isThere = value => value !== null && value !== undefined;
  const node = make(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (typeof value === "function") {
      node.addEventListener(name, value);
    } else if (isThere(value) && value !== false) {
      node.setAttribute(name, value);
    }
  }
  const present = children.flat(Infinity).filter(isThere);
  node.append(...present);
  return node;
}

/** An element of HTML; see `element`. */
function el(tag, attributes, ...children) {
  const make = name => document.createElement(name);
  return element(make, tag, attributes, children);
}

/** An element of a picture; see `element`. */
function svg(tag, attributes, ...children) {
  const make = name => document.createElementNS(SVG, name);
  return element(make, tag, attributes, children);
}

/** A paragraph beside the matter: `content` is what `el` takes as children. */
function remark(...content) {
  return el("p", { class: "muted" }, content);
}

/** A paragraph that says what is not there. */
function absence(text) {
  return el("p", { class: "absent" }, text);
}

/** A list of texts that say what is not there; null where there are none. */
function absences(texts) {
  if (!texts.length) return null;
  const items = texts.map(text => el("li", null, text));
  return el("ul", { class: "absent" }, items);
}

/** A table that scrolls sideways. head: names of columns; rows: lists of cells, each a text, an
 *  element or a list of them; text: indices of the columns that are no numbers. */
function table(head, rows, text = [0]) {
  const kindOf = column => (text.includes(column) ? "text" : null);
  const headCells = head.map((name, column) => {
    return el("th", { class: kindOf(column), scope: "col" }, name);
  });
  const bodyRows = rows.map(cells => {
    const made = cells.map((cell, column) => el("td", { class: kindOf(column) }, cell));
    return el("tr", null, made);
  });
  const headPart = el("thead", null, el("tr", null, headCells));
  const bodyPart = el("tbody", null, bodyRows);
  return el("div", { class: "scroll" }, el("table", null, headPart, bodyPart));
}

/** Boxes with a label and a value each. pairs: [label, value]; those without a value are left
 *  out, 0 is one. */
function facts(pairs) {
  const boxes = [];
  for (const [label, value] of pairs) {
    if (value || value === 0) {
      const name = el("dt", null, label);
      boxes.push(el("div", null, name, el("dd", null, String(value))));
    }
  }
  return el("dl", { class: "facts" }, boxes);
}

/** The parts with a space between each and the next. */
function spaced(parts) {
  return parts.flatMap((part, i) => (i === 0 ? [part] : [" ", part]));
}
