// The page: a graph of stages if there is one, then a section for every run.

const OF_PREFERENCES = ["preferences", "reward_model"], OF_POLICIES = ["rl", "sft", "distil"];
const SCORED = [...OF_POLICIES, "experience"], TRAINED = [...OF_POLICIES, ...OF_PREFERENCES];

// names: metrics that runs of `kinds` (where there is no list, of kind rl) have, so that one which is
// missing is told. more: metrics that are shown in every run that has them; so are names.
const CHARTS = [
  { title: "Reward", names: ["reward/mean"], kinds: SCORED, more: /^reward\/.+\/mean$/ },
  { title: "Reward by domain", more: /^reward\/mean@/ },
  { title: "Accuracy", names: ["accuracy/pass_at_1"], kinds: SCORED, more: /^(accuracy\/pass_at_group|evaluation\/accuracy|preference\/accuracy)$/ },
  { title: "Accuracy by domain", more: /^accuracy\/pass_at_1@/ },
  { title: "Margin between chosen and rejected answers", more: /^preference\/margin$/ },
  { title: "Rewards of chosen and rejected answers", names: ["preference/reward_chosen", "preference/reward_rejected"], kinds: OF_PREFERENCES },
  { title: "Log-probs of chosen and rejected answers", more: /^preference\/logprob_(chosen|rejected)$/ },
  { title: "Lessons", more: /^experience\/(lessons|groups_that_teach|changes)$/ },
  { title: "Response length", names: ["response/length_correct_mean", "response/length_incorrect_mean"], kinds: SCORED },
  { title: "KL, engine to trainer", names: ["mismatch/k1", "mismatch/k3"] },
  { title: "KL to the reference", names: ["reference/k1", "reference/k3"] },
  { title: "KL of a step", names: ["step/k1"], more: /^(step|update)\/k[12]$/ },
  { title: "Entropy", names: ["policy/entropy"] },
  { title: "Clipped tokens", names: ["clip/region_fraction"], more: /^clip\/(?!.*sample).*fraction$/ },
  { title: "Gradient norm", names: ["grad/norm"], kinds: TRAINED },
  { title: "Seconds by phase", names: ["time/step_s"], kinds: TRAINED, more: /^time\/[^@]*_s$/ },
  { title: "Idle share", more: /^idle\// },
  { title: "Staleness of trained tokens", more: /^staleness\/(seen|predicted)_(mean|max)$/ },
  { title: "Tokens per second", more: /^throughput\// },
  { title: "Prompt tokens from the prefix cache", more: /^prefix_cache\/.*fraction$/ },
  { title: "Loss", names: ["loss/value"], kinds: TRAINED, more: /^(loss\/nll|distillation\/kl|preference\/loss)$/ },
  { title: "Groups without signal, truncated", more: /^(group\/all_equal_fraction|response\/truncated_fraction)$/ },
];

/** Points [step, value] of a metric, from the columns of a run; absent ones ("") are left out. */
const pointsOf = (run, name) => run.metrics[name].map((value, i) => [run.metrics.step[i], value]).filter(p => p[1] !== "");

/** Points [step, value] of a metric's curve: null, which breaks it, where a step lacks the metric.
 *  Few steps are evaluated: curves of evaluations go on over the others. */
function curveOf(run, name) {
  const steps = run.metrics.step, values = run.metrics[name], counts = run.metrics["evaluation/unscorable"];
  const isEvaluated = row => Boolean(counts) && counts[row] !== "";
  const isWanted = row => values[row] !== "" || !name.startsWith("evaluation/") || isEvaluated(row);
  return [...steps.keys()].filter(isWanted).map(row => [steps[row], values[row] === "" ? null : values[row]]);
}

/** Charts of a run, and a line for each that has no data. */
function curvesOf(run) {
  const known = Object.keys(run.metrics), plots = [], absent = [];
  for (const { title, names = [], kinds = ["rl"], more = null } of CHARTS) {
    const expected = kinds.includes(run.config.kind) ? names : names.filter(name => known.includes(name));
    const wanted = [...new Set([...expected, ...known.filter(name => more && more.test(name))])];
    const series = [], notes = [];
    for (const name of wanted) {
      const points = known.includes(name) ? pointsOf(run, name) : [];
      const finite = points.filter(p => isNumber(p[1])).length;
      if (finite) series.push({ label: more && name.includes("@") ? name.split("@")[1] : name, points: curveOf(run, name) });
      if (!points.length) absent.push(`${title}: the run has no metric ${name}.`);
      else if (!finite) absent.push(`${title}: no value of ${name} is finite (${points.length} skipped).`);
      else if (finite < points.length) notes.push(`${points.length - finite} of ${points.length} values of ${name} are not finite: skipped.`);
    }
    if (series.length) plots.push(chart(title, series, notes, run.gaps));
  }
  return el("div", null, run.every > 1 ? el("p", { class: "muted" }, `One step in ${run.every} is drawn, the last one and those with an evaluation.`) : null,
    el("div", { class: "grid" }, plots), otherMetric(run),
    absent.length ? el("ul", { class: "absent" }, absent.map(line => el("li", null, line))) : null);
}

/** Any other metric, by choice. */
function otherMetric(run) {
  const names = Object.keys(run.metrics).filter(name => !["step", "time_s"].includes(name)
    && pointsOf(run, name).some(p => isNumber(p[1]))).sort();
  if (!names.length) return null;
  const place = el("div", { class: "grid" });
  const select = el("select", { change: () => place.replaceChildren(
    ...(select.value ? [chart(select.value, [{ label: select.value, points: curveOf(run, select.value) }], [], run.gaps)] : [])) },
  el("option", { value: "" }, "choose one …"), names.map(name => el("option", null, name)));
  return el("div", null, el("p", null, el("label", null, `Any of ${names.length} metrics: `, select)), place);
}

/** [row, name] of every row of metrics; between them [null, name] where steps are missing. */
function columnsOf({ metrics: { step: steps }, gaps }) {
  return steps.flatMap((step, row) => {
    const missing = gaps.filter(([before, after]) => row && steps[row - 1] <= before && after <= step);
    return [...missing.map(([, , name]) => [null, name]), [row, "step " + step]];
  });
}

/** Metrics by layer as steps x layers; null where there are none. */
function routingOf(run) {
  const kinds = {};
  for (const name of Object.keys(run.metrics)) {
    const found = name.match(/^routing\/(.+)\/layer_(\d+)$/);
    if (found && run.metrics[name].some(isNumber)) (kinds[found[1]] = kinds[found[1]] || []).push(Number(found[2]));
  }
  const names = Object.keys(kinds).sort();
  if (!names.length) return el("p", { class: "absent" }, "Routing by layer: the run has no metric routing/…/layer_N.");
  const place = el("div");
  const columns = columnsOf(run);
  const draw = name => {
    const layers = kinds[name].sort((a, b) => a - b);
    const values = layers.map(layer => columns.map(([row]) => (row === null ? null : run.metrics[`routing/${name}/layer_${layer}`][row])));
    place.replaceChildren(heatMap(layers.map(layer => "layer " + layer), columns.map(([, name]) => name), values, "routing/" + name));
  };
  const select = el("select", { "aria-label": "quantity", change: () => draw(select.value) }, names.map(name => el("option", null, name)));
  select.value = names.find(name => name.includes("slot_flip_rate")) || names[0];
  draw(select.value);
  return el("figure", null, el("div", { class: "head" }, el("h4", null, "Routing by layer"), select), place);
}

/** Accuracy of the held-out prompts by domain, with 95 % intervals and what could not be scored. */
function evaluationOf(run) {
  const domains = Object.entries(run.result.eval || {}).filter(([, values]) => isNumber(values.accuracy) || values.accuracy_unscorable);
  if (!domains.length) return null;
  const shares = domains.flatMap(([, values]) => Object.keys(values)).map(name => name.replace(/_(low|high|unscorable)$/, ""));
  const names = [...new Set(shares)].filter(name => name !== "prompts");
  const cell = (values, name) => {
    const notes = [];
    if (isNumber(values[name + "_low"])) notes.push(`${show(values[name + "_low"])} to ${show(values[name + "_high"])}`);
    if (values[name + "_unscorable"]) notes.push(`${show(values[name + "_unscorable"])} not scored`);
    return show(values[name]) + (notes.length ? ` (${notes.join("; ")})` : "");
  };
  return el("div", null, el("h3", null, "Held-out accuracy"), table(["domain", "prompts", ...names],
    domains.map(([domain, values]) => [domain, show(values.prompts), ...names.map(name => cell(values, name))])));
}

/** How long those that have a part in the steps had nothing to do, as a share of all steps. */
function idleOf(run) {
  const steps = run.metrics.step.length;
  if (!run.roles.some(role => run.metrics["idle/" + role])) return null;
  const rows = run.roles.map(role => {
    const shares = (run.metrics["idle/" + role] || []).filter(isNumber), share = mean(shares);
    if (!shares.length) return [role, "", "unknown"];
    const known = shares.length < steps ? `, unknown in ${steps - shares.length} of ${steps} steps` : "";
    return [role, el("meter", { min: 0, max: 1, value: share, "aria-label": `${role} idle` }), (share * 100).toFixed(0) + " %" + known];
  });
  return el("div", { class: "idle" }, el("h3", null, "Idle share, mean of the steps"), table(["", "", "idle"], rows));
}

/** Models and algorithms of PPO and GRPO at the run's layout, as `plan --compare ppo` has them. */
function memoryOf(run) {
  if (!run.ppo) return null;
  const { models, algorithms, per_parameter: each, num_ranks: ranks, optimizer_shards: shards, expert_optimizer_shards: ofExperts } = run.ppo;
  const components = ["weights", "gradients", "optimizer", "buffers"];
  const sum = parts => Object.values(parts).reduce((total, part) => total + part, 0);
  const modelRows = models.map(({ model, parameters, parts, all_ranks }) => [model, show(parameters),
    ...components.map(name => (parts[name] ? bytes(parts[name]) : "–")), bytes(sum(parts)), bytes(all_ranks)]);
  const algorithmRows = algorithms.map(({ algorithm, models: names, rank, all_ranks, share_of_ppo }) =>
    [algorithm, names.join(", "), bytes(rank), bytes(all_ranks), (share_of_ppo * 100).toFixed(1) + " %"]);
  const free = run.config.objective.kl === "none" ? " The objective of this run has no KL term." : "";
  return el("div", { class: "memory" }, el("h3", null, "Memory: PPO and GRPO"),
    table(["model", "parameters", ...components, "a rank", "all ranks"], modelRows),
    el("p"), table(["algorithm", "models", "a rank", "all ranks", "of PPO"], algorithmRows, [0, 1]),
    el("p", { class: "muted" }, `At ${ranks} trainer rank${ranks === 1 ? "" : "s"}, of the fullest rank of a pipeline stage. `
      + `Trained: ${each.weights} bytes of weights, ${each.gradients} of gradients and ${each.optimizer} of optimizer state a parameter, padded; `
      + `optimizer state is shared by ${shards} rank(s)${ofExperts === shards ? "" : `, of experts by ${ofExperts}`}. Critic and reward model: the policy's layers with a value head. `
      + `Left out: activations, KV cache, engine; here the host keeps references.${free}`));
}

/** Which kernels trained, as the newest attempt chose them, each with its reason. */
function kernelsOf({ kernels }) {
  if (!kernels.length) return null;
  const rows = kernels.map(({ part, chosen, why }) => [part, chosen, why]);
  return el("details", { class: "kernels" }, el("summary", null, "Kernels of the policy"),
    table(["part", "chosen", "because"], rows, [0, 1, 2]));
}

/** What the explorer has of the run's objective, in words. */
function coverageOf({ preset }, { column, lacks }) {
  const as = column ? `is the column ${column}` : "is in no column";
  return `The objective of this run, ${preset}, ${as}${lacks.length ? "; the explorer lacks " + lacks.join(", ") : ""}.`;
}

/** Groups of the recorded steps, those with the largest spread first, then the newest. */
function explorerOf(run) {
  const objective = run.config.objective, names = run.config.domains.map(domain => domain.name);
  const settings = { eps: objective.advantage_eps, std: objective.std_kind, k: objective.passk_k, baseline: objective.pkpo_baseline,
    right: objective.correct_threshold, subset: run.explorer.subset, size: objective.subset_size,
    clip: objective.advantage_clip ?? null };
  const asGroup = ([, rewards, lengths]) => ({ rewards, lengths });
  const groups = [...(run.recorded || [])].reverse().flatMap(step => step.groups.map((group, i) => ({ ...asGroup(group),
    name: `step ${step.step}, group ${i} (${names[group[0]]}, mean ${show(known(group[1]).length ? mean(known(group[1])) : null)})`,
    others: step.groups.filter((other, j) => j !== i && other[0] === group[0]).map(asGroup),
    spread: known(group[1]).length ? most(known(group[1])) - least(known(group[1])) : -1 })));
  const example = { name: "example", rewards: [1, 0, 0, 1, 0, 0, 0, 0.5], lengths: [80, 120, 60, 200, 90, 150, 40, 100], others: [] };
  return el("div", null, el("p", { class: "muted" }, groups.length
    ? "Groups of the recorded steps, those with the largest spread first. "
    : "No step is in the sample store: an example. ", el("span", { class: "coverage" }, coverageOf(objective, run.explorer))),
  explorer(groups.length ? groups.sort((a, b) => b.spread - a.spread).slice(0, 64) : [example], settings));
}

function runSection(run) {
  const { config, result } = run, steps = run.metrics.step || [];
  const after = ((result.eval || {}).all || {}).accuracy, count = steps.length ? steps[steps.length - 1] + 1 : 0;
  const events = {};
  run.events.forEach(kind => { events[kind] = (events[kind] || 0) + 1; });
  const ended = Object.keys(result).length > 0;
  return el("section", { id: "stage-" + run.name, "data-run": run.name },
    facts([["model", config.model.preset || config.model.path || "–"], ["kind", config.kind], ["objective", config.kind === "rl" ? config.objective.preset : null],
      ["loss", OF_PREFERENCES.includes(config.kind) ? config.preferences.loss : null],
      ["steps", `${count} of ${config.num_steps}`],
      ["held-out accuracy before", isNumber(result.before) ? show(result.before) : null], ["held-out accuracy after", isNumber(after) ? show(after) : null],
      ["time", duration(result.seconds)], ["accelerator hours", isNumber(result.accelerator_hours) ? show(result.accelerator_hours) : null],
      ["state", ended ? "finished" : "no result yet"],
      ["events", Object.entries(events).map(([kind, n]) => `${kind.replaceAll("_", " ")} ${n}`).join(", ")]]),
    run.notes.length ? el("ul", { class: "absent" }, run.notes.map(note => el("li", null, note))) : null,
    evaluationOf(run),
    el("h3", null, "Curves"), steps.length ? curvesOf(run) : el("p", { class: "absent" }, "The run has no metrics yet."),
    steps.length ? idleOf(run) : null,
    steps.length ? routingOf(run) : null,
    el("h3", null, "Samples"), samplesOf(run.recorded || [], run.samples, config.kind === "rl"),
    config.kind === "rl" ? [el("h3", null, "A policy update, token by token"), updateOf(run.moved || []),
      el("h3", null, "Advantages of a group"), explorerOf(run), memoryOf(run)] : null,
    kernelsOf(run));
}

const GLYPHS = { done: "✓", "gate closed": "✕", begun: "…", ready: "○", waiting: "–" };

/** Stages by level, left to right; an edge for each stage that another builds on. */
function graphPicture(stages, levels, linked) {
  const wide = 200, high = 66, gapX = 70, gapY = 22, tallest = Math.max(...levels.map(level => level.length));
  const places = {};
  levels.forEach((level, column) => level.forEach((name, row) => {
    places[name] = [column * (wide + gapX) + 4, gapY / 2 + 4 + (row + (tallest - level.length) / 2) * (high + gapY)];
  }));
  const width = levels.length * (wide + gapX) - gapX + 8, height = tallest * (high + gapY) + 8;
  /** The height nearest to `wanted` at which a line passes the stages of a column. */
  const lane = (column, wanted) => {
    const tops = levels[column].map(name => places[name][1]);
    const free = y => tops.every(top => y < top || y > top + high);
    return [wanted, ...tops.flatMap(top => [top - gapY / 2, top + high + gapY / 2])].filter(free)
      .sort((a, b) => Math.abs(a - wanted) - Math.abs(b - wanted))[0];
  };
  const column = name => levels.findIndex(level => level.includes(name));
  const edges = Object.entries(stages).flatMap(([name, stage]) => stage.parents.map(parent => {
    let x = places[parent][0] + wide, y = places[parent][1] + high / 2, path = `M${x} ${y}`;
    const [lastX, lastY] = [places[name][0], places[name][1] + high / 2];
    const bend = (toX, toY) => { path += ` C${x + gapX / 2} ${y} ${toX - gapX / 2} ${toY} ${toX} ${toY}`; };
    for (let c = column(parent) + 1; c < column(name); c++) {
      const passing = lane(c, y), left = c * (wide + gapX) + 4;
      bend(left, passing);
      path += ` H${left + wide}`;
      [x, y] = [left + wide, passing];
    }
    bend(lastX, lastY);
    return svg("path", { class: "edge", "data-edge": `${parent} ${name}`, d: path });
  }));
  const nodes = Object.entries(stages).map(([name, stage]) => {
    const [x, y] = places[name], accuracy = ((stage.result.eval || {}).all || {}).accuracy;
    const gates = stage.gates.length ? ` · gates ${stage.gates.length - stage.closed.length} of ${stage.gates.length}` : "";
    const isEnded = stage.state === "done" || stage.state === "gate closed";
    const node = svg("g", { class: "stage " + stage.state.replace(" ", "-") }, svg("title", null, [name, ...stage.gates].join("\n")),
      svg("rect", { x, y, width: wide, height: high, rx: 8 }),
      svg("text", { class: "name", x: x + 12, y: y + 21 }, name.length > 24 ? name.slice(0, 23) + "…" : name),
      svg("text", { x: x + 12, y: y + 38 }, stage.kind.replace("_", " ") + (isNumber(accuracy) ? " · accuracy " + show(accuracy) : "")),
      svg("text", { class: "state", x: x + 12, y: y + 55 }, `${GLYPHS[stage.state]} ${stage.state}${isEnded ? gates : ""}`));
    return linked.has(name) ? svg("a", { href: "#stage-" + name }, node) : node;
  });
  return el("div", { class: "scroll card" }, svg("svg", { class: "stages", viewBox: `0 0 ${width} ${height}`, style: `width: ${width}px; max-width: none`,
    role: "group", "aria-label": "Stages" }, edges, nodes));
}

function graphSection({ graph, levels, runs }) {
  const linked = new Set(runs.map(run => run.name));
  return el("section", null, graphPicture(graph, levels, linked), el("h3", null, "Stages"),
    table(["stage", "kind", "state", "builds on", "accuracy", "time", "gates"], levels.flat().map(name => {
      const stage = graph[name], accuracy = ((stage.result.eval || {}).all || {}).accuracy;
      const closed = gate => stage.closed.find(text => text.startsWith(gate + " (seen"));
      const brief = gate => gate.replace(/ against .*\//, " against ");
      return [linked.has(name) ? el("a", { href: "#stage-" + name }, name) : name, stage.kind.replace("_", " "),
        `${GLYPHS[stage.state]} ${stage.state}`, stage.parents.length ? stage.parents.map(parent => el("div", null, parent)) : "–", show(accuracy), duration(stage.result.seconds) || "–",
        stage.gates.length ? el("ul", null, stage.gates.map(gate => el("li", { class: closed(gate) ? "closed" : null }, closed(gate) ? "✕ " + brief(closed(gate)) : brief(gate)))) : "–"];
    }), [0, 1, 2, 3, 6]));
}

const report = JSON.parse(document.getElementById("data").textContent);
document.getElementById("report").append(...(report.graph
  ? [graphSection(report), ...report.runs.map(run => el("details", null, el("summary", null, el("h2", null, run.name)), runSection(run)))]
  : report.runs.map(runSection)));

/** A link to a stage opens it. */
function openTarget() {
  const target = document.getElementById(decodeURIComponent(location.hash.slice(1)));
  if (!target || !target.closest("details")) return;
  target.closest("details").open = true;
  target.scrollIntoView();
}
addEventListener("hashchange", openTarget);
openTarget();
