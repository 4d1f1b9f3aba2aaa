"""Rules between keys, without the model and the machine (those: `plan/`). Texts: `rules.toml`."""

import re
from collections.abc import Callable

from grpo_megatron.config.gates import parse_gate
from grpo_megatron.config.objective import PRESETS, TOKEN_LEVEL, BatchConfig, ObjectiveConfig
from grpo_megatron.config.presets import load_preset, preset_names
from grpo_megatron.config.problems import Conditions, Details, Violation, broken
from grpo_megatron.config.run import DomainConfig, RunConfig
from grpo_megatron.config.suggest import nearest
from grpo_megatron.config.templates import PromptTemplate
from grpo_megatron.errors import GrpoMegatronError

_FUNCTION = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
_BFLOAT16_NOISE = 0.02  # mean difference of log-probs between two bfloat16 engines that agree


def check_constraints(config: RunConfig) -> list[Violation]:
    known = {"c": config, "o": config.objective}
    found = list(broken(_OF_RUN, known, config))
    for index, domain in enumerate(config.domains):
        found += broken(_OF_DOMAIN, {**known, "d": domain, "i": index}, config, domain, index)
    found += broken(WITHIN_OBJECTIVE, known, config.objective)
    if config.num_steps:
        found += broken(OBJECTIVE_AND_BATCH, known, config.objective, config.batch)
    return found


def _unknown_preset(c: RunConfig) -> Details | None:
    name, known = c.model.preset, preset_names()
    return None if name in (None, *known) else {
        "nearest": nearest(name, known), "known": ", ".join(known)}


def _made_up_and_read(c: RunConfig) -> bool:
    name = c.model.preset
    return (c.model.path is not None and name in preset_names()
            and not load_preset(name).checkpoint)


def _problem_counts(c: RunConfig) -> Details | None:
    counts = [domain.num_problems for domain in c.domains]
    if None in counts or sum(counts) > c.data.num_validation + c.data.num_heldout:
        return None
    return {"total": sum(counts), "related": (
        "data.num_validation", *(f"domains.{i}.num_problems" for i in range(len(counts))))}


def _canary_tolerance(c: RunConfig) -> bool:
    tolerance, dtypes = c.publish.canary_tolerance, (c.trainer.precision, c.rollout.dtype)
    return (c.publish.canary and tolerance is not None and tolerance < _BFLOAT16_NOISE
            and "bfloat16" in dtypes)


def _min_lr(c: RunConfig) -> list[Details]:
    tables = {"optimizer": c, "cold_start.optimizer": c.cold_start}
    return [{"table": table, "lr": owner.optimizer.lr} for table, owner in tables.items()
            if owner and owner.optimizer.min_lr > owner.optimizer.lr]


def _has_keep_weight(c: RunConfig) -> bool:
    return any([c.routing.keep_weight, *(d.keep_routing_weight for d in c.domains)])


def _unreplayed(c: RunConfig) -> list[Details]:
    wants = {"routing.keep_loss": c.routing.keep_loss in ("set_mass", "cross_entropy"),
             "routing.balance_weight": c.routing.balance_weight > 0}
    return [{"wants": key} for key, on in wants.items() if on and c.routing.replay == "none"]


def _engines_without_gpus(c: RunConfig) -> Details | None:
    """Engines fill nodes one by one; one that is wider than a node takes whole nodes."""
    placement, size = c.placement, c.rollout.tensor_parallel_size
    free = placement.gpus_per_node
    if placement.rollout_nodes == 0 and placement.mode == "separate":
        free -= c.trainer.num_ranks // placement.trainer_nodes
    nodes = placement.rollout_nodes or placement.trainer_nodes
    room = nodes * (free // size) if size <= free else nodes * free // size if free > 0 else 0
    if not placement.gpus_per_node or c.rollout.num_replicas <= room:
        return None
    return {"room": room, "nearest": [room] if room else []}


def _unknown_domains(c: RunConfig) -> list[Details]:
    known = [d.name for d in c.domains]
    return [{"i": i, "domain": name, "nearest": nearest(name, known) or known}
            for i, teacher in enumerate(c.distillation.teachers if c.distillation else ())
            for name in teacher.domains if name not in known]


def _untaught_domains(c: RunConfig) -> list[Details]:
    taught = [name for teacher in (c.distillation.teachers if c.distillation else ())
              for name in teacher.domains or [d.name for d in c.domains]]
    return [{"domain": d.name} for d in c.domains
            if c.distillation and d.weight and d.name not in taught]


def _unused_routing(c: RunConfig) -> list[Details]:
    off = {"keep_loss": "none", "balance_weight": 0.0}
    if c.uses_dataset or c.routing.replay == "r2":
        off["replay"] = "none"  # nobody sampled it, or no old policy passes over it
    return [{"field": field, "nearest": [value]} for field, value in off.items()
            if c.kind in ("sft", "distil") and getattr(c.routing, field) != value]


def _refusal(parse: Callable[[str], object], text: str) -> Details | None:
    try:
        parse(text)
    except GrpoMegatronError as error:
        return {"reason": error.message, "fix": error.remedy}
    return None


_OF_RUN: Conditions = {
    "distillation": lambda c: (c.kind == "distil") != (c.distillation is not None) and {
        "near": "distil" if c.distillation else "rl"},
    "teacher_domains": _unknown_domains,
    "kind_steps": lambda c: not c.trains and c.num_steps > 0,
    "rl_only": lambda c: [{"field": field} for field in ("cold_start", "correction")
                          if c.kind != "rl" and getattr(c, field) is not None],
    "untaught_domain": _untaught_domains,
    "teacher_source": lambda c: [
        {"i": i} for i, teacher in enumerate(c.distillation.teachers if c.distillation else ())
        if (teacher.path is None) == (teacher.url is None)],
    "served_teacher": lambda c: c.distillation and [
        {"key": key, "nearest": [near]} for key, value, near in (
            ("distillation.mode", c.distillation.mode, "topk_tail"),
            ("rollout.temperature" if c.distillation.temperature is None else
             "distillation.temperature", c.distillation.temperature or c.rollout.temperature, 1.0))
        if value != near and any(teacher.url for teacher in c.distillation.teachers)],
    "sampled_tokens": lambda c: c.distillation and c.distillation.mode == "sampled" and [
        {"field": field} for field, wrong in (("samples", c.uses_dataset), (
            "temperature", c.distillation.temperature is not None)) if wrong],
    "token_routing": _unused_routing,
    "dataset_staleness": lambda c: c.uses_dataset and c.batch.max_staleness > 0,
    "gate": lambda c: [{"i": i, **refusal} for i, text in enumerate(c.gates)
                       if (refusal := _refusal(
                           lambda gate: parse_gate(gate, [d.name for d in c.domains]), text))],
    "colocated_staleness": lambda c: c.batch.max_staleness and (
        c.placement.mode == "colocated" or c.placement.shared_servers),
    "domain_weights": lambda c: not any(d.weight for d in c.domains),
    "model_source.both": _made_up_and_read,
    "model_source.neither": lambda c: c.model.preset is None and c.model.path is None,
    "model_preset": _unknown_preset, "problem_counts": _problem_counts,
    "keep_routing.weight": lambda c: c.routing.keep_loss != "none" and not _has_keep_weight(c),
    "keep_routing.loss": lambda c: c.routing.keep_loss == "none" and _has_keep_weight(c),
    "routing_replay": _unreplayed,
    "updates_per_rollout": lambda c: c.batch.updates_per_rollout > c.batch.num_prompts,
    "zero_variance_resample": lambda c: c.sampling.zero_variance == "resample",
    "deterministic_surplus": lambda c: c.sampling.surplus_staleness and c.rollout.deterministic,
    "completion_length": lambda c: c.rollout.max_new_tokens >= c.rollout.max_model_len and {
        "most": c.rollout.max_model_len - 1},
    "microbatch_length": lambda c: c.trainer.max_tokens_per_microbatch < c.rollout.max_model_len,
    "deterministic_staleness": lambda c: c.batch.max_staleness and c.rollout.deterministic,
    "pause_in_flight": lambda c: c.publish.pause != "wait" and not c.batch.max_staleness,
    "num_senders": lambda c: c.publish.num_senders > c.trainer.num_ranks,
    "canary_tolerance": _canary_tolerance,
    "validation_prompts": lambda c: not c.data.num_validation and (
        c.cold_start or c.evaluation.interval),
    "min_lr": _min_lr,
    "placement.trainer": lambda c: c.trainer.num_ranks % c.placement.trainer_nodes != 0,
    "placement.trainer_gpus": lambda c: 0 < c.placement.num_trainer_gpus < c.trainer.num_ranks,
    "placement.rollout_gpus": _engines_without_gpus}


def _same_name(c: RunConfig, d: DomainConfig, i: int) -> Details | None:
    first = [domain.name for domain in c.domains].index(d.name)
    return {"first": first} if first < i else None


def _reward_function(c: RunConfig, d: DomainConfig, i: int) -> list[Details]:
    return [{"number": number} for number, reward in enumerate(d.rewards)
            if not _FUNCTION.fullmatch(reward.function)]


def _accuracy_component(c: RunConfig, d: DomainConfig, i: int) -> Details | None:
    names = [reward.component for reward in d.rewards]
    return None if d.accuracy in (None, *names) else {
        "nearest": nearest(d.accuracy, names, count=1) or names[:1]}


# what a source needs, and what it does not use
_SOURCE_FIELDS = {"reasoning_gym": ("dataset", "path"), "file": ("path", "dataset")}

_OF_DOMAIN: Conditions = {
    "domain_names": _same_name,
    "domain_source.missing": lambda c, d, i: getattr(d, _SOURCE_FIELDS[d.source][0]) is None and {
        "field": _SOURCE_FIELDS[d.source][0]},
    "domain_source.useless": lambda c, d, i: getattr(d, _SOURCE_FIELDS[d.source][1]) and {
        "field": _SOURCE_FIELDS[d.source][1]},
    "template": lambda c, d, i: _refusal(PromptTemplate, d.template),
    "reward_function": _reward_function, "accuracy_component": _accuracy_component,
    "length_budget": lambda c, d, i: (d.max_new_tokens or 0) > c.rollout.max_new_tokens,
    "objective.domain_kl_beta": lambda c, d, i: (
        c.objective.kl == "none" and d.objective and d.objective.kl_beta)}


_SEQUENCE_RATIOS = ("sequence_geo", "sequence_product", "sequence_mean")

WITHIN_OBJECTIVE: Conditions = {
    "objective.preset": lambda o: o.preset not in PRESETS and {
        "nearest": nearest(o.preset, PRESETS)},
    "objective.k1": lambda o: o.kl == "k1",
    "objective.kl_beta": lambda o: o.kl == "none" and o.kl_beta > 0,
    "objective.reference_ema": lambda o: o.reference_ema and not o.reference_interval,
    "objective.sequence_aggregation": lambda o: (
        o.ratio in _SEQUENCE_RATIOS and o.aggregation != "seq_mean_token_mean"
        and "sequence_ratio_aggregation" not in o.allow),
    "objective.shaping": lambda o: o.shaping != "none" and (
        o.advantage in TOKEN_LEVEL or o.kl == "reward_k1"),
    "objective.sequence_ratio": lambda o: o.ratio in _SEQUENCE_RATIOS and o.token_level,
    "objective.token_clip": lambda o: o.clip in ("cispo", "sapo") and o.ratio != "token",
    "objective.gmpo": lambda o: o.clip == "gmpo" and o.ratio != "sequence_geo",
    "objective.dual_clip": lambda o: o.dual_clip and o.clip != "ppo",
    "objective.ratio_min": lambda o: o.clip == "cispo" and o.ratio_min > o.ratio_max,
    "objective.mismatch": lambda o: o.proximal == "rollout" and o.mismatch != "none",
    "objective.mismatch_min": lambda o: (
        o.mismatch in ("icepop", "geometric_mask") and o.mismatch_min > o.mismatch_max),
    "objective.advantage_std": lambda o: (
        o.advantage_std != "none" and o.advantage not in ("group", "components")),
    "objective.components": lambda o: o.advantage == "components" and o.advantage_std != "group",
    "objective.turn_ratio": lambda o: o.ratio == "turn_geo" and o.advantage != "gagpo",
    "objective.shuffle_advantages": lambda o: o.shuffle_advantages and o.token_level}


def _preset_size(o: ObjectiveConfig, b: BatchConfig) -> dict[str, int] | None:
    preset = PRESETS.get(o.preset)
    size = preset.group_size if preset else None
    return {"size": size} if size not in (None, b.num_samples_per_prompt) else None


OBJECTIVE_AND_BATCH: Conditions = {  # of RL steps, not of a case that is only evaluated
    "objective.group_size": _preset_size,
    "objective.gagpo": lambda o, b: o.advantage == "gagpo",
    "group_size": lambda o, b: b.num_samples_per_prompt == 1 and (
        o.advantage not in ("reward", "gagpo", "process")),
    "objective.subset_size": lambda o, b: (
        o.subset != "none" and o.subset_size > b.num_samples_per_prompt),
    "objective.passk_k": lambda o, b: (
        o.advantage in ("passk", "pkpo") and o.passk_k > b.num_samples_per_prompt),
    "objective.llds_weight": lambda o, b: (
        o.llds_weight > 0 and b.updates_per_rollout == 1 and not b.max_staleness)}
