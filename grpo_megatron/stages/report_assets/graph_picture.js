// The picture of a graph: stages by level, left to right; an edge for each that another builds on.

// Sizes of a stage's box, and distances between boxes, in units of the view box.
const BOX_WIDTH = 200;
const BOX_HEIGHT = 66;
const GAP_X = 70;
const GAP_Y = 22;
const BORDER = 4;
const LONGEST_NAME = 24; // characters

const GLYPHS = { done: "✓", "gate closed": "✕", begun: "…", ready: "○", waiting: "–" };

/** The state of a stage, with its sign. */
function stateWords(stage) {
  return `${GLYPHS[stage.state]} ${stage.state}`;
}

/** The kind of a stage, in words. */
function kindWords(stage) {
  return stage.kind.replace("_", " ");
}

/** The left end of the boxes of a level. */
function leftOf(column) {
  return column * (BOX_WIDTH + GAP_X) + BORDER;
}

/** {columns, places, width, height} of a picture: the level of each stage, the left upper corner
 *  {x, y} of its box, and the picture's size. levels: lists of names. */
function pictureLayout(levels) {
  const tallest = Math.max(...levels.map(level => level.length));
  const columns = {};
  const places = {};
  levels.forEach((level, column) => {
    const missing = tallest - level.length; // of the highest level's rows
    level.forEach((name, row) => {
      const y = GAP_Y / 2 + BORDER + (row + missing / 2) * (BOX_HEIGHT + GAP_Y);
      columns[name] = column;
      places[name] = { x: leftOf(column), y };
    });
  });
  const width = levels.length * (BOX_WIDTH + GAP_X) - GAP_X + 2 * BORDER;
  const height = tallest * (BOX_HEIGHT + GAP_Y) + 2 * BORDER;
  return { columns, places, width, height };
}

/** The height nearest to `wanted` at which a line passes the boxes of a level; tops: of the
 *  boxes. */
function laneNear(wanted, tops) {
  const isFree = y => tops.every(top => y < top || y > top + BOX_HEIGHT);
  const besides = tops.flatMap(top => [top - GAP_Y / 2, top + BOX_HEIGHT + GAP_Y / 2]);
  const lanes = [wanted, ...besides].filter(isFree);
  const distance = y => Math.abs(y - wanted);
  return lanes.sort((a, b) => distance(a) - distance(b))[0];
}

/** A curve of a path from one point to another, level at both ends. */
function bend(fromX, fromY, toX, toY) {
  const half = GAP_X / 2;
  return ` C${fromX + half} ${fromY} ${toX - half} ${toY} ${toX} ${toY}`;
}

/** The edge from a stage to one that builds on it, past the boxes of the levels between. */
function edgeOf(parent, child, levels, layout) {
  const { columns, places } = layout;
  const to = places[child];
  let x = places[parent].x + BOX_WIDTH;
  let y = places[parent].y + BOX_HEIGHT / 2;
  let path = `M${x} ${y}`;
  for (let column = columns[parent] + 1; column < columns[child]; column++) {
    const tops = levels[column].map(name => places[name].y);
    const lane = laneNear(y, tops);
    const left = leftOf(column);
    path += bend(x, y, left, lane);
    x = left + BOX_WIDTH;
    y = lane;
    path += ` H${x}`;
  }
  path += bend(x, y, to.x, to.y + BOX_HEIGHT / 2);
  return svg("path", { class: "edge", "data-edge": `${parent} ${child}`, d: path });
}

/** The three lines of a stage's box: its name, its kind and accuracy, its state and gates. */
function stageLines(name, stage) {
  let shortName = name;
  if (name.length > LONGEST_NAME) shortName = name.slice(0, LONGEST_NAME - 1) + "…";
  let kind = kindWords(stage);
  const accuracy = accuracyOf(stage.result);
  if (isNumber(accuracy)) kind += " · accuracy " + show(accuracy);
  let state = stateWords(stage);
  const hasEnded = stage.state === "done" || stage.state === "gate closed";
  const count = stage.gates.length;
  if (hasEnded && count) state += ` · gates ${count - stage.closed.length} of ${count}`;
  return [shortName, kind, state];
}

/** The box of a stage at {x, y}; isLinked: a click leads to its section. */
function stageNode(name, stage, { x, y }, isLinked) {
  const [shortName, kind, state] = stageLines(name, stage);
  const left = x + 12;
  const node = svg(
    "g",
    { class: "stage " + stage.state.replace(" ", "-") },
    svg("title", null, [name, ...stage.gates].join("\n")),
    svg("rect", { x, y, width: BOX_WIDTH, height: BOX_HEIGHT, rx: 8 }),
    svg("text", { class: "name", x: left, y: y + 21 }, shortName),
    svg("text", { x: left, y: y + 38 }, kind),
    svg("text", { class: "state", x: left, y: y + 55 }, state),
  );
  if (!isLinked) return node;
  return svg("a", { href: "#stage-" + name }, node);
}

/** The picture as a card that scrolls sideways. stages: by name; levels: lists of names; linked:
 *  names of those that have a section. */
function graphPicture(stages, levels, linked) {
  const layout = pictureLayout(levels);
  const { places, width, height } = layout;
  const edges = [];
  const nodes = [];
  for (const [name, stage] of Object.entries(stages)) {
    for (const parent of stage.parents) {
      edges.push(edgeOf(parent, name, levels, layout));
    }
    nodes.push(stageNode(name, stage, places[name], linked.has(name)));
  }
  const attributes = {
    class: "stages",
    viewBox: `0 0 ${width} ${height}`,
    style: `width: ${width}px; max-width: none`,
    role: "group",
    "aria-label": "Stages",
  };
  return el("div", { class: "scroll card" }, svg("svg", attributes, edges, nodes));
}
