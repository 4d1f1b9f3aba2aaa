// The groups that a run gives the explorer, and what the explorer has of the run's objective.

const MOST_GROUPS = 64;

/** Shown where no step is in the sample store. */
const EXAMPLE = {
  name: "example",
  rewards: [1, 0, 0, 1, 0, 0, 0, 0.5],
  lengths: [80, 120, 60, 200, 90, 150, 40, 100],
  others: [],
};

/** What the explorer has of the run's objective, in words. */
function coverageOf({ preset }, { column, lacks }) {
  let words = `The objective of this run, ${preset}, `;
  words += column ? `is the column ${column}` : "is in no column";
  if (lacks.length) words += "; the explorer lacks " + lacks.join(", ");
  return words + ".";
}

/** A group of a recorded step, as the explorer takes it, with the spread of its rewards (-1: none
 *  is known). number: of the group in its step; domains: names of the run's domains. */
function explorerGroup(step, number, domains) {
  const [domain, rewards, lengths] = step.groups[number];
  const others = [];
  step.groups.forEach(([otherDomain, otherRewards, otherLengths], i) => {
    const isOther = i !== number && otherDomain === domain;
    if (isOther) others.push({ rewards: otherRewards, lengths: otherLengths });
  });
  const there = known(rewards);
  const middle = show(there.length ? mean(there) : null);
  return {
    name: `step ${step.step}, group ${number} (${domains[domain]}, mean ${middle})`,
    rewards,
    lengths,
    others,
    spread: there.length ? most(there) - least(there) : -1,
  };
}

/** Groups of the recorded steps, those with the largest spread first, then the newest. */
function recordedGroups(run) {
  const domains = run.config.domains.map(domain => domain.name);
  const groups = [];
  for (const step of [...(run.recorded || [])].reverse()) {
    step.groups.forEach((_, number) => groups.push(explorerGroup(step, number, domains)));
  }
  groups.sort((a, b) => b.spread - a.spread);
  return groups.slice(0, MOST_GROUPS);
}

/** What the explorer takes of a run's objective; see `explorer`. */
function explorerSettings(run) {
  const { objective } = run.config;
  return {
    eps: objective.advantage_eps,
    std: objective.std_kind,
    k: objective.passk_k,
    baseline: objective.pkpo_baseline,
    right: objective.correct_threshold,
    subset: run.explorer.subset,
    size: objective.subset_size,
    clip: objective.advantage_clip ?? null,
  };
}

/** The explorer with the groups of a run, or with an example. */
function explorerOf(run) {
  let groups = recordedGroups(run);
  let whence = "Groups of the recorded steps, those with the largest spread first. ";
  if (!groups.length) {
    groups = [EXAMPLE];
    whence = "No step is in the sample store: an example. ";
  }
  const coverage = coverageOf(run.config.objective, run.explorer);
  const words = remark(whence, el("span", { class: "coverage" }, coverage));
  return el("div", null, words, explorer(groups, explorerSettings(run)));
}
