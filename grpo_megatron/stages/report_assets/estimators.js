// Advantages of one group, as algorithms/advantages/ has them.
//
// rewards: of the group, [G]; null: unscorable, which counts nowhere and gets 0.
// others: rewards of the other groups of its domain.
// settings: eps, std ("sample", "population"), k (of pass@k), baseline (of PKPO), right (reward from
// which on a sample is correct), clip (largest size of an advantage; null: none).
// lengths: tokens of each sample of the group, [G].

const ZERO_VARIANCE = 1e-8;
const known = rewards => rewards.filter(reward => reward !== null);
const mean = values => values.reduce((sum, value) => sum + value, 0) / Math.max(values.length, 1);

function deviation(values, kind) {
  const middle = mean(values);
  const squares = values.reduce((sum, value) => sum + (value - middle) ** 2, 0);
  return Math.sqrt(squares / Math.max(values.length - (kind === "sample" ? 1 : 0), 1));
}

/** R - mean; exactly 0 for all where the group has no spread. */
function centred(rewards) {
  const there = known(rewards), middle = mean(there);
  const live = there.length && Math.max(...there) - Math.min(...there) > ZERO_VARIANCE;
  return rewards.map(reward => (live && reward !== null ? reward - middle : 0));
}

/** The same of those that have a reward, without zeros for the others. */
const centredKnown = rewards => centred(rewards).filter((_, i) => rewards[i] !== null);

const over = (values, divisor) => values.map(value => (value === 0 ? 0 : value / (divisor > 0 ? divisor : 1)));

function bestMinusSecond(rewards) {
  const order = rewards.map((reward, index) => [reward, index]).filter(([reward]) => reward !== null)
    .sort((a, b) => b[0] - a[0] || a[1] - b[1]);
  return rewards.map((_, index) => (order.length > 1 && index === order[0][1] ? order[0][0] - order[1][0] : 0));
}

/** R - the mean of all samples of the domain in the batch. */
function batchCentred(rewards, others) {
  const elsewhere = others.flat();
  return centred([...elsewhere, ...rewards]).slice(elsewhere.length);
}

/** R - the mean of the group's tokens; exactly 0 for all where the group has no spread. */
function lengthWeighted(rewards, others, settings, lengths) {
  let tokens = 0, total = 0;
  rewards.forEach((reward, i) => {
    if (reward === null) return;
    tokens += lengths[i];
    total += lengths[i] * reward;
  });
  const there = known(rewards), baseline = total / Math.max(tokens, 1);
  const live = there.length && Math.max(...there) - Math.min(...there) > ZERO_VARIANCE;
  return rewards.map(reward => (live && reward !== null ? reward - baseline : 0));
}

/** C(top, k) / C(bottom, k); 0 where top < k. */
function chooseRatio(top, bottom, k) {
  let ratio = 1;
  for (let j = 0; j < k; j++) ratio *= Math.max(top - j, 0) / Math.max(bottom - j, 1);
  return ratio;
}

/** Samples of the group, wrong ones among them. */
function counts(rewards, right) {
  const there = known(rewards);
  return [there.length, there.filter(reward => reward < right).length];
}

function passAtK(rewards, { k, right }) {
  const [n, wrong] = counts(rewards, right);
  const average = 1 - chooseRatio(wrong, n, k), std = Math.sqrt(Math.max(average * (1 - average), 0));
  if (std <= 1e-12 || n < k) return rewards.map(() => 0);
  const ofWrong = 1 - average - chooseRatio(wrong - 1, n - 1, k - 1);
  return rewards.map(reward => (reward === null ? 0 : (reward >= right ? 1 - average : ofWrong) / std));
}

function pkpo(rewards, { k, baseline, right }) {
  const [n, wrong] = counts(rewards, right), share = k / Math.max(n, 1);
  if (n < k || (baseline && n <= k)) return rewards.map(() => 0);
  return rewards.map(reward => {
    if (reward === null) return 0;
    const isRight = reward >= right;
    const value = isRight ? share : share * (1 - chooseRatio(wrong - 1, n - 1, k - 1));
    const wrongOthers = n - 1 - (n - wrong - (isRight ? 1 : 0));
    return baseline ? value - share * (1 - chooseRatio(wrongOthers, n - 1, k)) : value;
  });
}

// ofEqual: what a group whose rewards are all equal gets, in words; without it, exactly 0.
const ESTIMATORS = {
  "GRPO": { formula: "(R − mean) / (std of the group + ε)",
    of: (rewards, others, { eps, std }) => over(centred(rewards), deviation(known(rewards), std) + eps) },
  "Dr. GRPO": { formula: "R − mean", of: centred },
  "RLOO": { formula: "R − mean of the others", of: rewards => {
    const count = known(rewards).length;
    return centred(rewards).map(value => value * count / Math.max(count - 1, 1));
  } },
  "Lite PPO": { formula: "(R − mean) / (std of all rewards of the domain in the batch + ε)",
    of: (rewards, others, { eps, std }) =>
      over(centred(rewards), deviation(known([...others.flat(), ...rewards]), std) + eps) },
  "Residual": { formula: "(R − mean) / (std of all R − mean of the domain in the batch + ε)",
    of: (rewards, others, { eps, std }) =>
      over(centred(rewards), deviation([...others, rewards].flatMap(centredKnown), std) + eps) },
  "MaxRL": { formula: "(R − mean) / (mean + ε), for rewards of at least 0", of: (rewards, others, { eps }) => {
    const middle = mean(known(rewards)) + eps;
    return middle > 0 ? over(centred(rewards), middle) : rewards.map(() => 0);
  } },
  "pass@k": { formula: "by the number of correct samples: pass@k of k of the group, standardised", of: (rewards, others, settings) => passAtK(rewards, settings) },
  "PKPO": { formula: "by the number of correct samples: what a sample adds to pass@k",
    ofEqual: ({ baseline }) => (baseline ? null : "k / samples of the group where all are correct"), of: (rewards, others, settings) => pkpo(rewards, settings) },
  "Best minus second": { formula: "only the best sample: R − the second best R", of: bestMinusSecond },
  "Best minus second / std": { formula: "only the best sample: (R − the second best R) / (std of the group + ε)",
    of: (rewards, others, { eps, std }) => over(bestMinusSecond(rewards), deviation(known(rewards), std) + eps) },
  "OPO": { formula: "R − mean of the group, every sample weighted by its tokens", of: lengthWeighted },
  "Batch mean": { formula: "R − mean of all rewards of the domain in the batch", ofEqual: () => "R − that mean", of: batchCentred },
  "REINFORCE": { formula: "R, without a baseline", ofEqual: () => "R", of: rewards => rewards.map(reward => (reward === null ? 0 : reward)) },
};

/** What estimators make of a group whose rewards are all equal, in words. */
function equalRewardsSay(settings) {
  const others = Object.entries(ESTIMATORS).map(([name, { ofEqual }]) => [name, ofEqual ? ofEqual(settings) : null])
    .filter(([, words]) => words !== null);
  return `A group whose rewards are all equal gets exactly 0, but from ${others.map(([name, words]) => `${name} (${words})`).join(", ")}.`;
}

/** Advantages of a group by the estimator `name`, kept within `settings.clip` on both sides. */
function advantagesBy(name, rewards, others, settings, lengths) {
  const found = ESTIMATORS[name].of(rewards, others, settings, lengths), { clip } = settings;
  return clip === null ? found : found.map(value => Math.min(Math.max(value, -clip), clip));
}

/** Rewards with null for samples outside of the first `size` by ascending key, as GFPO's subsets. */
function keepFirst(rewards, keys, size) {
  const order = rewards.map((_, i) => i).filter(i => rewards[i] !== null).sort((a, b) => keys[a] - keys[b] || a - b);
  const kept = new Set(order.slice(0, size));
  return rewards.map((reward, i) => (kept.has(i) ? reward : null));
}

// Which samples of a group are trained; rewards, lengths in tokens, `objective.subset_size`.
const SUBSETS = {
  "none": rewards => rewards,
  "shortest": keepFirst,
  "token_efficiency": (rewards, lengths, size) => keepFirst(rewards, rewards.map((reward, i) => -reward / Math.max(lengths[i], 1)), size),
  "adaptive, hard group": keepFirst,
  "adaptive, medium group": (rewards, lengths, size) => keepFirst(rewards, lengths, Math.ceil(0.75 * size)),
  "adaptive, easy group": (rewards, lengths, size) => keepFirst(rewards, lengths, Math.ceil(0.5 * size)),
};
