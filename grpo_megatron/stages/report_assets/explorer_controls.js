// What stands around the explorer's rows: choices above them, names and explanations.

/** The choice of one of the explorer's groups. */
function groupChoice(shown) {
  const options = shown.groups.map((group, i) => el("option", { value: i }, group.name));
  const change = () => shown.choose(Number(select.value));
  const select = el("select", { "aria-label": "group", change }, options);
  return select;
}

/** The choice of the samples that are trained. */
function subsetChoice(shown) {
  const options = Object.keys(SUBSETS).map(name => el("option", { value: name }, name));
  const change = () => {
    shown.settings.subset = select.value;
    shown.refresh();
  };
  const select = el("select", { "aria-label": "subset", class: "subset", change }, options);
  select.value = shown.settings.subset;
  return select;
}

/** The field of a subset's size, in samples. */
function sizeField(shown) {
  const field = el("input", {
    type: "number",
    min: 1,
    step: 1,
    "aria-label": "subset size",
    class: "length",
    value: shown.settings.size,
    input: () => {
      shown.settings.size = Number(field.value);
      shown.refresh();
    },
  });
  return field;
}

/** The field of the largest advantage; what is not above 0 is no bound. */
function clipField(shown) {
  const field = el("input", {
    type: "number",
    min: 0,
    step: "any",
    "aria-label": "largest advantage",
    class: "length clip",
    value: shown.settings.clip ?? "",
    input: () => {
      const bound = Number(field.value);
      shown.settings.clip = bound > 0 ? bound : null;
      shown.refresh();
    },
  });
  return field;
}

/** The line of choices above the rows. */
function explorerControls(shown) {
  const button = (words, click) => el("button", { type: "button", click }, words);
  const parts = [
    groupChoice(shown),
    button("Reset", () => shown.reset()),
    button("Add a sample", () => shown.addSample()),
    button("Remove the last", () => shown.removeSample()),
    el("label", null, "Trained subset: ", subsetChoice(shown)),
    el("label", null, "of ", sizeField(shown)),
    el("label", null, "Advantages within ± ", clipField(shown)),
  ];
  return el("p", null, spaced(parts));
}

/** The head of the rows; names: of the estimators. */
function explorerHead(names) {
  const ofEstimators = names.map(name => {
    return el("th", { scope: "col", title: ESTIMATORS[name].formula }, name);
  });
  const ofInputs = ["reward", "tokens"].map(name => el("th", { class: "text" }, name));
  return el("thead", null, el("tr", null, el("th", null, "sample"), ofInputs, ofEstimators));
}

/** What each estimator computes. */
function explorerFormulas(names) {
  const lines = names.map(name => el("li", null, `${name}: ${ESTIMATORS[name].formula}`));
  return el("ul", { class: "muted" }, lines);
}

/** What the settings are that nobody can change here, and what the words mean. */
function explorerNotes(settings) {
  const { eps, std, k, right } = settings;
  const sentences = [
    `ε = ${show(eps)}, std of a ${std}, k = ${k}, correct from a reward of ${show(right)} on.`,
    "An empty reward is unscorable.",
    equalRewardsSay(settings),
    "Adaptive subsets keep the shortest samples: all of the size in a hard group, 3/4 in a medium,"
      + " half in an easy one; which it is, quartiles of the run's mean rewards say.",
  ];
  return remark(sentences.join(" "));
}
