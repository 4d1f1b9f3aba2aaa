// Which samples of a group are trained, by their lengths in tokens and `objective.subset_size`.

/** Rewards with null for samples outside of the first `size` by ascending key, as GFPO's
 *  subsets. */
function keepFirst(rewards, keys, size) {
  const scored = [...rewards.keys()].filter(i => rewards[i] !== null);
  const order = scored.sort((a, b) => keys[a] - keys[b] || a - b);
  const kept = new Set(order.slice(0, size));
  return rewards.map((reward, i) => (kept.has(i) ? reward : null));
}

/** Rewards with null for all but the `size` samples that have the most reward for a token. */
function keepEfficient(rewards, lengths, size) {
  const keys = rewards.map((reward, i) => -reward / Math.max(lengths[i], 1));
  return keepFirst(rewards, keys, size);
}

/** A function that keeps the shortest samples, a share of the size of them. */
function keepShortest(share) {
  return (rewards, lengths, size) => keepFirst(rewards, lengths, Math.ceil(share * size));
}

// By name: functions of rewards, lengths and size; they return rewards with null for what is left
// out.
const SUBSETS = {
  "none": rewards => rewards,
  "shortest": keepFirst,
  "token_efficiency": keepEfficient,
  "adaptive, hard group": keepFirst,
  "adaptive, medium group": keepShortest(0.75),
  "adaptive, easy group": keepShortest(0.5),
};
