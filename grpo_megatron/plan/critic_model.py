"""Whether the checkpoint that a critic begins with is of the policy's architecture."""

from collections.abc import Mapping, Sequence
from typing import Any

from grpo_megatron.config.rules.rule_set import RuleSet, Violation
from grpo_megatron.config.run import ModelConfig, RunConfig
from grpo_megatron.errors import ConfigError
from grpo_megatron.plan.hf_config import model_fields
from grpo_megatron.plan.model_facts import configuration_of
from grpo_megatron.plan.models_beside import can_be_read, other_model
from grpo_megatron.plan.reward_labels import labels_of

CRITIC_MODEL_RULES = RuleSet()
"""Their checks take the run, whose model can be read."""

REMEDY = "give a reward model or a language model of the policy's architecture"


@CRITIC_MODEL_RULES.rule("critic_model")
def critics_are_as_large_as_the_policy(run: RunConfig) -> Violation | None:
    """Refuse a checkpoint for the critic in whose place the policy's layers do not fit; one that is
    not there yet, and is no export of a run that can be read, is left to `refuse_missing`."""
    if run.critic is None or run.critic.path is None:
        return None
    start = ModelConfig(path=run.critic.path)
    if not can_be_read(start):
        return None
    try:
        problem = why_not_a_critic(start, run.model)
    except ConfigError as error:
        problem = f"{error.message} ({error.where})"
    if not problem:
        return None
    return Violation(
        "critic.path",
        problem,
        nearest=("null",),
        remedy=REMEDY,
        related=("model.path", "model.preset"),
    )


def why_not_a_critic(start: ModelConfig, policy: ModelConfig) -> str:
    """Return why a critic beside `policy` cannot begin with the model `start`: the first size or
    setting that differs, or a head of several scalars; empty where it can.

    Raises ConfigError where one of both cannot be read, or is not computed."""
    theirs, where = configuration_of(start)
    ours, _ = configuration_of(policy)
    model_fields(theirs, where=where)
    return difference(theirs, ours)


def difference(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> str:
    """Return the same of two `config.json`, of which the trainer knows all fields: first that of
    what a critic is to begin with, then that of the policy."""
    problem = why_no_value(labels_of(theirs))
    if problem:
        return problem
    their_type = theirs["model_type"]
    our_type = ours["model_type"]
    if their_type != our_type:
        return f"model_type of its config.json is {their_type}, of the policy {our_type}"
    return other_model(theirs, ours, "the policy")


def why_no_value(labels: Sequence[str]) -> str:
    """Return why a head with scalars of these names gives no value; empty where it does, or there
    is none."""
    if len(labels) > 1:
        return f"its head gives {len(labels)} numbers, and a value is one"
    return ""
