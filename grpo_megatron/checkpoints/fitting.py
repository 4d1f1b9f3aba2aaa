"""Whether a run can go on with a checkpoint, by what the checkpoint says of itself beside its
weights (`complete.json`). Imports neither torch nor Megatron: a resume asks before anything starts,
and the trainer asks again."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from grpo_megatron.checkpoints.retention import COMPLETE, complete_steps
from grpo_megatron.config.lora import LoraConfig
from grpo_megatron.config.run import RunConfig
from grpo_megatron.errors import CheckpointError

LORA = "lora"
"""The settings of its adapters; absent: it has none."""
ADAPTER_DOMAINS = "adapter_domains"
"""Names of the domains that have adapters of their own; absent: all have the same, or none."""
CRITIC = "critic"
"""Whether it has a critic with weights of its own."""
VALUE_HEAD = "value_head"
"""Whether its weights have a head of values beside them."""


def refuse_unfitting(
    config: RunConfig, record: Mapping[str, Any], directory: Path, *, is_cold: bool
) -> None:
    """Raise CheckpointError where a run with `config` cannot go on with the checkpoint in
    `directory`, which says `record` of itself.

    is_cold: it may be from a cold start, which trains the weights alone."""
    _refuse_other_adapters(config, record.get(LORA), directory, is_cold=is_cold)
    _refuse_other_domains(config, record.get(ADAPTER_DOMAINS), directory)
    has_head = record.get(VALUE_HEAD, False)
    _refuse_other_value_head(config, directory, is_there=has_head, is_cold=is_cold)
    _refuse_absent_critic(config, record, directory)


def newest_record(checkpoints: Path) -> tuple[Path, dict[str, Any]] | None:
    """Return the newest complete checkpoint below `checkpoints` that can be read, and what it says
    of itself; None without one."""
    for step in reversed(complete_steps(checkpoints)):
        directory = checkpoints / f"step_{step:06d}"
        try:
            record = json.loads((directory / "complete.json").read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            continue  # a resume passes over a damaged one
        if isinstance(record, dict):
            return directory, record
    return None


def adapter_domains(directory: Path) -> list[str]:
    """Return the domains that have adapters of their own in a checkpoint; none in others."""
    try:
        state = json.loads((directory / COMPLETE).read_text())
    except (OSError, ValueError, RecursionError):  # Hugging Face's have no such file
        return []
    if not isinstance(state, dict):
        return []
    found: list[str] = state.get(ADAPTER_DOMAINS, [])
    return found


def _refuse_other_adapters(
    config: RunConfig, saved: dict[str, Any] | None, directory: Path, *, is_cold: bool
) -> None:
    wanted: dict[str, Any] | None = None
    if config.lora is not None:
        wanted = config.lora.identity()
    if saved is None and is_cold:
        return
    if saved is not None:  # by an earlier release, without the settings that are new
        saved = LoraConfig.model_validate(saved).identity()
    if saved != wanted:
        raise CheckpointError(
            f"the checkpoint has {saved or 'no adapters'}, the recipe's [lora] is {wanted}",
            where=str(directory),
            remedy="resume with the settings of [lora] with which the run began",
        )


def _refuse_other_domains(config: RunConfig, saved: list[str] | None, directory: Path) -> None:
    if saved is None or tuple(saved) == config.adapter_domains:
        return
    raise CheckpointError(
        f"the checkpoint has adapters of the domains {', '.join(saved)}, and the recipe has the "
        f"domains {', '.join(config.adapter_domains)}",
        where=str(directory),
        remedy="resume with the domains with which the run began, in their order",
    )


def _refuse_other_value_head(
    config: RunConfig, directory: Path, *, is_there: bool, is_cold: bool
) -> None:
    wants_head = config.policy_has_value_head
    if is_there == wants_head:
        return
    if wants_head and is_cold:
        return
    if is_there and not config.trains:  # a run that trained, and now only samples
        return
    if is_there:
        problem = 'the checkpoint is of a run with critic.trunk = "policy"'
        remedy = "resume with the [critic] with which the run began"
    else:
        problem = 'the checkpoint has no value head, and the recipe has critic.trunk = "policy"'
        remedy = "begin a new run with [critic] and the export of this one as model.path"
    raise CheckpointError(problem, where=str(directory), remedy=remedy)


def _refuse_absent_critic(config: RunConfig, record: Mapping[str, Any], directory: Path) -> None:
    """In a checkpoint from before the first RL step a critic may be missing: it begins then."""
    is_there = record.get(CRITIC, False)
    if is_there or not config.has_own_critic or record.get("step") == 0:
        return
    raise CheckpointError(
        "the checkpoint is of a run without a critic, and the recipe has [critic]",
        where=str(directory),
        remedy="begin a new run with [critic] and the export of this one as model.path",
    )
