"""From a recipe of a cluster to the same recipe for one machine: what is set otherwise, and why.

Whatever the recipe has more than one of (tensor, pipeline and expert ranks, replicas, senders,
optimizer steps a rollout, versions of staleness) there are two of; lengths and counts become small.
Everything else stays: objective, filters, routing, precision, publishing, pauses, checks."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from grpo_megatron.config.engine_words import without_option
from grpo_megatron.config.environment import EnvironmentConfig, EpisodeConfig
from grpo_megatron.config.objective import PRESETS
from grpo_megatron.config.problems import as_toml
from grpo_megatron.config.run import DomainConfig, RewardConfig, RunConfig, TeacherConfig
from grpo_megatron.config.trainer import TrainerConfig
from grpo_megatron.image_settings import ImageSettings
from grpo_megatron.plan.engine_arguments import MEMORY_SHARE
from grpo_megatron.plan.model_facts import read_config
from grpo_megatron.plan.vision import scales_boxes
from grpo_megatron.rehearsal.coin import COMPONENT as COIN
from grpo_megatron.rehearsal.local_server import STEP_TOKEN

NUM_STEPS = 3
MAX_NEW_TOKENS = 32
MAX_MODEL_LEN = 1024
MAX_EPISODE_TOKENS = 320
"""Of a rehearsed episode: a call of a tool has some eighty bytes."""
MAX_TURN_TOKENS = 24
"""Of a turn that nobody demonstrates: a random model calls nothing."""
MAX_TURNS = 3
MAX_CACHE_GIB = 0.25
MAX_TOP_K = 16
"""Likeliest tokens of a teacher."""
MAX_SAMPLED_TOP_K = 128
"""Ids that sampling keeps: with their ties fewer than the tiny model's vocabulary of 320."""
_PROMPTS_PER_DOMAIN = 4
_MAX_GROUP_SIZE = 4
_MAX_COLD_START = {"batch_size": 8, "steps_per_evaluation": 1, "checkpoint_interval": 2}


@dataclass(frozen=True, slots=True)
class Change:
    """One setting of the rehearsal: `Change("trainer.num_ranks", 128, 4, "layout")`."""

    key: str
    before: Any
    after: Any
    why: str

    @property
    def override(self) -> str:
        """The change as the command line takes it."""
        return f"{self.key}={as_toml(self.after)}"


@dataclass(frozen=True)
class StandIns:
    """What takes the place of inputs that a cluster has."""

    model: Path
    other_model: Path
    """Of the same architecture with other weights: teachers and references."""
    data: Mapping[int, Path]
    """Rows by number of the domain, where its own file is missing."""
    server: str
    """Address of what answers for judges, reward models and shared servers."""
    teacher_server: str = ""
    """Address of a vLLM server with a random model, for teachers behind a `url`."""
    model_is_given: bool = False
    """`model` was chosen by the user, and is used also where the recipe's own is here."""
    corpora: Mapping[int, Path] = field(default_factory=dict)
    """Documents by number of the domain, where its environment searches a missing file."""


class _Changes:
    def __init__(self, config: RunConfig):
        self._values = config.model_dump(mode="json")
        self.found: list[Change] = []

    def set(self, key: str, value: Any, why: str) -> None:
        """Note the change, unless the recipe has that value already."""
        before: Any = self._values
        for part in key.split("."):
            if before is None:
                break
            if isinstance(before, list):
                before = before[int(part)]
                continue
            before = before[part]
        if before != value:
            self.found.append(Change(key, before, value, why))

    def at_most(self, key: str, before: float | None, most: float, why: str) -> None:
        """Lower a number that is larger than `most`."""
        if before is not None and before > most:
            self.set(key, most, why)


def scale_down(config: RunConfig, stand_ins: StandIns) -> list[Change]:
    """Return every setting that the rehearsal of `config` changes, in the order of the recipe's
    tables."""
    changes = _Changes(config)
    _steps(config, changes)
    _inputs(config, stand_ins, changes)
    _sizes(config, changes)
    _layout(config, changes)
    _engines(config, stand_ins, changes)
    _outcomes(config, changes)
    return changes.found


def num_layers_of(trainer: TrainerConfig) -> int:
    """Return layers that the scaled layout divides, with two in the smaller of unequal stages.

    The largest number of several layouts, as of the stages of a graph, fits all of them."""
    if trainer.virtual_pipeline_parallel_size is not None:
        return 8  # two in each of four chunks, or stages of 6 and 2
    if _is_uneven(trainer):
        return 6  # stages of 4 and 2
    return 4


def has_served_teachers(config: RunConfig) -> bool:
    """Whether a teacher of the run is asked at a `url`."""
    if config.distillation is None:
        return False
    return any(teacher.url is not None for teacher in config.distillation.teachers)


def _two_at_most(count: int) -> int:
    return min(count, 2)


def _is_uneven(trainer: TrainerConfig) -> bool:
    given = trainer.first_stage_layers is not None or trainer.last_stage_layers is not None
    return given and trainer.pipeline_parallel_size > 1


def _steps(config: RunConfig, changes: _Changes) -> None:
    why = "three steps, a checkpoint after each"
    if config.takes_steps and config.num_steps > 0:
        changes.set("num_steps", NUM_STEPS, why)
        changes.set("checkpoint.interval", 1, why)
    if config.critic is not None:
        warmup_steps = config.critic.warmup_steps
        changes.at_most("critic.warmup_steps", warmup_steps, 1, "the policy is trained after it")
    if config.evaluation.interval:
        changes.set("evaluation.interval", 2, why)
    changes.at_most("evaluation.num_samples", config.evaluation.num_samples, 2, why)
    if config.cold_start is not None:
        for name, most in _MAX_COLD_START.items():
            key = f"cold_start.{name}"
            changes.at_most(key, getattr(config.cold_start, name), most, "a short cold start")
        # the coin is right half of the time
        changes.set("cold_start.target_accuracy", 0.05, "a random model has to reach it")
        changes.set("cold_start.max_steps", 200, "a short cold start")


def _replaces_model(config: RunConfig, stand_ins: StandIns) -> bool:
    """Whether the recipe's model is not the one that is rehearsed."""
    is_here = config.model.path is not None and config.model.path.exists()
    return stand_ins.model_is_given or not is_here


def _inputs(config: RunConfig, stand_ins: StandIns, changes: _Changes) -> None:
    """Replace models, data and servers that are not on this machine."""
    _policy(config, stand_ins, changes)
    for number, domain in enumerate(config.domains):
        _domain_inputs(number, domain, stand_ins, changes)
    if config.experience is not None:
        why = "a local server that writes lessons"
        changes.set("experience.writer_url", stand_ins.server, why)
        changes.set("experience.writer_model", "local", why)
        changes.set("experience.path", None, "no lessons are known")
    if config.preferences.reference is not None:
        changes.set("preferences.reference", str(stand_ins.other_model), "a random reference")
    if config.distillation is not None:
        for number, teacher in enumerate(config.distillation.teachers):
            _teacher(number, teacher, stand_ins, changes)


def _policy(config: RunConfig, stand_ins: StandIns, changes: _Changes) -> None:
    """Replace the model, and the adapters and the critic that belong to it."""
    why = "a tiny random model of the same family"
    if stand_ins.model_is_given:
        why = "the given model"
    is_replaced = _replaces_model(config, stand_ins)
    if is_replaced:
        changes.set("model.preset", None, why)
        changes.set("model.path", str(stand_ins.model), why)
    adapters: Path | None = None
    if config.lora is not None:
        adapters = config.lora.path
    if adapters is not None and (is_replaced or not adapters.exists()):
        changes.set("lora.path", None, "adapters of the real model: new ones begin at zero")
    if config.critic is not None and config.critic.path is not None:
        like_the_policy = stand_ins.model
        if config.model.path is not None and not is_replaced:
            like_the_policy = config.model.path
        changes.set("critic.path", str(like_the_policy), "a checkpoint as large as the policy")


def _domain_inputs(
    number: int, domain: DomainConfig, stand_ins: StandIns, changes: _Changes
) -> None:
    """Replace a domain's rows, its documents and its reference, and take few of made problems."""
    key = f"domains.{number}"
    if number in stand_ins.data:
        changes.set(f"{key}.path", str(stand_ins.data[number]), "made-up rows: no such file")
        if "split" in domain.arguments:
            arguments = dict(domain.arguments)
            del arguments["split"]
            changes.set(f"{key}.arguments", arguments, "made-up rows are one file")
    if number in stand_ins.corpora:
        corpus = str(stand_ins.corpora[number])
        why = "made-up documents: no such file"
        changes.set(f"{key}.environment.arguments.corpus", corpus, why)
        if domain.environment is not None and "index" in domain.environment.arguments:
            index = f"{corpus}.fts5"
            changes.set(f"{key}.environment.arguments.index", index, "of these documents")
    if domain.reference is not None:
        changes.set(f"{key}.reference", str(stand_ins.other_model), "a random reference")
    if domain.num_problems is not None:
        changes.at_most(f"{key}.num_problems", domain.num_problems, 400, "few problems")


def _teacher(number: int, teacher: TeacherConfig, stand_ins: StandIns, changes: _Changes) -> None:
    """Replace a teacher's weights, its server, or both."""
    key = f"distillation.teachers.{number}"
    if teacher.path is not None and not teacher.path.exists():
        changes.set(f"{key}.path", str(stand_ins.other_model), "a random teacher")
    if teacher.url is not None:
        server = stand_ins.teacher_server
        changes.set(f"{key}.url", server, "a local server of a random teacher")
    if teacher.model is not None:
        changes.set(f"{key}.model", None, "that server has one model")


def _sizes(config: RunConfig, changes: _Changes) -> None:
    _lengths(config, changes)
    _batch_sizes(config, changes)
    why = "short and few"
    if config.objective.aggregation_length is not None:
        key = "objective.aggregation_length"
        changes.at_most(key, config.objective.aggregation_length, MAX_NEW_TOKENS, why)
    if config.correction is not None:
        key = "correction.max_retry_tokens"
        changes.at_most(key, config.correction.max_retry_tokens, MAX_NEW_TOKENS // 2, why)
    if config.allocation is not None:
        most_samples = {
            "base_samples_per_prompt": _base_size(config),
            "samples_per_round": _MAX_GROUP_SIZE,
            "max_samples_per_prompt": _group_size(config) + 1,  # every prompt gets some
        }
        for name, most in most_samples.items():
            changes.at_most(f"allocation.{name}", getattr(config.allocation, name), most, why)
    if config.distillation is not None and config.distillation.mode == "topk_tail":
        changes.at_most("distillation.top_k", config.distillation.top_k, MAX_TOP_K, why)
    prompts = _PROMPTS_PER_DOMAIN * len(config.domains)
    if config.uses_dataset:
        prompts = len(config.domains)  # a stage before may have made few rows
    changes.at_most("data.num_validation", config.data.num_validation, prompts, why)
    changes.at_most("data.num_heldout", config.data.num_heldout, prompts, why)
    changes.at_most("data.reward_workers", config.data.reward_workers, 2, why)
    changes.at_most("data.reward_hosts", config.data.reward_hosts, 1, why)
    changes.at_most("rejection.num_samples", config.rejection.num_samples, 4, why)
    if config.kind == "rejection_sample":
        num_prompts = 4 * _PROMPTS_PER_DOMAIN
        if config.rejection.pairs is not None:
            num_prompts *= 4  # a model that hardly learned answers most prompts in one way only
        changes.set("rejection.max_prompts", num_prompts, why)


def _lengths(config: RunConfig, changes: _Changes) -> None:
    """Shorten prompts, completions and episodes, and lower how many an engine samples at once."""
    why = "short and few"
    rollout = config.rollout
    longest = MAX_MODEL_LEN
    if has_served_teachers(config):
        longest = MAX_MODEL_LEN - 1  # their server takes one token more
    if _demonstrates(config):
        why_longer = "demonstrated turns, in a token a byte"
        changes.set("rollout.max_new_tokens", MAX_EPISODE_TOKENS, why_longer)
        changes.set("rollout.max_model_len", longest, why_longer)
    else:
        most_new_tokens = MAX_NEW_TOKENS
        if config.domains_with_episodes:
            most_new_tokens = MAX_EPISODE_TOKENS
        changes.at_most("rollout.max_new_tokens", rollout.max_new_tokens, most_new_tokens, why)
        changes.at_most("rollout.max_model_len", rollout.max_model_len, longest, why)
    if config.num_replicas > 0:
        changes.at_most("rollout.segment_tokens", rollout.segment_tokens, MAX_NEW_TOKENS // 2, why)
        changes.at_most("rollout.max_num_seqs", rollout.max_num_seqs, 64, why)
        changes.at_most("rollout.top_k", rollout.top_k, MAX_SAMPLED_TOP_K, "a small vocabulary")
    for number, domain in enumerate(config.domains):
        key = f"domains.{number}.max_new_tokens"
        if domain.episodes is not None:
            changes.at_most(key, domain.max_new_tokens, MAX_EPISODE_TOKENS, why)
            _episode_sizes(f"domains.{number}.{domain.episodes_table}", domain.episodes, changes)
        else:
            changes.at_most(key, domain.max_new_tokens, MAX_NEW_TOKENS, why)


def _batch_sizes(config: RunConfig, changes: _Changes) -> None:
    """Samples of a step, and tokens that the trainer takes at once."""
    why = "short and few"
    batch = config.batch
    updates = _two_at_most(batch.updates_per_rollout)
    changes.set("batch.updates_per_rollout", updates, why)
    changes.set("batch.epochs", _two_at_most(batch.epochs), why)
    fewest = _PROMPTS_PER_DOMAIN * sum(domain.weight > 0 for domain in config.domains)
    most_prompts = max(4, min(fewest, 8))
    if config.trains_preferences:
        most_prompts = 2  # a stage before may have found few pairs
    changes.at_most("batch.num_prompts", batch.num_prompts, most_prompts, why)
    changes.at_most(
        "batch.num_samples_per_prompt", batch.num_samples_per_prompt, _group_size(config), why
    )
    most_tokens = max(MAX_MODEL_LEN, min(config.trainer.max_tokens_per_microbatch, 2048))
    key = "trainer.max_tokens_per_microbatch"
    changes.at_most(key, config.trainer.max_tokens_per_microbatch, most_tokens, why)
    changes.at_most("trainer.logprob_chunk_tokens", config.trainer.logprob_chunk_tokens, 256, why)


def _demonstrates(config: RunConfig) -> bool:
    """Whether a cold start trains demonstrated episodes."""
    for domain in config.domains:
        if domain.environment is not None and domain.environment.demonstration:
            return True
    return False


def _episode_sizes(key: str, episodes: EpisodeConfig, changes: _Changes) -> None:
    why = "short and few"
    changes.at_most(f"{key}.max_turns", episodes.max_turns, MAX_TURNS, why)
    changes.at_most(f"{key}.episode_tokens", episodes.episode_tokens, MAX_EPISODE_TOKENS, why)
    changes.at_most(f"{key}.processes", episodes.processes, 1, why)
    if isinstance(episodes, EnvironmentConfig):
        changes.at_most(f"{key}.servers", episodes.servers, 2, why)
    most_turn_tokens = MAX_TURN_TOKENS
    if isinstance(episodes, EnvironmentConfig) and episodes.demonstration:
        most_turn_tokens = MAX_EPISODE_TOKENS
    turn_tokens = episodes.turn_tokens or MAX_EPISODE_TOKENS
    changes.at_most(f"{key}.turn_tokens", turn_tokens, most_turn_tokens, why)


def _group_size(config: RunConfig) -> int:
    """Return the smallest group size that the objective allows."""
    objective = config.objective
    if PRESETS[objective.preset].group_size is not None:
        return config.batch.num_samples_per_prompt
    smallest = max(_MAX_GROUP_SIZE, objective.passk_k)
    if objective.subset != "none":
        smallest = max(smallest, 2 * objective.subset_size)
    if config.allocation is not None:
        smallest = max(smallest, _base_size(config) + 1)
    return smallest


def _base_size(config: RunConfig) -> int:
    """Return samples that every prompt gets first: as few as the objective allows."""
    objective = config.objective
    smallest = max(2, objective.passk_k)
    if objective.subset != "none":
        smallest = max(smallest, objective.subset_size)
    return smallest


def _layout(config: RunConfig, changes: _Changes) -> None:
    why = "two ranks wherever the recipe has more"
    trainer = config.trainer
    tensor = _two_at_most(trainer.tensor_parallel_size)
    pipeline = _two_at_most(trainer.pipeline_parallel_size)
    context = _two_at_most(trainer.context_parallel_size)
    expert = _two_at_most(trainer.expert_parallel_size)
    expert_tensor = trainer.expert_tensor_parallel_size
    if expert_tensor is not None:
        expert_tensor = _two_at_most(expert_tensor)
    attention_ranks = tensor * pipeline * context
    expert_ranks = (expert_tensor or tensor) * expert * pipeline
    num_ranks = math.lcm(attention_ranks, expert_ranks)
    is_data_parallel = trainer.dp > 1 and num_ranks == attention_ranks
    if is_data_parallel and num_ranks <= 2:
        num_ranks *= 2
    changes.set("trainer.num_ranks", num_ranks, why)
    changes.set("trainer.tensor_parallel_size", tensor, why)
    changes.set("trainer.pipeline_parallel_size", pipeline, why)
    changes.set("trainer.context_parallel_size", context, why)
    changes.set("trainer.expert_parallel_size", expert, why)
    changes.set("trainer.expert_tensor_parallel_size", expert_tensor, why)
    if trainer.virtual_pipeline_parallel_size is not None:
        changes.set("trainer.virtual_pipeline_parallel_size", 2, why)
    first = trainer.first_stage_layers
    last = trainer.last_stage_layers
    if last is not None:
        changes.set("trainer.last_stage_layers", 2, "unequal stages stay unequal")
        changes.set("trainer.first_stage_layers", None, "unequal stages stay unequal")
    elif first is not None:
        changes.set("trainer.first_stage_layers", 2, "unequal stages stay unequal")
    _without_gpus(config, changes)
    machine = "this machine"
    changes.set("placement.trainer_nodes", 1, machine)
    changes.set("placement.rollout_nodes", 0, machine)
    changes.set("placement.environment_nodes", 0, machine)
    changes.set("placement.gpus_per_node", 0, machine)


def _without_gpus(config: RunConfig, changes: _Changes) -> None:
    """Replace what the trainer refuses, or dies of, where it has no GPU."""
    why = "needs a GPU"
    trainer = config.trainer
    changes.set("trainer.fp8", "none", why)
    if trainer.attention == "transformer_engine":
        changes.set("trainer.attention", "auto", why)
    if trainer.moe_dispatcher != "alltoall":
        changes.set("trainer.moe_dispatcher", "auto", why)
    if config.publish.method == "nccl":
        changes.set("publish.method", "gloo", why)


def _engines(config: RunConfig, stand_ins: StandIns, changes: _Changes) -> None:
    why = "two engines wherever the recipe has more"
    rollout = config.rollout
    if config.num_replicas > 0:
        for name in ("num_replicas", "tensor_parallel_size", "data_parallel_size"):
            changes.set(f"rollout.{name}", _two_at_most(getattr(rollout, name)), why)
        changes.at_most("rollout.kv_cache_gib", rollout.kv_cache_gib, MAX_CACHE_GIB, "this machine")
        arguments = without_option(rollout.engine_arguments, MEMORY_SHARE)
        changes.set("rollout.engine_arguments", arguments, "arguments of a GPU")
    servers = config.placement.shared_servers
    if servers:
        changes.set("placement.shared_servers", [stand_ins.server], "a local server in their place")
    if config.trains_preferences:
        return  # nobody answers, and nothing is rewarded
    for number, domain in enumerate(config.domains):
        rewards = [_with_local_server(reward, stand_ins.server) for reward in domain.rewards]
        rewards = [_with_short_lengths(config, domain, reward) for reward in rewards]
        if _replaces_model(config, stand_ins):
            rewards = [_with_limits_of(stand_ins.model, reward) for reward in rewards]
        if COIN not in [reward.component for reward in rewards]:
            rewards.append(RewardConfig(function="grpo_megatron.rehearsal.coin:coin", name=COIN))
        written = [reward.model_dump(mode="json", exclude_none=True) for reward in rewards]
        changes.set(
            f"domains.{number}.rewards",
            written,
            "a coin beside the recipe's rewards: a random model is never right",
        )
        changes.set(f"domains.{number}.accuracy", COIN, "the coin says what is correct")
        changes.set(f"domains.{number}.accuracy_threshold", 1.0, "the coin says what is correct")


def _with_local_server(reward: RewardConfig, server: str) -> RewardConfig:
    url = reward.arguments.get("url")
    if not isinstance(url, str):
        return reward
    arguments = {**reward.arguments, "url": server}
    if "step_token" in arguments:
        arguments["step_token"] = STEP_TOKEN
    return reward.model_copy(update={"arguments": arguments})


def _with_limits_of(model: Path, reward: RewardConfig) -> RewardConfig:
    """Boxes scaled as images of the model in a directory are."""
    if not scales_boxes(reward):
        return reward
    limits = ImageSettings.of_model(read_config(model)).limits
    return reward.model_copy(update={"arguments": {**reward.arguments, **limits}})


def _with_short_lengths(
    config: RunConfig, domain: DomainConfig, reward: RewardConfig
) -> RewardConfig:
    """Arguments that count tokens, in proportion to the shorter completions."""
    longest = config.max_new_tokens_of(domain.name)
    if longest <= MAX_NEW_TOKENS:
        return reward
    arguments = dict(reward.arguments)
    for name in ("buffer", "max_tokens"):
        if isinstance(arguments.get(name), int):
            arguments[name] = max(1, arguments[name] * MAX_NEW_TOKENS // longest)
    return reward.model_copy(update={"arguments": arguments})


def _outcomes(config: RunConfig, changes: _Changes) -> None:
    changes.set("gates", [], "a random model passes none")
    changes.set("telemetry.wandb", "off", "nothing is sent from a rehearsal")
