"""Whether checkpoints that the trainer loads in place of its policy's weights, to ask them about
tokens, are of the policy's architecture: teachers and references."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from grpo_megatron.config.rules.rule_set import RuleSet, Violation
from grpo_megatron.config.run import ModelConfig, RunConfig
from grpo_megatron.errors import ConfigError
from grpo_megatron.plan.hf_config import model_fields, other_computation
from grpo_megatron.plan.model_facts import configuration_of, facts_from_hf, origin_of

MODEL_BESIDE_RULES = RuleSet()
"""Their checks take the run, whose model can be read."""

REMEDY = (
    "give a checkpoint of the policy's architecture; a teacher of another one is served and asked "
    "by its url"
)
_NO_SIZES = ("model_type", "max_position_embeddings")
"""Facts in which models may differ that compute the same with the same weights."""


@MODEL_BESIDE_RULES.rule("model_beside")
def models_beside_the_policy_are_like_it(run: RunConfig) -> list[Violation]:
    """Refuse teachers and references in whose place the policy's layers do not fit; one that is not
    there yet, and is no export of a run that can be read, is left to `refuse_missing`, and what a
    critic begins with to a rule of its own."""
    found = []
    for key, path in run.paths_of_other_models.items():
        model = ModelConfig(path=path)
        if key == "critic.path" or not can_be_read(model):
            continue
        problem = why_not_beside(model, run.model, "the policy")
        if problem:
            related = ("model.path", "model.preset")
            found.append(Violation(key, problem, remedy=REMEDY, related=related))
    return found


def can_be_read(model: ModelConfig) -> bool:
    """Whether a model is there, or the run whose export it is to be."""
    try:
        origin = origin_of(model)
    except ConfigError:
        return False
    return origin.path is None or origin.path.exists()


def why_not_beside(other: ModelConfig, policy: ModelConfig, owner: str) -> str:
    """Return why the weights of `other` cannot stand in place of those of `policy`: the first size
    or setting that differs, or why one of both cannot be read; empty where they can.

    owner: what the text calls the policy."""
    try:
        theirs, where = configuration_of(other)
        ours, _ = configuration_of(policy)
        model_fields(theirs, where=where)
        return other_model(theirs, ours, owner)
    except ConfigError as error:
        return f"{error.message} ({error.where})"


def other_model(theirs: Mapping[str, Any], ours: Mapping[str, Any], owner: str) -> str:
    """Return the first size or setting in which `theirs` is another model than `ours`, the
    config.json of `owner`; empty: in none. The trainer knows all fields of both."""
    their_facts = asdict(facts_from_hf(theirs))
    for name, value in asdict(facts_from_hf(ours)).items():
        if name in _NO_SIZES or value is None:  # of a preset whose tokenizer decides
            continue
        if their_facts[name] not in (None, value):
            return f"{name} of its config.json is {their_facts[name]}, of {owner} {value}"
    return other_computation(theirs, ours, owner)
