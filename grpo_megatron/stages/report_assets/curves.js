// Curves of a run's metrics over its steps: the charts of chart_list.js, and any metric by choice.

/** Values of a metric in the steps that have it; what was not finite is null. */
function valuesOf(run, name) {
  const values = run.metrics[name] || [];
  return values.filter(value => value !== "");
}

/** Points [step, value] of a metric's curve: null, which breaks it, where a step lacks the metric.
 *  Few steps are evaluated: curves of evaluations go on over the others. */
function curveOf(run, name) {
  const steps = run.metrics.step;
  const values = run.metrics[name];
  const counts = run.metrics["evaluation/unscorable"];
  const isOfEvaluations = name.startsWith("evaluation/");
  const points = [];
  steps.forEach((step, row) => {
    const isThere = values[row] !== "";
    const isEvaluated = Boolean(counts) && counts[row] !== "";
    if (isThere) {
      points.push([step, values[row]]);
    } else if (!isOfEvaluations || isEvaluated) {
      points.push([step, null]);
    }
  });
  return points;
}

/** Names of the metrics that a chart of a run is to have. */
function wantedMetrics(run, { names = [], kinds = ["rl"], more = null }) {
  const present = Object.keys(run.metrics);
  const isExpected = kinds.includes(run.config.kind);
  const named = isExpected ? names : names.filter(name => present.includes(name));
  const others = present.filter(name => more && more.test(name));
  return [...new Set([...named, ...others])];
}

/** The label of a metric's curve: of a chart with metrics by domain the domain. */
function curveLabel(name, { more = null }) {
  const isByDomain = more && name.includes("@");
  return isByDomain ? name.split("@")[1] : name;
}

/** A chart of a run as {plot, absent}: the plot, null where it would be empty, and a line for each
 *  metric that has no curve. */
function chartOf(run, definition) {
  const { title } = definition;
  const series = [];
  const notes = [];
  const absent = [];
  for (const name of wantedMetrics(run, definition)) {
    const values = valuesOf(run, name);
    const count = values.length;
    const finite = values.filter(isNumber).length;
    if (finite) {
      series.push({ label: curveLabel(name, definition), points: curveOf(run, name) });
    }
    if (!count) {
      absent.push(`${title}: the run has no metric ${name}.`);
    } else if (!finite) {
      absent.push(`${title}: no value of ${name} is finite (${count} skipped).`);
    } else if (finite < count) {
      const skipped = count - finite;
      notes.push(`${skipped} of ${count} values of ${name} are not finite: skipped.`);
    }
  }
  const plot = series.length ? chart(title, series, notes, run.gaps) : null;
  return { plot, absent };
}

/** Charts of a run, and a line for each metric that has no curve. */
function curvesOf(run) {
  const charts = CHARTS.map(definition => chartOf(run, definition));
  const plots = el("div", { class: "grid" }, charts.map(one => one.plot));
  let thinned = null;
  if (run.every > 1) {
    thinned = remark(
      `One step in ${run.every} is drawn, the last one and those with an evaluation.`,
    );
  }
  const lines = charts.flatMap(one => one.absent);
  return el("div", null, thinned, plots, otherMetric(run), absences(lines));
}

/** Any other metric, by choice; null where none has a value. */
function otherMetric(run) {
  const isMetric = name => name !== "step" && name !== "time_s";
  const hasValues = name => valuesOf(run, name).some(isNumber);
  const metrics = Object.keys(run.metrics).filter(isMetric);
  const names = metrics.filter(hasValues).sort();
  if (!names.length) return null;
  const place = el("div", { class: "grid" });
  const draw = () => {
    const name = select.value;
    if (!name) {
      place.replaceChildren();
      return;
    }
    const series = [{ label: name, points: curveOf(run, name) }];
    place.replaceChildren(chart(name, series, [], run.gaps));
  };
  const none = el("option", { value: "" }, "choose one …");
  const options = names.map(name => el("option", null, name));
  const select = el("select", { change: draw }, none, options);
  const label = el("label", null, `Any of ${names.length} metrics: `, select);
  return el("div", null, el("p", null, label), place);
}
