// Models and algorithms of PPO and GRPO at the run's layout, as `plan --compare ppo` has them.

const COMPONENTS = ["weights", "gradients", "optimizer", "buffers"];

/** A row for every model: its parameters, its bytes by component, a rank's and all ranks'. */
function modelTable(models) {
  const rows = models.map(({ model, parameters, parts, all_ranks }) => {
    const ofComponents = COMPONENTS.map(name => (parts[name] ? bytes(parts[name]) : "–"));
    const ofRank = sumOf(Object.values(parts));
    return [model, show(parameters), ...ofComponents, bytes(ofRank), bytes(all_ranks)];
  });
  return table(["model", "parameters", ...COMPONENTS, "a rank", "all ranks"], rows);
}

/** A row for every algorithm: its models, the bytes of a rank and of all, the share of PPO's. */
function algorithmTable(algorithms) {
  const rows = algorithms.map(({ algorithm, models, rank, all_ranks, share_of_ppo }) => {
    const share = (share_of_ppo * 100).toFixed(1) + " %";
    return [algorithm, models.join(", "), bytes(rank), bytes(all_ranks), share];
  });
  return table(["algorithm", "models", "a rank", "all ranks", "of PPO"], rows, [0, 1]);
}

/** Who shares the optimizer state, in words. */
function shardWords({ optimizer_shards, expert_optimizer_shards }) {
  const words = `optimizer state is shared by ${optimizer_shards} rank(s)`;
  if (expert_optimizer_shards === optimizer_shards) return words;
  return `${words}, of experts by ${expert_optimizer_shards}`;
}

/** What the numbers are of, in words. ppo: of a run; hasKl: whether its objective has a KL term. */
function memoryWords(ppo, hasKl) {
  const { num_ranks, per_parameter } = ppo;
  const { weights, gradients, optimizer } = per_parameter;
  const ranks = `${num_ranks} trainer rank${num_ranks === 1 ? "" : "s"}`;
  const sizes = `${weights} bytes of weights, ${gradients} of gradients and ${optimizer} of`
    + " optimizer state a parameter, padded";
  const sentences = [
    `At ${ranks}, of the fullest rank of a pipeline stage.`,
    `Trained: ${sizes}; ${shardWords(ppo)}.`,
    "Critic and reward model: the policy's layers with a value head.",
    "Left out: activations, KV cache, engine; here the host keeps references.",
  ];
  if (!hasKl) sentences.push("The objective of this run has no KL term.");
  return sentences.join(" ");
}

/** The memory of PPO and GRPO; null where the run's is not known. */
function memoryOf(run) {
  const { ppo } = run;
  if (!ppo) return null;
  const hasKl = run.config.objective.kl !== "none";
  const title = el("h3", null, "Memory: PPO and GRPO");
  const models = modelTable(ppo.models);
  const algorithms = algorithmTable(ppo.algorithms);
  const words = remark(memoryWords(ppo, hasKl));
  return el("div", { class: "memory" }, title, models, el("p"), algorithms, words);
}
