"""Whether a reward model that begins with another one has the same scalars."""

from collections.abc import Mapping, Sequence
from typing import Any

from grpo_megatron.config.rules.rule_set import RuleSet, Violation
from grpo_megatron.config.run import RunConfig
from grpo_megatron.errors import ConfigError
from grpo_megatron.plan.model_facts import configuration_of

REWARD_LABEL_RULES = RuleSet()
"""Their checks take the run, whose model can be read."""

UNNAMED = "LABEL_"
"""Begins the names that transformers gives to labels."""
REMEDY = (
    "name the domains as its labels, in their order, with preferences.scalar_per_domain; or begin "
    "with the language model"
)


def labels_of(hf: Mapping[str, Any]) -> list[str]:
    """Return the names of the scalars of a model's head, in their order; empty: it has no such
    head. Without names it has `num_labels`, else two, as transformers has it."""
    architectures = hf.get("architectures") or ()
    if not any("Classification" in name for name in architectures):
        return []
    named = hf.get("id2label")
    if isinstance(named, Mapping):
        return [str(named[number]) for number in sorted(named, key=int)]
    if isinstance(named, list):
        return [str(name) for name in named]
    return [f"{UNNAMED}{number}" for number in range(hf.get("num_labels") or 2)]


def other_labels(hf: Mapping[str, Any], labels: Sequence[str]) -> str:
    """Return why the reward model that `hf`, a config.json, describes has other scalars than
    `labels`, or than a single one; empty where it has the same, or is a language model, beside
    which a head begins at random."""
    theirs = labels_of(hf)
    if not theirs:
        return ""
    ours = list(labels) or [f"{UNNAMED}0"]
    has_names = bool(labels) and not all(name.startswith(UNNAMED) for name in theirs)
    if theirs == ours or (len(theirs) == len(ours) and not has_names):
        return ""
    return (
        f"the scalars of its head are {', '.join(theirs)}, and those of the recipe "
        f"{', '.join(labels) or 'a single one'}"
    )


@REWARD_LABEL_RULES.rule("reward_labels")
def a_reward_model_keeps_its_scalars(run: RunConfig) -> Violation | None:
    """Refuse to go on with a head whose scalars mean something else; a checkpoint that is not there
    yet is left to the trainer."""
    if run.kind != "reward_model" or run.model.path is None or not run.model.path.exists():
        return None
    try:
        hf, _ = configuration_of(run.model)
    except ConfigError:
        return None  # told by `model_unreadable`
    problem = other_labels(hf, run.reward_labels)
    if not problem:
        return None
    return Violation(
        "model.path",
        problem,
        remedy=REMEDY,
        related=("preferences.scalar_per_domain",),
    )
