// A heat map: one pixel a cell, which the page scales up; arrow keys or the pointer read cells.

/** Colours from the lowest value to the highest, as red, green and blue. */
const RAMP = [[68, 1, 84], [59, 82, 139], [33, 145, 140], [94, 201, 98], [253, 231, 37]];
const UNKNOWN_COLOUR = "#999";
const ROW_REM = 1.15;

/** Rows and columns by which a key moves. */
const MOVES = {
  ArrowUp: [-1, 0],
  ArrowDown: [1, 0],
  ArrowLeft: [0, -1],
  ArrowRight: [0, 1],
};

/** The colour at a share, from 0 to 1, of the way from the lowest value to the highest. */
function rampColour(share) {
  const place = clamped(share, 0, 1) * (RAMP.length - 1);
  const lower = Math.min(Math.floor(place), RAMP.length - 2);
  const rest = place - lower;
  const channels = RAMP[lower].map((low, channel) => {
    const high = RAMP[lower + 1][channel];
    return Math.round(low + (high - low) * rest);
  });
  return `rgb(${channels.join(" ")})`;
}

/** What a heat map is made of; see `heatMap` for what it takes. */
class HeatMap {
  constructor(rowNames, columnNames, values, what) {
    this.rowNames = rowNames;
    this.columnNames = columnNames;
    this.values = values;
    const finite = values.flat().filter(isNumber);
    this.low = least(finite);
    this.high = most(finite);
    this.digits = digitsOf(finite);
    this.row = 0;
    this.column = columnNames.length - 1;
    this.readout = el("figcaption", { role: "status" });
    this.canvas = el("canvas", {
      width: columnNames.length,
      height: rowNames.length,
      tabindex: 0,
      role: "img",
      style: `height: ${rowNames.length * ROW_REM}rem`,
      "aria-label": `${what}; arrow keys move over the cells`,
      pointermove: event => this.followPointer(event),
      keydown: event => this.followKey(event),
    });
    this.paint();
    this.moveTo(this.row, this.column);
  }

  /** Fills the cells. */
  paint() {
    const context = this.canvas.getContext("2d");
    this.values.forEach((row, r) => {
      row.forEach((value, c) => {
        context.fillStyle = this.cellColour(value);
        context.fillRect(c, r, 1, 1);
      });
    });
  }

  /** The colour of a value: the middle one where all are the same, grey where it is unknown. */
  cellColour(value) {
    if (!isNumber(value)) return UNKNOWN_COLOUR;
    const { low, high } = this;
    if (low === high) return rampColour(0.5);
    return rampColour((value - low) / (high - low));
  }

  /** Reads the cell below the pointer. */
  followPointer(event) {
    const box = this.canvas.getBoundingClientRect();
    const fromLeft = (event.clientX - box.left) / box.width;
    const fromTop = (event.clientY - box.top) / box.height;
    const row = Math.floor(fromTop * this.rowNames.length);
    const column = Math.floor(fromLeft * this.columnNames.length);
    this.moveTo(row, column);
  }

  /** Reads the cell to which a key moves. */
  followKey(event) {
    const move = MOVES[event.key];
    if (!move) return;
    event.preventDefault();
    const [rows, columns] = move;
    this.moveTo(this.row + rows, this.column + columns);
  }

  /** Reads the cell that is nearest to a row and a column, which may lie outside. */
  moveTo(row, column) {
    this.row = clamped(row, 0, this.rowNames.length - 1);
    this.column = clamped(column, 0, this.columnNames.length - 1);
    const place = `${this.rowNames[this.row]}, ${this.columnNames[this.column]}`;
    const value = this.values[this.row][this.column];
    this.readout.textContent = `${place}: ${show(value, this.digits)}`;
  }

  /** The colours between the lowest and the highest value. */
  scale() {
    const colours = [0, 0.25, 0.5, 0.75, 1].map(rampColour).join(", ");
    const style = `background: linear-gradient(90deg, ${colours})`;
    const strip = el("span", { class: "ramp", style });
    const low = show(this.low, this.digits);
    const high = show(this.high, this.digits);
    return el("figcaption", null, low, " ", strip, " ", high);
  }

  /** Names of the rows, cells, and below them the names of the first and the last column. */
  map() {
    const names = this.rowNames.map(name => el("li", null, name));
    const first = el("span", null, this.columnNames[0]);
    const last = el("span", null, this.columnNames[this.columnNames.length - 1]);
    const ends = el("span", { class: "head" }, first, last);
    return el("div", { class: "heat" }, el("ol", null, names), this.canvas, el("span"), ends);
  }
}

/** A heat map with its scale and a cell's value. values: a list of cells for every row, null
 *  where nothing is known; what: its name for those who do not see it. */
function heatMap(rowNames, columnNames, values, what) {
  const drawn = new HeatMap(rowNames, columnNames, values, what);
  return el("div", { class: "plot" }, drawn.map(), drawn.scale(), drawn.readout);
}
