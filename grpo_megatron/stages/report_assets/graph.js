// The section of a graph: its picture, and a table of its stages.

/** The state of a stage, and below it in what it has changed and what is to be known of it. */
function stateCell(stage) {
  const lines = stage.changed ? [stage.changed, ...stage.notes] : stage.notes;
  const state = stateWords(stage);
  if (!lines.length) return state;
  const items = lines.map(line => el("li", null, line));
  return [state, el("ul", { class: "stage-notes" }, items)];
}

/** The stages that a stage builds on. */
function parentsCell(stage) {
  if (!stage.parents.length) return "–";
  return stage.parents.map(parent => el("div", null, parent));
}

/** A gate of a stage without the directory that it is against; of a closed one with what was
 *  seen. */
function gateItem(gate, stage) {
  const closed = stage.closed.find(text => text.startsWith(gate + " (seen"));
  const brief = text => text.replace(/ against .*\//, " against ");
  if (!closed) return el("li", null, brief(gate));
  return el("li", { class: "closed" }, "✕ " + brief(closed));
}

/** The gates of a stage. */
function gatesCell(stage) {
  if (!stage.gates.length) return "–";
  const items = stage.gates.map(gate => gateItem(gate, stage));
  return el("ul", null, items);
}

/** Cells of a stage; isLinked: it has a section. */
function stageRow(name, stage, isLinked) {
  const title = isLinked ? el("a", { href: "#stage-" + name }, name) : name;
  return [
    title,
    kindWords(stage),
    stateCell(stage),
    parentsCell(stage),
    show(accuracyOf(stage.result)),
    duration(stage.result.seconds) || "–",
    gatesCell(stage),
  ];
}

/** The whole section of a graph. */
function graphSection({ graph, levels, runs }) {
  const linked = new Set(runs.map(run => run.name));
  const names = levels.flat();
  const rows = names.map(name => stageRow(name, graph[name], linked.has(name)));
  const head = ["stage", "kind", "state", "builds on", "accuracy", "time", "gates"];
  const picture = graphPicture(graph, levels, linked);
  const stages = table(head, rows, [0, 1, 2, 3, 6]);
  return el("section", null, picture, el("h3", null, "Stages"), stages);
}
