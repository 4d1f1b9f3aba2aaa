// The page: a graph of stages if there is one, then a section for every run.

/** A run of a graph, folded below its name. */
function foldedRun(run) {
  const title = el("summary", null, el("h2", null, run.name));
  return el("details", null, title, runSection(run));
}

/** The sections of a report. */
function reportSections(report) {
  if (!report.graph) return report.runs.map(runSection);
  return [graphSection(report), ...report.runs.map(foldedRun)];
}

/** Unfolds the stage to which the address leads. */
function openTarget() {
  const target = document.getElementById(decodeURIComponent(location.hash.slice(1)));
  const fold = target && target.closest("details");
  if (!fold) return;
  fold.open = true;
  target.scrollIntoView();
}

const report = JSON.parse(document.getElementById("data").textContent);
document.getElementById("report").append(...reportSections(report));
addEventListener("hashchange", openTarget);
openTarget();
