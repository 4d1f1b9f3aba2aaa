"""What the head of a reward model gives: whether one that begins with another, or is merged with
it, has the same scalars, and is nowhere where a language model is needed."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_megatron.config.loader import read_resolved
from grpo_megatron.config.rules.rule_set import RuleSet, Violation
from grpo_megatron.config.run import ModelConfig, RunConfig
from grpo_megatron.errors import ConfigError
from grpo_megatron.plan.model_facts import configuration_of
from grpo_megatron.rundir import run_that_writes

REWARD_LABEL_RULES = RuleSet()
"""Their checks take the run, whose model can be read."""

_ASKED_FOR_LOGPROBS = re.compile(
    r"preferences\.reference|domains\.\d+\.reference|distillation\.teachers\.\d+\.path"
)
UNNAMED = "LABEL_"
"""Begins the names that transformers gives to labels."""
SCALARS = "regression"
"""A `problem_type`: vLLM gives the scalars themselves."""
PROBABILITIES = "multi_label_classification"
"""The same: vLLM gives their sigmoid, of a process reward model how likely a step is right."""
_MEANINGS = {SCALARS: "scores of answers", PROBABILITIES: "how likely steps are right"}
"""What the scalars of a reward model are, by its `problem_type`."""
STEP_TOKEN_FIELD = "step_token"
"""Of our own in the config.json of process reward models: nothing else tells the token."""
USES = (
    "give a language model; a reward model goes to model.path of kind reward_model or to "
    "critic.path, or is served and asked by a reward"
)
REMEDY = (
    "name the domains as its labels, in their order, with preferences.scalar_per_domain; or begin "
    "with the language model"
)


@dataclass(frozen=True, slots=True)
class RewardHead:
    """What a reward model says of its scalars; a language model has none."""

    labels: tuple[str, ...] = ()
    problem_type: str | None = None
    step_token: str | None = None
    """Behind which the scalar of a step is read; None: not told, or it scores whole answers."""

    @classmethod
    def of_config(cls, hf: Mapping[str, Any]) -> "RewardHead":
        """Read a config.json."""
        labels = tuple(labels_of(hf))
        if not labels:
            return cls()
        return cls(labels, hf.get("problem_type"), hf.get(STEP_TOKEN_FIELD))

    @classmethod
    def of_run(cls, run: RunConfig) -> "RewardHead":
        """Return what the config.json of a run's export will say."""
        if run.kind != "reward_model":
            return cls()
        labels = tuple(written_labels(run.reward_labels))
        if run.preferences.rows == "steps":
            return cls(labels, PROBABILITIES, run.preferences.step_token)
        return cls(labels, SCALARS)


def written_labels(labels: Sequence[str]) -> list[str]:
    """Return what a config.json calls the scalars of a reward model with these labels, or with a
    single one that has no name."""
    return list(labels) or [f"{UNNAMED}0"]


def other_head(theirs: RewardHead, ours: RewardHead, owner: str) -> str:
    """Return in what a mean of `theirs` with `ours`, the head of `owner`, has no meaning; empty: in
    nothing. A `problem_type` or a step token that one of both does not say is taken for the
    other's."""
    if theirs.labels != ours.labels:
        return f"the scalars of its head are {list(theirs.labels)}, of {owner} {list(ours.labels)}"
    is_told_by_both = theirs.problem_type is not None and ours.problem_type is not None
    if is_told_by_both and theirs.problem_type != ours.problem_type:
        return f"the scalars of its head are {_meaning(theirs)}, of {owner} {_meaning(ours)}"
    tell_tokens = theirs.step_token is not None and ours.step_token is not None
    if tell_tokens and theirs.step_token != ours.step_token:
        return f"it scores steps at {theirs.step_token!r}, {owner} at {ours.step_token!r}"
    return ""


def _meaning(head: RewardHead) -> str:
    """Return what a head's scalars are, with its `problem_type`."""
    told = str(head.problem_type)
    return f"{_MEANINGS.get(told, 'others')} (problem_type {told})"


def labels_of(hf: Mapping[str, Any]) -> list[str]:
    """Return the names of the scalars of a model's head, in their order; empty: it has no such
    head. Without names it has `num_labels`, else two, as transformers has it."""
    architectures = hf.get("architectures") or ()
    if not any("Classification" in name for name in architectures):
        return []
    named = hf.get("id2label")
    if isinstance(named, Mapping):
        return [str(named[number]) for number in sorted(named, key=_label_number)]
    if isinstance(named, list):
        return [str(name) for name in named]
    return [f"{UNNAMED}{number}" for number in range(hf.get("num_labels") or 2)]


def _label_number(text: Any) -> tuple[bool, int, str]:
    """What the keys of `id2label` are sorted by: as numbers, behind them what is none."""
    number = str(text)
    if number.isdecimal():
        return False, int(number), ""
    return True, 0, number


def other_labels(hf: Mapping[str, Any], labels: Sequence[str]) -> str:
    """Return why the reward model that `hf`, a config.json, describes has other scalars than
    `labels`, or than a single one; empty where it has the same, or is a language model, beside
    which a head begins at random."""
    return other_scalars(labels_of(hf), labels)


def other_scalars(theirs: Sequence[str], labels: Sequence[str]) -> str:
    """Return the same of a reward model whose config.json calls its scalars `theirs`."""
    if not theirs:
        return ""
    ours = written_labels(labels)
    has_names = bool(labels) and not all(name.startswith(UNNAMED) for name in theirs)
    if list(theirs) == ours or (len(theirs) == len(ours) and not has_names):
        return ""
    return (
        f"the scalars of its head are {', '.join(theirs)}, and those of the recipe "
        f"{', '.join(labels) or 'a single one'}"
    )


def is_reward_model(path: Path) -> bool:
    """Whether a checkpoint is a reward model, or the run that is yet to write it trains one. One
    that is not there, or cannot be read, is left to other rules, and so is a run whose settings
    cannot."""
    run = run_that_writes(path)
    try:
        if path.exists():
            hf, _ = configuration_of(ModelConfig(path=path))
            return bool(labels_of(hf))
        return run is not None and read_resolved(run / "config.json").config.kind == "reward_model"
    except ConfigError:
        return False


def needs_language_model(run: RunConfig, key: str) -> bool:
    """Whether the checkpoint that a key names is asked for log-probs of tokens."""
    if key == "model.path":
        return run.kind != "reward_model"
    return _ASKED_FOR_LOGPROBS.fullmatch(key) is not None


@REWARD_LABEL_RULES.rule("reward_model_path")
def reward_models_say_nothing_of_tokens(run: RunConfig) -> list[Violation]:
    """Refuse reward models where a language model is needed: they have no output layer."""
    found = []
    for key, path in run.input_paths.items():
        if needs_language_model(run, key) and is_reward_model(path):
            violation = Violation(key, "is a reward model, and has no output layer", remedy=USES)
            found.append(violation)
    return found


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
