// The charts of a run, in their order, and which metrics are their curves.

const OF_PREFERENCES = ["preferences", "reward_model"];
const OF_POLICIES = ["rl", "sft", "distil"];
const SCORED = [...OF_POLICIES, "experience"];
const TRAINED = [...OF_POLICIES, ...OF_PREFERENCES];

// names: metrics that runs of `kinds` (where there is no list, of kind rl) have, so that one which
// is missing is told. more: metrics that are shown in every run that has them; so are names.
const CHARTS = [
  {
    title: "Reward",
    names: ["reward/mean"],
    kinds: SCORED,
    more: /^reward\/.+\/mean$/,
  },
  {
    title: "Reward by domain",
    more: /^reward\/mean@/,
  },
  {
    title: "Accuracy",
    names: ["accuracy/pass_at_1"],
    kinds: SCORED,
    more: /^(accuracy\/pass_at_group|evaluation\/accuracy|preference\/accuracy)$/,
  },
  {
    title: "Accuracy by domain",
    more: /^accuracy\/pass_at_1@/,
  },
  {
    title: "Margin between chosen and rejected answers",
    more: /^preference\/margin$/,
  },
  {
    title: "Rewards of chosen and rejected answers",
    names: ["preference/reward_chosen", "preference/reward_rejected"],
    kinds: OF_PREFERENCES,
  },
  {
    title: "Log-probs of chosen and rejected answers",
    more: /^preference\/logprob_(chosen|rejected)$/,
  },
  {
    title: "Lessons",
    more: /^experience\/(lessons|groups_that_teach|changes)$/,
  },
  {
    title: "Response length",
    names: ["response/length_correct_mean", "response/length_incorrect_mean"],
    kinds: SCORED,
  },
  {
    title: "KL, engine to trainer",
    names: ["mismatch/k1", "mismatch/k3"],
  },
  {
    title: "KL to the reference",
    names: ["reference/k1", "reference/k3"],
  },
  {
    title: "KL of a step",
    names: ["step/k1"],
    more: /^(step|update)\/k[12]$/,
  },
  {
    title: "Entropy",
    names: ["policy/entropy"],
  },
  {
    title: "Clipped tokens",
    names: ["clip/region_fraction"],
    more: /^clip\/(?!.*sample).*fraction$/,
  },
  {
    title: "Gradient norm",
    names: ["grad/norm"],
    kinds: TRAINED,
  },
  {
    title: "Seconds by phase",
    names: ["time/step_s"],
    kinds: TRAINED,
    more: /^time\/[^@]*_s$/,
  },
  {
    title: "Idle share",
    more: /^idle\//,
  },
  {
    title: "Staleness of trained tokens",
    more: /^staleness\/(seen|predicted)_(mean|max)$/,
  },
  {
    title: "Tokens per second",
    more: /^throughput\//,
  },
  {
    title: "Prompt tokens from the prefix cache",
    more: /^prefix_cache\/.*fraction$/,
  },
  {
    title: "Loss",
    names: ["loss/value"],
    kinds: TRAINED,
    more: /^(loss\/nll|distillation\/kl|preference\/loss)$/,
  },
  {
    title: "Groups without signal, truncated",
    more: /^(group\/all_equal_fraction|response\/truncated_fraction)$/,
  },
];
