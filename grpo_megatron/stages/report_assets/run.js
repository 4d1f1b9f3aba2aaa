// The section of a run.

/** How often each kind of event was, in words. */
function eventWords(kinds) {
  const counts = {};
  for (const kind of kinds) {
    counts[kind] = (counts[kind] || 0) + 1;
  }
  const told = Object.entries(counts).map(([kind, n]) => `${kind.replaceAll("_", " ")} ${n}`);
  return told.join(", ");
}

/** The number as a text; null, which leaves a fact out, for what is none. */
function factOf(value) {
  return isNumber(value) ? show(value) : null;
}

/** What a run is, and what it has come to. */
function runFacts(run) {
  const { config, result } = run;
  const steps = run.metrics.step || [];
  const count = steps.length ? steps[steps.length - 1] + 1 : 0;
  const isRl = config.kind === "rl";
  const isOfPreferences = OF_PREFERENCES.includes(config.kind);
  const hasEnded = Object.keys(result).length > 0;
  return facts([
    ["model", config.model.preset || config.model.path || "–"],
    ["kind", config.kind],
    ["objective", isRl ? config.objective.preset : null],
    ["loss", isOfPreferences ? config.preferences.loss : null],
    ["steps", `${count} of ${config.num_steps}`],
    ["held-out accuracy before", factOf(result.before)],
    ["held-out accuracy after", factOf(accuracyOf(result))],
    ["time", duration(result.seconds)],
    ["accelerator hours", factOf(result.accelerator_hours)],
    ["state", hasEnded ? "finished" : "no result yet"],
    ["events", eventWords(run.events)],
  ]);
}

/** Curves, idle shares and routing of a run. */
function metricsOf(run) {
  const title = el("h3", null, "Curves");
  const hasSteps = Boolean(run.metrics.step && run.metrics.step.length);
  if (!hasSteps) return [title, absence("The run has no metrics yet.")];
  return [title, curvesOf(run), idleOf(run), routingOf(run)];
}

/** What runs of RL alone have. */
function policyParts(run) {
  return [
    el("h3", null, "A policy update, token by token"),
    updateOf(run.moved || []),
    el("h3", null, "Advantages of a group"),
    explorerOf(run),
    memoryOf(run),
  ];
}

/** The whole section of a run. */
function runSection(run) {
  const isRl = run.config.kind === "rl";
  return el(
    "section",
    { id: "stage-" + run.name, "data-run": run.name },
    runFacts(run),
    absences(run.notes),
    evaluationOf(run),
    metricsOf(run),
    el("h3", null, "Samples"),
    samplesOf(run.recorded || [], run.samples, isRl),
    isRl ? policyParts(run) : null,
    kernelsOf(run),
  );
}
