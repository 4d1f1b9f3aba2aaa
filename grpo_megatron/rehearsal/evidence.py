"""What a rehearsed run shows, read from what it left behind."""

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_megatron.batching.store import SampleTable
from grpo_megatron.config.evaluated_share import EvaluatedShare, share_of
from grpo_megatron.config.loader import ResolvedConfig
from grpo_megatron.config.run import RunConfig
from grpo_megatron.launch import slurm
from grpo_megatron.plan.memory import memory_problems, plan_of
from grpo_megatron.rehearsal.scale_down import has_served_teachers
from grpo_megatron.rundir import RunDir
from grpo_megatron.telemetry.events import read_events

_GIB = 2**30
_COMPARED = "mismatch/abs_max"
_REPLAYED = "routing/rollout_slot_flip_rate"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that a rehearsal was to show, and whether it did."""

    what: str
    holds: bool
    detail: str = ""


def at_cluster_scale(resolved: ResolvedConfig, site: str) -> list[Finding]:
    """Return the recipe as it stands: its rules, its job script for `site` and, on GPUs, its
    memory."""
    config = resolved.config
    placement = config.placement
    sizes = f"{config.trainer.num_ranks} trainer ranks"
    sizes += f", {config.num_replicas} engines of {config.rollout.num_workers}"
    findings = [Finding("the recipe breaks no rule at its own size", True, sizes)]
    if placement.gpus_per_node:
        script = slurm.render(resolved, site)
        detail = f"{placement.num_nodes} nodes, {len(script.splitlines())} lines"
        findings.append(Finding("its Slurm job renders", True, detail))
        plan = plan_of(config, worst_only=True)
        problems = memory_problems(config, plan)
        detail = f"fullest trainer rank {plan.worst.total / _GIB:.1f} GiB"
        if plan.usable_bytes is not None:
            detail += f" of {plan.usable_bytes / _GIB:.1f} on an 80 GB GPU"
        findings.append(Finding("its memory fits by the plan", not problems, detail))
    return findings


def of_run(config: RunConfig, run_dir: RunDir, num_attempts: int) -> list[Finding]:
    """Return what the finished run of the scaled recipe shows.

    num_attempts: 2 where it was stopped and resumed."""
    findings: list[Finding] = []
    records = _records(run_dir.metrics)
    if config.cold_start is not None:
        findings.append(cold_started(run_dir))
    if config.trains and config.num_steps:
        findings += _of_steps(config, records)
    if config.trains:
        if num_attempts > 1:
            findings.append(_resumed(run_dir, records))
        for export in run_dir.exports(config.adapter_domains):
            findings.append(_exported(export))
    if has_served_teachers(config):
        findings.append(_taught(run_dir))
    if config.kind == "experience":
        findings.append(_learned_lessons(config, run_dir, records, num_attempts))
    if config.kind == "rejection_sample":
        num_rows = 0
        if run_dir.dataset.exists():
            num_rows = len(run_dir.dataset.read_text(encoding="utf-8").splitlines())
        findings.append(
            Finding("verified samples became a data set", num_rows > 0, f"{num_rows} rows")
        )
    result = json.loads(run_dir.result.read_text(encoding="utf-8"))
    accuracy = share_of(result.get("eval", {}).get("all", {}), "accuracy")
    if accuracy.num_prompts:
        findings.append(_evaluated(accuracy))
    return findings


def _evaluated(accuracy: EvaluatedShare) -> Finding:
    """Whether held-out prompts could be scored."""
    is_known = not math.isnan(accuracy.value)
    return Finding("held-out prompts were evaluated", is_known, f"accuracy {accuracy}")


def _learned_lessons(
    config: RunConfig, run_dir: RunDir, records: Sequence[dict[str, Any]], num_attempts: int
) -> Finding:
    """Whether all steps were taken, over all attempts, and left a lesson."""
    lessons = json.loads(run_dir.experience.read_text(encoding="utf-8"))["lessons"]
    detail = f"{len(records)} steps in {num_attempts} attempts, {len(lessons)} lessons"
    is_whole = len(records) == config.num_steps and len(lessons) > 0
    return Finding("lessons were learned", is_whole, detail)


def of_judges(configs: Iterable[RunConfig], num_judged: int) -> list[Finding]:
    """Whether learned rewards were asked, where one of the runs has any; num_judged: how often."""
    if not any(_has_learned_reward(config) for config in configs):
        return []
    return [Finding("learned rewards were asked", num_judged > 0, f"{num_judged} times")]


def _has_learned_reward(config: RunConfig) -> bool:
    """Whether a server computes a reward of a domain that is trained."""
    for domain in config.domains:
        for reward in domain.rewards:
            if domain.weight > 0 and "url" in reward.arguments:
                return True
    return False


def _taught(run_dir: RunDir) -> Finding:
    """Whether teachers behind servers said something of the tokens of recorded steps."""
    num_tokens = 0
    for directory in sorted(run_dir.store.glob("step_*")):
        table = SampleTable(directory, verify=False)
        for name, values in table.teacher_logprobs.items():
            if name.endswith("/ids"):
                num_tokens += len(values)
    return Finding("teachers behind servers answered", num_tokens > 0, f"{num_tokens} tokens")


def cold_started(run_dir: RunDir) -> Finding:
    """Whether the supervised start, which a run without RL steps consists of, ended."""
    num_steps = 0
    for event in read_events(run_dir.events):
        if event["kind"] == "cold_start_done":
            num_steps = event["steps"]
    return Finding("the cold start was trained", num_steps > 0, f"{num_steps} optimizer steps")


def _of_steps(config: RunConfig, records: Sequence[dict[str, Any]]) -> list[Finding]:
    steps = [record["step"] for record in records]
    norms = [record["grad/norm"] for record in records if "grad/norm" in record]
    moved = [norm for norm in norms if math.isfinite(norm) and norm > 0]
    shown = ", ".join(f"{norm:.3g}" for norm in norms) or "none"
    findings = [
        Finding("optimizer steps were taken", len(moved) > 0, f"{len(steps)} steps, norms {shown}")
    ]
    compared = [record[_COMPARED] for record in records if _COMPARED in record]
    if compared:
        detail = f"largest difference {max(compared):.2g} on trained tokens"
        holds = all(math.isfinite(value) for value in compared)
        what = "log-probs of trainer and engines were compared"
        findings.append(Finding(what, holds, detail))
    if config.routing.replay != "none":
        flips = [record[_REPLAYED] for record in records if _REPLAYED in record]
        detail = "not measured"
        if flips:
            detail = f"{max(flips):.2%} of the live router's choices differ"
        what = f"experts were replayed ({config.routing.replay})"
        findings.append(Finding(what, len(flips) > 0, detail))
    if config.kind == "rl":
        findings.append(rewarded(config, records))
    return findings


def rewarded(config: RunConfig, records: Sequence[dict[str, Any]]) -> Finding:
    """Whether every component of the domains that were trained has a score in some step."""
    computed = _reward_components(records)
    missing = []
    keys: set[str] = set()
    for record in records:
        keys.update(record)
    for domain in config.domains:
        # of tokens that were trained; counts of samples are there for domains without any, as 0
        has_tokens = f"policy/entropy@{domain.name}" in keys
        if len(config.domains) > 1 and not has_tokens:
            continue  # a small share may get none of so few prompts, and a weight of 0 gets none
        missing += [r.component for r in domain.rewards if r.component not in computed]
    detail = ", ".join(computed)
    if missing:
        detail = f"no score of {', '.join(missing)}"
    return Finding("every reward was computed", not missing, detail)


def _reward_components(records: Sequence[dict[str, Any]]) -> list[str]:
    names = []
    for record in records:
        for key in record:
            area, _, rest = key.partition("/")
            name, _, kind = rest.partition("/")
            if area == "reward" and kind == "mean":
                names.append(name)
    return list(dict.fromkeys(names))


def _resumed(run_dir: RunDir, records: Sequence[dict[str, Any]]) -> Finding:
    steps = [record["step"] for record in records]
    attempts = [path.name for path in (run_dir.root / "logs").iterdir() if path.name.isdecimal()]
    holds = steps == list(range(len(steps))) and len(attempts) > 1
    detail = f"steps {steps}, started {len(attempts)} times"
    return Finding("it was resumed from a checkpoint", holds, detail)


def _text_ids(config: Any) -> list[int]:
    """Some token ids, none of which stands for a part of an image."""
    marks = {
        getattr(config, f"{name}_token_id", None)
        for name in ("image", "video", "vision_start", "vision_end")
    }
    return [number for number in range(12) if number not in marks][:8]


def _exported(export: Path) -> Finding:
    """Return the export, read by transformers where that has the family."""
    what = "the exported checkpoint is a Hugging Face one"
    if export.parent.name == "export":  # of one domain
        what = f"the checkpoint exported for {export.name} is a Hugging Face one"
    if not (export / "config.json").exists():
        return Finding(what, False, f"{export} has no config.json")
    import torch
    from transformers import (
        AutoModelForCausalLM,
        AutoModelForImageTextToText,
        AutoModelForSequenceClassification,
    )

    from grpo_megatron.weights.transformers_model import load_config, load_model

    try:
        config = load_config(export)
    except ValueError:
        return Finding(what, True, "read back by ourselves; transformers lacks the family")
    kind = AutoModelForCausalLM
    architectures = config.architectures or ()
    if any(name.endswith("ForSequenceClassification") for name in architectures):
        kind = AutoModelForSequenceClassification
    if hasattr(config, "vision_config"):
        kind = AutoModelForImageTextToText
    model = load_model(kind, export, config, torch.float32)
    with torch.no_grad():
        logits = model(torch.tensor([_text_ids(config)])).logits
    return Finding(what, bool(torch.isfinite(logits).all()), "transformers computes with it")


def _records(path: Path) -> list[dict[str, Any]]:
    """Return lines of metrics.jsonl; none of a run that trains nothing."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
