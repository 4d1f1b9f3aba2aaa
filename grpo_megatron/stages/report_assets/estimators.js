// Advantages of one group, as algorithms/advantages/ has them.
//
// rewards: of the group, [G]; null: unscorable, which counts nowhere and gets 0.
// others: rewards of the other groups of its domain.
// settings: eps, std ("sample", "population"), k (of pass@k), baseline (of PKPO), right (reward
// from which on a sample is correct), clip (largest size of an advantage; null: none).
// lengths: tokens of each sample of the group, [G].

const ZERO_VARIANCE = 1e-8;

/** The rewards that are known. */
function known(rewards) {
  return rewards.filter(reward => reward !== null);
}

/** The standard deviation of some numbers; kind: "sample" or "population". */
function deviation(values, kind) {
  const middle = mean(values);
  const squares = sumOf(values.map(value => (value - middle) ** 2));
  const taken = kind === "sample" ? 1 : 0;
  return Math.sqrt(squares / Math.max(values.length - taken, 1));
}

/** Whether the known rewards of a group differ. */
function hasSpread(rewards) {
  const there = known(rewards);
  return there.length > 0 && most(there) - least(there) > ZERO_VARIANCE;
}

/** R - baseline, [G]; exactly 0 for all where the group has no spread. */
function above(rewards, baseline) {
  const isLive = hasSpread(rewards);
  return rewards.map(reward => (isLive && reward !== null ? reward - baseline : 0));
}

/** R - mean, [G]; exactly 0 for all where the group has no spread. */
function centred(rewards) {
  return above(rewards, mean(known(rewards)));
}

/** The same of those that have a reward, without zeros for the others. */
function centredKnown(rewards) {
  return centred(rewards).filter((_, i) => rewards[i] !== null);
}

/** The values over a divisor, or as they are where that is not above 0; what is 0 stays so. */
function over(values, divisor) {
  const positive = divisor > 0 ? divisor : 1;
  return values.map(value => (value === 0 ? 0 : value / positive));
}

/** 0 for every sample, [G]. */
function zeros(rewards) {
  return rewards.map(() => 0);
}

/** R of the best sample - R of the second, for the best one alone, [G]. */
function bestMinusSecond(rewards) {
  const gained = zeros(rewards);
  const indices = [...rewards.keys()].filter(i => rewards[i] !== null);
  if (indices.length < 2) return gained;
  const [best, second] = indices.sort((a, b) => rewards[b] - rewards[a] || a - b);
  gained[best] = rewards[best] - rewards[second];
  return gained;
}

/** The same over the deviation of the group, [G]. */
function bestMinusSecondOverStd(rewards, others, { eps, std }) {
  return over(bestMinusSecond(rewards), deviation(known(rewards), std) + eps);
}

/** (R - mean) over the deviation of the group, [G]. */
function grpo(rewards, others, { eps, std }) {
  return over(centred(rewards), deviation(known(rewards), std) + eps);
}

/** R - the mean of the others, [G]. */
function leaveOneOut(rewards) {
  const count = known(rewards).length;
  return centred(rewards).map(value => value * count / Math.max(count - 1, 1));
}

/** (R - mean) over the deviation of all rewards of the domain in the batch, [G]. */
function litePpo(rewards, others, { eps, std }) {
  const all = known([...others.flat(), ...rewards]);
  return over(centred(rewards), deviation(all, std) + eps);
}

/** (R - mean) over the deviation of all R - mean of the domain in the batch, [G]. */
function residual(rewards, others, { eps, std }) {
  const all = [...others, rewards].flatMap(centredKnown);
  return over(centred(rewards), deviation(all, std) + eps);
}

/** (R - mean) over the mean, [G]; 0 for all where the mean is not above 0. */
function maxRl(rewards, others, { eps }) {
  const middle = mean(known(rewards)) + eps;
  if (middle <= 0) return zeros(rewards);
  return over(centred(rewards), middle);
}

/** R - the mean of all samples of the domain in the batch, [G]. */
function batchCentred(rewards, others) {
  const elsewhere = others.flat();
  return centred([...elsewhere, ...rewards]).slice(elsewhere.length);
}

/** R - the mean of the group's tokens, [G]; exactly 0 for all where the group has no spread. */
function lengthWeighted(rewards, others, settings, lengths) {
  let tokens = 0;
  let total = 0;
  rewards.forEach((reward, i) => {
    if (reward === null) return;
    tokens += lengths[i];
    total += lengths[i] * reward;
  });
  return above(rewards, total / Math.max(tokens, 1));
}

/** R without a baseline, [G]. */
function reinforce(rewards) {
  return rewards.map(reward => (reward === null ? 0 : reward));
}

/** C(top, k) / C(bottom, k); 0 where top < k. */
function chooseRatio(top, bottom, k) {
  let ratio = 1;
  for (let j = 0; j < k; j++) {
    ratio *= Math.max(top - j, 0) / Math.max(bottom - j, 1);
  }
  return ratio;
}

/** [samples with a reward, wrong ones among them] of the group. */
function sampleCounts(rewards, right) {
  const there = known(rewards);
  const wrong = there.filter(reward => reward < right);
  return [there.length, wrong.length];
}

/** What the number of correct samples says of pass@k of k of the group, standardised, [G]. */
function passAtK(rewards, others, { k, right }) {
  const [count, wrong] = sampleCounts(rewards, right);
  const average = 1 - chooseRatio(wrong, count, k);
  const std = Math.sqrt(Math.max(average * (1 - average), 0));
  if (std <= 1e-12 || count < k) return zeros(rewards);
  const ofRight = 1 - average;
  const ofWrong = 1 - average - chooseRatio(wrong - 1, count - 1, k - 1);
  return rewards.map(reward => {
    if (reward === null) return 0;
    const gained = reward >= right ? ofRight : ofWrong;
    return gained / std;
  });
}

/** What a sample adds to pass@k, by the number of correct samples, [G]. */
function pkpo(rewards, others, { k, baseline, right }) {
  const [count, wrong] = sampleCounts(rewards, right);
  const share = k / Math.max(count, 1);
  const isTooSmall = count < k || (baseline && count <= k);
  if (isTooSmall) return zeros(rewards);
  return rewards.map(reward => {
    if (reward === null) return 0;
    const isRight = reward >= right;
    const lost = isRight ? 0 : chooseRatio(wrong - 1, count - 1, k - 1);
    const value = share * (1 - lost);
    if (!baseline) return value;
    const wrongOthers = isRight ? wrong : wrong - 1;
    return value - share * (1 - chooseRatio(wrongOthers, count - 1, k));
  });
}

// of: advantages of a group, a function of rewards, others, settings and lengths.
// ofEqual: what a group whose rewards are all equal gets, in words; null, or without it: exactly 0.
const ESTIMATORS = {
  "GRPO": {
    formula: "(R − mean) / (std of the group + ε)",
    of: grpo,
  },
  "Dr. GRPO": {
    formula: "R − mean",
    of: centred,
  },
  "RLOO": {
    formula: "R − mean of the others",
    of: leaveOneOut,
  },
  "Lite PPO": {
    formula: "(R − mean) / (std of all rewards of the domain in the batch + ε)",
    of: litePpo,
  },
  "Residual": {
    formula: "(R − mean) / (std of all R − mean of the domain in the batch + ε)",
    of: residual,
  },
  "MaxRL": {
    formula: "(R − mean) / (mean + ε), for rewards of at least 0",
    of: maxRl,
  },
  "pass@k": {
    formula: "by the number of correct samples: pass@k of k of the group, standardised",
    of: passAtK,
  },
  "PKPO": {
    formula: "by the number of correct samples: what a sample adds to pass@k",
    of: pkpo,
    ofEqual: ({ baseline }) => {
      return baseline ? null : "k / samples of the group where all are correct";
    },
  },
  "Best minus second": {
    formula: "only the best sample: R − the second best R",
    of: bestMinusSecond,
  },
  "Best minus second / std": {
    formula: "only the best sample: (R − the second best R) / (std of the group + ε)",
    of: bestMinusSecondOverStd,
  },
  "OPO": {
    formula: "R − mean of the group, every sample weighted by its tokens",
    of: lengthWeighted,
  },
  "Batch mean": {
    formula: "R − mean of all rewards of the domain in the batch",
    of: batchCentred,
    ofEqual: () => "R − that mean",
  },
  "REINFORCE": {
    formula: "R, without a baseline",
    of: reinforce,
    ofEqual: () => "R",
  },
};

/** A sentence that says what estimators make of a group whose rewards are all equal. */
function equalRewardsSay(settings) {
  const exceptions = [];
  for (const [name, { ofEqual }] of Object.entries(ESTIMATORS)) {
    const words = ofEqual ? ofEqual(settings) : null;
    if (words !== null) exceptions.push(`${name} (${words})`);
  }
  const told = exceptions.join(", ");
  return `A group whose rewards are all equal gets exactly 0, but from ${told}.`;
}

/** Advantages of a group by the estimator `name`, kept within `settings.clip` on both sides. */
function advantagesBy(name, rewards, others, settings, lengths) {
  const found = ESTIMATORS[name].of(rewards, others, settings, lengths);
  const { clip } = settings;
  if (clip === null) return found;
  return found.map(value => clamped(value, -clip, clip));
}
