"""Run directories as a run leaves them, with imagined numbers."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from grpo_megatron.batching.drift_file import SampleDrift, write_drift
from grpo_megatron.batching.manifest import StepFacts
from grpo_megatron.batching.store import SampleTable
from grpo_megatron.config.loader import ResolvedConfig, write_resolved
from grpo_megatron.config.presets import load_preset
from grpo_megatron.controller.group_filter import GroupFilter
from grpo_megatron.controller.recorder import record_step
from grpo_megatron.controller.sampling_metrics import by_domain, rollout_metrics
from grpo_megatron.data.tiny_model import write_tiny_model
from grpo_megatron.data.tokenizer import load_tokenizer
from grpo_megatron.rundir import RunDir
from grpo_megatron.telemetry.events import append_event
from grpo_megatron.telemetry.metrics import MetricsWriter
from grpo_megatron.telemetry.samples import extremes, write_samples
from grpo_megatron.types import Completion, Prompt, RolloutGroup, ScoredGroup, VersionSpan
from tests.controller.scored_groups import recipe
from tests.controller.scored_groups import stored as in_store
from tests.episodes import sequence_of

RESULT = {
    "eval": {
        "all": {"prompts": 64.0, "accuracy": 0.61},
        "addition": {
            "prompts": 64.0,
            "accuracy": 0.61,
            "accuracy_low": 0.49,
            "accuracy_high": 0.72,
        },
    },
    "seconds": 431.5,
    "before": 0.33,
    "steps": 12,
    "accelerator_hours": 0.36,
}


def write_run(
    root: Path,
    num_steps: int = 12,
    *,
    stored: int = 2,
    unscorable: Sequence[int] = (),
    result: dict | None = None,
    domains: Sequence[str] = ("addition",),
    episodes: bool = False,
    **tables,
) -> RunDir:
    """`num_steps` lines of metrics, the newest `stored` steps in the store; in the steps
    `unscorable` no sample has a reward. episodes: every sample is `episode_of` a calculator."""
    run_dir, rng = RunDir(root), np.random.default_rng(0)
    run_dir.create()
    preset = "tiny-qwen3-moe"
    if episodes:
        preset = "tiny-qwen3-moe-agent"
        for domain in domains:
            tables[domain] = {"template": "chat", "environment": {"name": "calculator"}}
    config = recipe(domains, name="test", num_steps=num_steps, **tables)
    write_resolved(run_dir.config, ResolvedConfig(recipe="test", config=config, provenance={}))
    write_tiny_model(run_dir.model, load_preset(preset))
    tokenizer = load_tokenizer(run_dir.model)
    with contextlib.closing(MetricsWriter(run_dir)) as metrics:
        for step in range(num_steps):
            skill = (step + 1) / (num_steps + 2)
            groups = [
                _group(
                    rng,
                    tokenizer,
                    step,
                    number,
                    domains[number % len(domains)],
                    skill,
                    scorable=step not in unscorable,
                )
                for number in range(4)
            ]
            if episodes:
                groups = [_with_episodes(group, tokenizer, rng) for group in groups]
            chosen = extremes(step, groups, 2)
            metrics.write(step, _metrics(config, groups, rng, skill))
            write_samples(run_dir, step, chosen)
            if step >= num_steps - stored:
                record_step(
                    run_dir.step_store(step),
                    in_store(run_dir.root / "rollouts" / str(step), groups),
                    1,
                    StepFacts(
                        kind="rl",
                        step=step,
                        domains=[d.name for d in config.domains],
                        extremes=chosen,
                    ),
                    tokenizer.decode,
                )
                _train(run_dir.step_store(step), rng)
    for swiglu in ("fused", "separate"):  # of the first attempt, and of the newest
        kernel = {"part": "swiglu", "chosen": swiglu, "why": "said"}
        append_event(run_dir.events, "kernels", kernels=[kernel])
    append_event(run_dir.events, "resumed", step=1)
    if result is not None:
        run_dir.result.write_text(json.dumps(result))
    return run_dir


def _train(directory: Path, rng) -> None:
    """Move every fifth sample of a recorded step, the last one the most."""
    table = SampleTable(directory)
    moved = {}
    for row in range(0, len(table), 5):
        _, before = table.policy_tokens(row)
        gain = (row + 1) * 0.01 * rng.standard_normal(len(before))
        after = np.minimum(before + gain, -1e-3)
        moved[row] = SampleDrift(before, after, np.full(len(before), 0.5 - row / 20))
    write_drift(directory, 0, 1, moved)


def _group(
    rng, tokenizer, step: int, number: int, domain: str, skill: float, *, scorable: bool
) -> ScoredGroup:
    a, b = rng.integers(10, 99, 2).tolist()
    right = rng.random(6) < skill
    texts = [str(a + b + (0 if ok else int(rng.integers(1, 9)))) for ok in right]
    ids = [np.array([*tokenizer.encode(text), 1], np.int32) for text in texts]
    completions = tuple(
        Completion(
            i, -rng.random(len(i)).astype(np.float32), (VersionSpan(step, 0, len(i)),), "stop", text
        )
        for i, text in zip(ids, texts, strict=True)
    )
    text = f"{a}+{b}="
    prompt = Prompt(f"p{number}", domain, text, tuple(tokenizer.encode(text)), str(a + b))
    short = np.array([0.1 * (len(t) < 4) for t in texts])
    parts = {"right": right.astype(float), "short": short}
    if not scorable:
        parts = {name: values * np.nan for name, values in parts.items()}
    return ScoredGroup(RolloutGroup(prompt, completions, 0), parts, sum(parts.values()))


CALL = '<tool_call>\n{"name": "calculate", "arguments": {"expression": "1+2"}}\n</tool_call>'
TURNS = ("I ask." + CALL + "<|end|>", "It is 3.<|end|>", "3<|end|>")
"""What the policy says in `episode_of`."""
RESULT_TEXT = "<|tool|>3<|end|><|assistant|>"


def episode_of(tokenizer, rng, outcome: float) -> Completion:
    """Two turns with a result between them, and a third one in a sequence of its own."""
    answered = tuple(tokenizer.encode("<|user|>1+2<|end|><|assistant|>"))
    pieces = [tokenizer.encode(text) for text in (TURNS[0], RESULT_TEXT, TURNS[1], TURNS[2])]
    call, result, answer, again = pieces
    first = _sequence(
        [(call, True), (result, False), (answer, True)],
        rng,
        states=["asked", "seen <b>"],
        rewards=[-0.5],
        answered_ids=answered,
    )
    rewritten = tuple(tokenizer.encode("<|user|>1+2 again<|end|><|assistant|>"))
    return _sequence(
        [(again, True)],
        rng,
        earlier=(first,),
        answered_ids=rewritten,
        outcome=outcome,
        outcome_metrics={"tool_calls": 1.0},
        text="3",
    )


def _sequence(pieces, rng, **more) -> Completion:
    ids = np.concatenate([ids for ids, _ in pieces]).astype(np.int32)
    made = sequence_of([(len(ids), is_policy) for ids, is_policy in pieces], rng, **more)
    return replace(made, token_ids=ids)


def _with_episodes(group: ScoredGroup, tokenizer, rng) -> ScoredGroup:
    """The same group, whose samples are episodes with its rewards as outcomes."""
    episodes = tuple(episode_of(tokenizer, rng, float(reward)) for reward in group.rewards)
    return replace(group, group=replace(group.group, completions=episodes))


def _metrics(config, groups, rng, skill: float) -> dict[str, float]:
    """What the loop and the trainer measure."""
    layers = {
        f"routing/{name}/layer_{layer}": value * rng.random() + layer / 40
        for layer in range(6)
        for name, value in (("rollout_slot_flip_rate", 0.1), ("entropy", 2.0))
    }
    return {
        **by_domain(rollout_metrics, groups),
        **by_domain(GroupFilter(config).metrics, groups),
        "mismatch/k1": 1e-5 * rng.random(),
        "mismatch/k3": 1e-5 * rng.random(),
        "step/k1": 1e-3 * rng.random(),
        "policy/entropy": 2 - skill + rng.random() / 10,
        "clip/low_fraction": 0.1 * rng.random(),
        "clip/high_fraction": 0.1 * rng.random(),
        "clip/region_fraction": 0.2 * rng.random(),
        "grad/norm": 1 + rng.random(),
        "loss/value": -skill * rng.random(),
        "time/rollout_s": 2 + rng.random(),
        "time/train_s": 3.0,
        "time/publish_s": 0.2,
        "time/step_s": 5.5,
        "idle/trainer": 0.4,
        "idle/engines": 0.6,
        "idle/rewards": 0.9,
        **layers,
    }


def samples_of(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]
