"""Rules between keys, without the model and the machine (those: `plan/`). Texts: `rules.toml`."""

import re
from collections.abc import Callable

from grpo_megatron.config.gates import parse_gate
from grpo_megatron.config.objective import PRESETS, TOKEN_LEVEL, BatchConfig, ObjectiveConfig
from grpo_megatron.config.presets import load_preset, preset_names
from grpo_megatron.config.problems import Conditions, Details, Violation, broken, stated
from grpo_megatron.config.run import DomainConfig, RunConfig
from grpo_megatron.config.suggest import nearest
from grpo_megatron.config.templates import PromptTemplate
from grpo_megatron.errors import GrpoMegatronError

_FUNCTION = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


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


def _min_lr(c: RunConfig) -> list[Details]:
    tables = {"optimizer": c, "cold_start.optimizer": c.cold_start}
    return [{"table": table, "lr": owner.optimizer.lr} for table, owner in tables.items()
            if owner and owner.optimizer.min_lr > owner.optimizer.lr]


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


_OF_RUN: Conditions = stated("c") | {
    "distillation": lambda c: (c.kind == "distil") != (c.distillation is not None) and {
        "near": "distil" if c.distillation else "rl"},
    "teacher_domains": _unknown_domains,
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
    "gate": lambda c: [{"i": i, **refusal} for i, text in enumerate(c.gates)
                       if (refusal := _refusal(
                           lambda gate: parse_gate(gate, [d.name for d in c.domains]), text))],
    "model_source.both": _made_up_and_read,
    "model_preset": _unknown_preset, "problem_counts": _problem_counts,
    "routing_replay": _unreplayed,
    "completion_length": lambda c: c.rollout.max_new_tokens >= c.rollout.max_model_len and {
        "most": c.rollout.max_model_len - 1},
    "min_lr": _min_lr,
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

_OF_DOMAIN: Conditions = stated("c, d, i") | {
    "domain_names": _same_name,
    "domain_source.missing": lambda c, d, i: getattr(d, _SOURCE_FIELDS[d.source][0]) is None and {
        "field": _SOURCE_FIELDS[d.source][0]},
    "domain_source.useless": lambda c, d, i: getattr(d, _SOURCE_FIELDS[d.source][1]) and {
        "field": _SOURCE_FIELDS[d.source][1]},
    "template": lambda c, d, i: _refusal(PromptTemplate, d.template),
    "reward_function": _reward_function, "accuracy_component": _accuracy_component}


WITHIN_OBJECTIVE: Conditions = stated("o") | {
    "objective.preset": lambda o: o.preset not in PRESETS and {
        "nearest": nearest(o.preset, PRESETS)},
    "objective.shaping": lambda o: o.shaping != "none" and (
        o.advantage in TOKEN_LEVEL or o.kl == "reward_k1")}


def _preset_size(o: ObjectiveConfig, b: BatchConfig) -> dict[str, int] | None:
    preset = PRESETS.get(o.preset)
    size = preset.group_size if preset else None
    return {"size": size} if size not in (None, b.num_samples_per_prompt) else None


# of RL steps, not of a case that is only evaluated
OBJECTIVE_AND_BATCH: Conditions = stated("o, b") | {"objective.group_size": _preset_size}
