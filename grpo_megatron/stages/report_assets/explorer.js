// Rewards of a group under several estimators; every change shows at once.

/** groups: [{name, rewards, others}], see estimators.js. */
function explorer(groups, settings) {
  const every = groups.flatMap(group => known(group.rewards));
  const low = Math.min(0, least(every)), high = Math.max(1, most(every)), fine = (high - low) / 100;
  const names = Object.keys(ESTIMATORS), body = el("tbody");
  let rewards = [], cells = [], chosen = 0;

  function refresh() {
    const columns = names.map(name => ESTIMATORS[name].of(rewards, groups[chosen].others, settings));
    const full = Math.max(most(columns.flat().map(Math.abs)), 1e-9);
    columns.forEach((column, c) => column.forEach((value, i) => {
      const cell = cells[i][c];
      cell.firstChild.textContent = rewards[i] === null ? "unscorable" : signed(Number(value.toFixed(3)));
      cell.dataset.advantage = value;
      cell.style.setProperty("--share", Math.abs(value) / full);
      cell.classList.toggle("minus", value < 0);
    }));
  }

  function build(values) {
    rewards = [...values];
    cells = rewards.map(() => names.map(() => el("td", { class: "bar" }, el("span"))));
    body.replaceChildren(...rewards.map((reward, i) => {
      const label = "reward of sample " + (i + 1);
      const slider = el("input", { type: "range", min: low, max: high, step: fine, "aria-label": label, input: () => set(Number(slider.value)) });
      const field = el("input", { type: "number", step: fine, "aria-label": label + " as a number", input: () => set(field.value === "" ? null : Number(field.value), field) });
      function set(value, from) {
        rewards[i] = value;
        if (value !== null) slider.value = value;
        if (from !== field) field.value = value === null ? "" : Number(value.toPrecision(6));
        refresh();
      }
      slider.value = reward === null ? low : reward;
      field.value = reward === null ? "" : Number(reward.toPrecision(6));
      return el("tr", null, el("td", null, String(i + 1)), el("td", null, slider, " ", field), cells[i]);
    }));
    refresh();
  }

  const select = el("select", { "aria-label": "group", change: () => { chosen = Number(select.value); build(groups[chosen].rewards); } },
    groups.map((group, i) => el("option", { value: i }, group.name)));
  build(groups[0].rewards);
  return el("div", { class: "card explorer" },
    el("p", null, select, " ",
      el("button", { type: "button", click: () => build(groups[chosen].rewards) }, "Reset"), " ",
      el("button", { type: "button", click: () => build([...rewards, low]) }, "Add a sample"), " ",
      el("button", { type: "button", click: () => build(rewards.slice(0, Math.max(rewards.length - 1, 1))) }, "Remove the last")),
    el("div", { class: "scroll" }, el("table", null, el("thead", null, el("tr", null, el("th", null, "sample"), el("th", { class: "text" }, "reward"),
      names.map(name => el("th", { scope: "col", title: ESTIMATORS[name].formula }, name)))), body)),
    el("ul", { class: "muted" }, names.map(name => el("li", null, name + ": " + ESTIMATORS[name].formula))),
    el("p", { class: "muted" }, `ε = ${show(settings.eps)}, std of a ${settings.std}. An empty reward is unscorable. Groups without spread get exactly 0.`));
}
