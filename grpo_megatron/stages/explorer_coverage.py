"""What the page's advantage explorer shows of an objective, and what it cannot know."""

from grpo_megatron.config.objective import ObjectiveConfig

_BY_DEVIATION = {
    "none": "Dr. GRPO",
    "group": "GRPO",
    "batch_raw": "Lite PPO",
    "batch_residual": "Residual",
}
_BY_ESTIMATOR = {
    "rloo": "RLOO",
    "opo": "OPO",
    "batch": "Batch mean",
    "maxrl": "MaxRL",
    "passk": "pass@k",
    "pkpo": "PKPO",
    "reward": "REINFORCE",
}
_BY_GAP = {"none": "Best minus second", "group": "Best minus second / std"}
_OF_THE_BATCH = ("Lite PPO", "Residual", "Batch mean")
"""Columns that look at the other groups, of which the page has those of the same domain."""
_NO_CHANGE = {
    "reward_shaping": "none",
    "whiten": "none",
    "shaping": "none",
}
"""Settings that change advantages before or after the estimator, as they are when they do not."""


def explorer_coverage(o: ObjectiveConfig) -> dict[str, object]:
    """`column`: the estimator of `estimators.js` that an objective has, None where it needs more
    than rewards and lengths; `subset`: the choice of a subset; `lacks`: the settings that change
    its advantages and are not in the explorer."""
    values = o.model_dump()
    lacks = []
    column = _column(o)
    if column is None:
        lacks.append(f'advantage = "{o.advantage}"')
    if o.advantage in ("passk", "pkpo"):
        lacks.append("the accuracy component (the reward says what is correct)")
    for setting, unchanged in _NO_CHANGE.items():
        value = values.get(setting, unchanged)
        if value != unchanged:
            lacks.append(f"{setting} = {value}")
    if column in _OF_THE_BATCH and o.statistics_scope == "global":
        lacks.append("statistics_scope = global")
    if o.kl == "reward_k1":
        lacks.append('kl = "reward_k1"')
    subset: str = o.subset
    if subset == "adaptive":
        subset = "adaptive, hard group"
        lacks.append("quartiles of all groups of the run (choose hard, medium or easy)")
    return {"column": column, "subset": subset, "lacks": lacks}


def _column(o: ObjectiveConfig) -> str | None:
    if o.advantage == "group":
        return _BY_DEVIATION[o.advantage_std]
    if o.advantage == "best_minus_second":
        return _BY_GAP.get(o.advantage_std)
    return _BY_ESTIMATOR.get(o.advantage)
