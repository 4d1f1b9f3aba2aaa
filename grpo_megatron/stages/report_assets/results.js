// Tables of what came out of a run: held-out accuracy, idle shares, kernels.

/** The held-out accuracy over all domains that a result has; undefined where it has none. */
function accuracyOf(result) {
  return result.eval?.all?.accuracy;
}

/** Names of the shares that were measured; evaluations: values by name, of each domain. */
function shareNames(evaluations) {
  const names = new Set();
  for (const values of evaluations) {
    for (const name of Object.keys(values)) {
      names.add(name.replace(/_(low|high|unscorable)$/, ""));
    }
  }
  names.delete("prompts");
  return [...names];
}

/** A share with its interval of 95 % and the number of prompts that could not be scored. */
function shareText(values, name) {
  const low = values[name + "_low"];
  const high = values[name + "_high"];
  const unscorable = values[name + "_unscorable"];
  const notes = [];
  if (isNumber(low)) notes.push(`${show(low)} to ${show(high)}`);
  if (unscorable) notes.push(`${show(unscorable)} not scored`);
  const share = show(values[name]);
  if (!notes.length) return share;
  return `${share} (${notes.join("; ")})`;
}

/** Accuracy of the held-out prompts by domain; null where none was evaluated. */
function evaluationOf(run) {
  const isEvaluated = values => isNumber(values.accuracy) || values.accuracy_unscorable;
  const all = Object.entries(run.result.eval || {});
  const domains = all.filter(([, values]) => isEvaluated(values));
  if (!domains.length) return null;
  const names = shareNames(domains.map(([, values]) => values));
  const rows = domains.map(([domain, values]) => {
    const shares = names.map(name => shareText(values, name));
    return [domain, show(values.prompts), ...shares];
  });
  const title = el("h3", null, "Held-out accuracy");
  return el("div", null, title, table(["domain", "prompts", ...names], rows));
}

/** The row of a role: its name, its mean share as a bar, and in words. steps: of the run. */
function idleRow(role, values, steps) {
  const shares = values.filter(isNumber);
  if (!shares.length) return [role, "", "unknown"];
  const share = mean(shares);
  const bar = el("meter", { min: 0, max: 1, value: share, "aria-label": `${role} idle` });
  let words = (share * 100).toFixed(0) + " %";
  const unknown = steps - shares.length;
  if (unknown > 0) words += `, unknown in ${unknown} of ${steps} steps`;
  return [role, bar, words];
}

/** How long those that have a part in the steps had nothing to do, as a share of all steps; null
 *  where nobody measured it. */
function idleOf(run) {
  const measured = role => run.metrics["idle/" + role];
  if (!run.roles.some(measured)) return null;
  const steps = run.metrics.step.length;
  const rows = run.roles.map(role => idleRow(role, measured(role) || [], steps));
  const title = el("h3", null, "Idle share, mean of the steps");
  return el("div", { class: "idle" }, title, table(["", "", "idle"], rows));
}

/** Which kernels trained, as the newest attempt chose them, each with its reason; null where it
 *  did not say. */
function kernelsOf({ kernels }) {
  if (!kernels.length) return null;
  const rows = kernels.map(({ part, chosen, why }) => [part, chosen, why]);
  const title = el("summary", null, "Kernels of the policy");
  const listed = table(["part", "chosen", "because"], rows, [0, 1, 2]);
  return el("details", { class: "kernels" }, title, listed);
}
