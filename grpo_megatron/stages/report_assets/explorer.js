// Rewards of a group under several estimators; every change shows at once.

/** groups: [{name, rewards, lengths, others: [{rewards, lengths}]}]; settings: see estimators.js, and
 *  subset (a name of SUBSETS), size. */
function explorer(groups, settings) {
  const every = groups.flatMap(group => known(group.rewards));
  const low = Math.min(0, least(every)), high = Math.max(1, most(every)), fine = (high - low) / 100;
  const names = Object.keys(ESTIMATORS), body = el("tbody");
  let rewards = [], lengths = [], cells = [], chosen = 0;

  /** Rewards of the samples that are trained. */
  const trained = group => SUBSETS[settings.subset](group.rewards, group.lengths, settings.size);

  function refresh() {
    const own = trained({ rewards, lengths }), others = groups[chosen].others.map(trained);
    const columns = names.map(name => advantagesBy(name, own, others, settings, lengths));
    const full = Math.max(most(columns.flat().map(Math.abs)), 1e-9);
    columns.forEach((column, c) => column.forEach((value, i) => {
      const cell = cells[i][c];
      cell.firstChild.textContent = rewards[i] === null ? "unscorable" : own[i] === null ? "not trained" : signed(Number(value.toFixed(3)));
      cell.dataset.advantage = value;
      cell.style.setProperty("--share", Math.abs(value) / full);
      cell.classList.toggle("minus", value < 0);
    }));
  }

  function build(group) {
    rewards = [...group.rewards];
    lengths = [...group.lengths];
    cells = rewards.map(() => names.map(() => el("td", { class: "bar" }, el("span"))));
    body.replaceChildren(...rewards.map((reward, i) => {
      const label = "reward of sample " + (i + 1);
      const slider = el("input", { type: "range", min: low, max: high, step: fine, "aria-label": label, input: () => set(Number(slider.value)) });
      const field = el("input", { type: "number", step: fine, "aria-label": label + " as a number", input: () => set(field.value === "" ? null : Number(field.value), field) });
      const length = el("input", { type: "number", min: 1, step: 1, "aria-label": "tokens of sample " + (i + 1), class: "length",
        input: () => { lengths[i] = Number(length.value); refresh(); } });
      function set(value, from) {
        rewards[i] = value;
        if (value !== null) slider.value = value;
        if (from !== field) field.value = value === null ? "" : Number(value.toPrecision(6));
        refresh();
      }
      slider.value = reward === null ? low : reward;
      field.value = reward === null ? "" : Number(reward.toPrecision(6));
      length.value = lengths[i];
      return el("tr", null, el("td", null, String(i + 1)), el("td", null, slider, " ", field), el("td", null, length), cells[i]);
    }));
    refresh();
  }

  const added = () => build({ rewards: [...rewards, low], lengths: [...lengths, Math.max(Math.round(mean(lengths)), 1)] });
  function removed() {
    const count = Math.max(rewards.length - 1, 1);
    build({ rewards: rewards.slice(0, count), lengths: lengths.slice(0, count) });
  }
  const select = el("select", { "aria-label": "group", change: () => { chosen = Number(select.value); build(groups[chosen]); } },
    groups.map((group, i) => el("option", { value: i }, group.name)));
  const subset = el("select", { "aria-label": "subset", class: "subset", change: () => { settings.subset = subset.value; refresh(); } },
    Object.keys(SUBSETS).map(name => el("option", { value: name }, name)));
  subset.value = settings.subset;
  const size = el("input", { type: "number", min: 1, step: 1, "aria-label": "subset size", class: "length", value: settings.size,
    input: () => { settings.size = Number(size.value); refresh(); } });
  const clip = el("input", { type: "number", min: 0, step: "any", "aria-label": "largest advantage", class: "length clip", value: settings.clip ?? "",
    input: () => { settings.clip = Number(clip.value) > 0 ? Number(clip.value) : null; refresh(); } });
  build(groups[0]);
  return el("div", { class: "card explorer" },
    el("p", null, select, " ",
      el("button", { type: "button", click: () => build(groups[chosen]) }, "Reset"), " ",
      el("button", { type: "button", click: added }, "Add a sample"), " ",
      el("button", { type: "button", click: removed }, "Remove the last"), " ",
      el("label", null, "Trained subset: ", subset), " ", el("label", null, "of ", size), " ",
      el("label", null, "Advantages within ± ", clip)),
    el("div", { class: "scroll" }, el("table", null, el("thead", null, el("tr", null, el("th", null, "sample"), el("th", { class: "text" }, "reward"), el("th", { class: "text" }, "tokens"),
      names.map(name => el("th", { scope: "col", title: ESTIMATORS[name].formula }, name)))), body)),
    el("ul", { class: "muted" }, names.map(name => el("li", null, name + ": " + ESTIMATORS[name].formula))),
    el("p", { class: "muted" }, `ε = ${show(settings.eps)}, std of a ${settings.std}, k = ${settings.k}, correct from a reward of ${show(settings.right)} on. An empty reward is unscorable. ${equalRewardsSay(settings)} Adaptive subsets keep the shortest samples: all of the size in a hard group, 3/4 in a medium, half in an easy one; which it is, quartiles of the run's mean rewards say.`));
}
