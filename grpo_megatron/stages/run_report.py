"""What the report shows of one run: what it wrote, and what follows from its recorded steps."""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import torch

from grpo_megatron.algorithms.advantages.pipeline import advantages_of, needed_columns
from grpo_megatron.batching.store import SampleTable
from grpo_megatron.config.gates import read_result
from grpo_megatron.config.loader import read_resolved
from grpo_megatron.config.objective import ObjectiveConfig
from grpo_megatron.config.run import STEP_ROLES, RunConfig
from grpo_megatron.errors import GrpoMegatronError
from grpo_megatron.plan.memory import plan_of
from grpo_megatron.plan.ppo import comparison_of
from grpo_megatron.rundir import RunDir
from grpo_megatron.stages.conversations import Conversations
from grpo_megatron.stages.explorer_coverage import explorer_coverage
from grpo_megatron.stages.moved_samples import moved_samples
from grpo_megatron.stages.token_text import Decode, decoder, text_pieces
from grpo_megatron.telemetry.events import num_damaged_events, read_events
from grpo_megatron.telemetry.metrics import in_short, readable_metrics
from grpo_megatron.trainer.steps.recorded_batch import objective_of, sample_batch

CURVE_POINTS = 1000
NEWEST_STEPS = 3
SHOWN_TOKENS = 512


def report_run(run_dir: RunDir) -> dict[str, Any]:
    """Collect everything that the page shows of a run, as JSON values; `notes` says what could not
    be computed."""
    config = read_resolved(run_dir.config).config
    events = read_events(run_dir.events)
    samples, notes = _shown_samples(run_dir)
    num_damaged = num_damaged_events(run_dir.events)
    if num_damaged:
        notes.append(f"events: {num_damaged} line(s) of events.jsonl are no events")
    found: dict[str, Any] = {
        "name": run_dir.root.resolve().name,
        "config": config.model_dump(mode="json"),
        "result": {},
        "events": [event["kind"] for event in events],
        "kernels": _newest_kernels(events),
        "metrics": {},
        "every": 1,
        "gaps": [],
        "roles": config.step_roles,
        "samples": samples,
        "explorer": explorer_coverage(config.objective),
    }
    found |= _steps(config, run_dir, notes)
    computed: dict[str, Callable[[], Any]] = {
        "result": lambda: _result(run_dir),
        "recorded": lambda: _recorded_steps(config, run_dir),
        "memory": lambda: plan_of(config, worst_only=True).worst.parts,
        "ppo": lambda: asdict(comparison_of(config)),
        "moved": lambda: moved_samples(config, run_dir),
    }
    for part, compute in computed.items():
        try:
            found[part] = compute()
        except (GrpoMegatronError, OSError) as error:
            reason = str(error).splitlines()[0]
            notes.append(f"{part}: {reason}")
    found["notes"] = notes
    return found


def _steps(config: RunConfig, run_dir: RunDir, notes: list[str]) -> dict[str, Any]:
    """Return the columns of `metrics`, how many steps lie between two of their rows (`every`), and
    `gaps` (see `_gaps`). Appends to `notes` what cannot be read."""
    try:
        steps, problems = readable_metrics(run_dir.metrics)
    except OSError as error:
        notes.append(f"steps: {error}")
        return {}
    name = run_dir.metrics.name
    if problems:
        notes.append(f"steps: left out of {name}: {in_short(problems)}")
    gaps = _gaps(steps)
    if gaps:
        missing = in_short([words for *_, words in gaps])
        notes.append(f"steps: {name} lacks {missing}: curves are broken there")
    every = len(steps) // CURVE_POINTS + 1
    columns = _curves(_thinned(steps, every))
    for role in STEP_ROLES:
        if role not in config.step_roles:
            columns.pop(f"idle/{role}", None)  # older runs have it, as if the role were idle
    return {"metrics": columns, "every": every, "gaps": gaps}


def _gaps(steps: Sequence[dict[str, Any]]) -> list[tuple[int, int, str]]:
    """Return, where steps are missing, the last one before and the first one after them, and their
    numbers in words; -1 comes before the first step of a run."""
    gaps = []
    before = -1
    for step in steps:
        present = step["step"]
        if present == before + 2:
            gaps.append((before, present, f"step {before + 1}"))
        elif present > before + 2:
            gaps.append((before, present, f"steps {before + 1} to {present - 1}"))
        before = present
    return gaps


def _result(run_dir: RunDir) -> dict[str, Any]:
    """Return the values of `result.json`; {} before the run's end."""
    if not run_dir.result.exists():
        return {}
    return read_result(run_dir.root)


def _newest_kernels(events: Sequence[dict[str, Any]]) -> list[dict[str, str]]:
    """`part`, `chosen` and `why` of every kernel of the newest attempt; [] of an older run, or
    where no event tells them."""
    kernels: list[dict[str, str]] = []
    for event in events:
        if event["kind"] == "kernels" and isinstance(event.get("kernels"), list):
            kernels = event["kernels"]
    return kernels


def _thinned(steps: Sequence[dict[str, Any]], every: int) -> list[dict[str, Any]]:
    """Return every `every`-th step, counted from the newest, and all that were evaluated."""
    kept = []
    for age, step in enumerate(reversed(steps)):
        if age % every == 0 or "evaluation/accuracy" in step:
            kept.append(step)
    kept.reverse()
    return kept


def _curves(rows: Sequence[dict[str, Any]]) -> dict[str, list[Any]]:
    """Return a column per metric, "" where a step lacks it."""
    names: dict[str, None] = {}  # ordered
    for row in rows:
        names.update(dict.fromkeys(row))
    columns = {}
    for name in names:
        columns[name] = [row.get(name, "") for row in rows]
    return columns


def _shown_samples(run_dir: RunDir) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the best and worst completions of the newest steps, as they were written, and a note
    for each file with lines that cannot be read."""
    newest = sorted(run_dir.samples.glob("step_*.jsonl"))[-NEWEST_STEPS:]
    found: list[dict[str, Any]] = []
    notes = []
    for file in newest:
        try:
            with file.open(encoding="utf-8") as lines:  # `splitlines` ends one at U+2028 too
                for line in lines:
                    found.append(json.loads(line))
        except (OSError, ValueError, RecursionError) as error:
            notes.append(f"samples: {file.name} cannot be read to its end: {error}")
    return found, notes


def _recorded_steps(config: RunConfig, run_dir: RunDir) -> list[dict[str, Any]]:
    """Return the newest steps in the store: (domain, rewards, lengths) of groups, and extreme
    samples with `tokens` (id, text, advantage), or of episodes with `sequences` (`Conversations`).
    `lacks`: what only the trainer knew; advantages are those of plain GRPO then."""
    if config.kind != "rl":
        return []
    lacks = _unknown_columns(config)
    if lacks:
        config = config.model_copy(update={"objective": ObjectiveConfig(preset="grpo")})
    model = config.model.path or run_dir.model
    decode = decoder(model)
    conversations = Conversations(config, model)
    manifests = sorted(run_dir.store.glob("step_*/manifest.json"))
    found = []
    for manifest in manifests[-NEWEST_STEPS:]:
        table = SampleTable(manifest.parent, verify=False)
        found.append({"lacks": lacks, **_recorded_step(config, table, decode, conversations)})
    return found


def _unknown_columns(config: RunConfig) -> list[str]:
    """Return what the objective's advantages need and the store does not hold."""
    weighs_kl = objective_of(config, {}).weighs_kl
    lacks = set(needed_columns(config.objective, weighs_kl=weighs_kl))
    if config.objective.subset == "adaptive":
        lacks.add("success of earlier steps")
    return sorted(lacks)


def _recorded_step(
    config: RunConfig, table: SampleTable, decode: Decode, conversations: Conversations
) -> dict[str, Any]:
    batch = sample_batch(config, table)
    advantages = advantages_of(objective_of(config, {}), batch)
    by_token = advantages.values
    if not advantages.per_token:
        by_token = batch.to_tokens(by_token)

    samples_of_groups = []
    groups = []
    group_of_sample = table.of_episodes(table.group)
    rewards = table.of_episodes(table.reward)
    for group in np.unique(group_of_sample):
        of_group = np.flatnonzero(group_of_sample == group)
        samples_of_groups.append(of_group)
        domain = int(table.of_episodes(table.domain)[of_group[0]])
        lengths = table.episode_policy_lengths[of_group].tolist()
        groups.append((domain, rewards[of_group].tolist(), lengths))

    samples = []
    for sample in table.manifest.extremes:
        if "index" not in sample:  # of an older run
            continue
        episode = int(samples_of_groups[sample["group"]][sample["index"]])
        of_tokens = by_token[batch.offsets[episode] :]
        sequences = conversations.sequences(table, episode, of_tokens.numpy())
        if sequences:
            samples.append({**sample, "sequences": sequences})
            continue
        tokens = _shown_tokens(table, int(table.first_rows[episode]), of_tokens, decode)
        samples.append({**sample, "tokens": tokens})
    return {"step": table.manifest.step, "samples": samples, "groups": groups}


def _shown_tokens(
    table: SampleTable, row: int, advantages: torch.Tensor, decode: Decode
) -> list[tuple[int, str, float]]:
    """Id, text and advantage of a completion's first tokens. advantages: fp64, of its tokens and
    what comes after them."""
    token_ids, _ = table.completion(row)
    ids = token_ids[:SHOWN_TOKENS].tolist()
    pieces = text_pieces(ids, decode)
    return list(zip(ids, pieces, advantages[: len(ids)].tolist(), strict=True))
