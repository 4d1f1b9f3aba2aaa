// Advantages of one group, as algorithms/advantages/estimators.py has them.
//
// rewards: of the group, [G]; null: unscorable, which counts nowhere and gets 0.
// others: rewards of the other groups of its domain. settings: eps, std ("sample", "population").

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

const over = (values, divisor) => values.map(value => (value === 0 ? 0 : value / (divisor > 0 ? divisor : 1)));

function bestMinusSecond(rewards) {
  const order = rewards.map((reward, index) => [reward, index]).filter(([reward]) => reward !== null)
    .sort((a, b) => b[0] - a[0] || a[1] - b[1]);
  return rewards.map((_, index) => (order.length > 1 && index === order[0][1] ? order[0][0] - order[1][0] : 0));
}

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
  "MaxRL": { formula: "(R − mean) / (mean + ε), for rewards of at least 0", of: (rewards, others, { eps }) => {
    const middle = mean(known(rewards)) + eps;
    return middle > 0 ? over(centred(rewards), middle) : rewards.map(() => 0);
  } },
  "Best minus second": { formula: "only the best sample: R − the second best R", of: bestMinusSecond },
};
