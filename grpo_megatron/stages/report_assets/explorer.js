// Rewards of a group under several estimators; every change shows at once.

/** {low, high, fine}: the ends of the rewards that a slider reaches, and the step of one. */
function rewardRange(groups) {
  const rewards = groups.flatMap(group => known(group.rewards));
  const low = Math.min(0, least(rewards));
  const high = Math.max(1, most(rewards));
  return { low, high, fine: (high - low) / 100 };
}

/** The reward as a number field has it; nothing for null. */
function fieldText(reward) {
  return reward === null ? "" : rounded(reward, 6);
}

/** [slider, field] of a reward, which follow each other. label: for those who do not see them;
 *  range: see `rewardRange`; change: takes each new reward, null for an empty field. */
function rewardInputs(reward, label, range, change) {
  const { low, high, fine } = range;
  const slider = el("input", {
    type: "range",
    min: low,
    max: high,
    step: fine,
    "aria-label": label,
    input: () => {
      const value = Number(slider.value);
      field.value = fieldText(value);
      change(value);
    },
  });
  const field = el("input", {
    type: "number",
    step: fine,
    "aria-label": label + " as a number",
    input: () => {
      const value = field.value === "" ? null : Number(field.value);
      if (value !== null) slider.value = value;
      change(value);
    },
  });
  slider.value = reward === null ? low : reward;
  field.value = fieldText(reward);
  return [slider, field];
}

/** The field of a sample's tokens; number: of the sample, from 1; change: takes each new count. */
function lengthInput(tokens, number, change) {
  const field = el("input", {
    type: "number",
    min: 1,
    step: 1,
    "aria-label": "tokens of sample " + number,
    class: "length",
    input: () => change(Number(field.value)),
  });
  field.value = tokens;
  return field;
}

/** What the explorer shows, and what was moved since; see `explorer` for what it takes. */
class Explorer {
  constructor(groups, settings) {
    this.groups = groups;
    this.settings = settings;
    this.range = rewardRange(groups);
    this.names = Object.keys(ESTIMATORS);
    this.body = el("tbody");
    this.chosen = 0; // which of the groups
    this.rewards = [];
    this.lengths = [];
    this.cells = []; // for every sample those of all estimators
    this.reset();
  }

  /** Shows the group of a number, as it was recorded. */
  choose(number) {
    this.chosen = number;
    this.reset();
  }

  /** Shows the chosen group as it was recorded. */
  reset() {
    const { rewards, lengths } = this.groups[this.chosen];
    this.build(rewards, lengths);
  }

  /** Adds a sample of the lowest reward and of the mean length. */
  addSample() {
    const length = Math.max(Math.round(mean(this.lengths)), 1);
    this.build([...this.rewards, this.range.low], [...this.lengths, length]);
  }

  /** Removes the last sample, but for the only one. */
  removeSample() {
    const count = Math.max(this.rewards.length - 1, 1);
    this.build(this.rewards.slice(0, count), this.lengths.slice(0, count));
  }

  /** Makes the rows of a group. */
  build(rewards, lengths) {
    this.rewards = [...rewards];
    this.lengths = [...lengths];
    const newCell = () => el("td", { class: "bar" }, el("span"));
    this.cells = rewards.map(() => this.names.map(newCell));
    const rows = rewards.map((_, i) => this.row(i));
    this.body.replaceChildren(...rows);
    this.refresh();
  }

  /** The row of sample i. */
  row(i) {
    const number = i + 1;
    const setReward = value => {
      this.rewards[i] = value;
      this.refresh();
    };
    const setLength = value => {
      this.lengths[i] = value;
      this.refresh();
    };
    const label = "reward of sample " + number;
    const [slider, field] = rewardInputs(this.rewards[i], label, this.range, setReward);
    const length = lengthInput(this.lengths[i], number, setLength);
    const before = [[String(number)], [slider, " ", field], [length]];
    const cells = before.map(content => el("td", null, content));
    return el("tr", null, cells, this.cells[i]);
  }

  /** Rewards of the samples of a group that are trained, null for the others. */
  trained({ rewards, lengths }) {
    const { subset, size } = this.settings;
    return SUBSETS[subset](rewards, lengths, size);
  }

  /** Shows the advantages of the rewards as they are now. */
  refresh() {
    const { settings, rewards, lengths } = this;
    const trainedRewards = this.trained({ rewards, lengths });
    const others = this.groups[this.chosen].others.map(group => this.trained(group));
    const columns = this.names.map(name => {
      return advantagesBy(name, trainedRewards, others, settings, lengths);
    });
    const full = Math.max(largest(columns.flat()), 1e-9);
    columns.forEach((advantages, column) => {
      advantages.forEach((advantage, i) => {
        const text = advantageText(rewards[i], trainedRewards[i], advantage);
        showAdvantage(this.cells[i][column], text, advantage, full);
      });
    });
  }
}

/** The text of a cell: the advantage, or why there is none. */
function advantageText(reward, trainedReward, advantage) {
  if (reward === null) return "unscorable";
  if (trainedReward === null) return "not trained";
  return signed(advantage, 3);
}

/** Puts an advantage into its cell, as a text and as a bar; full: the size of the longest bar. */
function showAdvantage(cell, text, advantage, full) {
  cell.firstChild.textContent = text;
  cell.dataset.advantage = advantage;
  cell.style.setProperty("--share", Math.abs(advantage) / full);
  cell.classList.toggle("minus", advantage < 0);
}

/** The explorer as a card. groups: [{name, rewards, lengths, others: [{rewards, lengths}]}], others
 *  being those of its domain in its step; settings: see estimators.js, and subset (a name of
 *  SUBSETS), size. */
function explorer(groups, settings) {
  const shown = new Explorer(groups, settings);
  const head = explorerHead(shown.names);
  const grid = el("div", { class: "scroll" }, el("table", null, head, shown.body));
  const controls = explorerControls(shown);
  const formulas = explorerFormulas(shown.names);
  return el("div", { class: "card explorer" }, controls, grid, formulas, explorerNotes(settings));
}
