"""Recorded episodes for the trainer, and what a plain loop makes of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from grpo_megatron.batching.manifest import StepFacts
from grpo_megatron.batching.spool import store_groups
from grpo_megatron.batching.store import SampleTable
from grpo_megatron.controller.recorder import record_step
from grpo_megatron.types import Completion, Prompt, RolloutGroup, ScoredGroup, VersionSpan
from tests.episodes import PIECE, sequence_of
from tests.trainer.models import VOCAB, random_routes, route_shape

DOMAINS = ["even", "odd"]
NUM_GROUPS = 4
GROUP_SIZE = 3
NUM_PROMPT = 5


def random_pieces(rng: np.random.Generator) -> list[PIECE]:
    """One to three turns, with tokens of the environment between them, at times before or after."""
    pieces: list[PIECE] = []
    if rng.random() < 0.3:
        pieces.append((int(rng.integers(1, 4)), False))
    for _ in range(int(rng.integers(1, 4))):
        pieces.append((int(rng.integers(1, 6)), True))
        pieces.append((int(rng.integers(1, 4)), False))
    if rng.random() < 0.5:
        pieces.pop()
    return pieces


def later_sequence(
    before: Completion, prompt: tuple[int, ...], rng: np.random.Generator, kind: int
) -> Completion:
    """A sequence behind a rewritten history: it leaves that of `before` in the response (kind 0),
    in the prompt (1), at once (2), or continues all of it (3)."""
    history = (*prompt, *before.token_ids.tolist())
    kept = {
        0: len(prompt) + max(before.num_tokens // 2, 1),
        1: len(prompt) - 2,
        2: 0,
        3: len(history),
    }[kind]
    rewritten = rng.integers(0, VOCAB, 3).tolist()
    if kind < 3 and kept < len(history):
        rewritten[0] = (history[kept] + 1) % VOCAB
    answered = (*history[:kept], *rewritten)
    return sequence_of(random_pieces(rng), rng, vocabulary=VOCAB, answered_ids=answered)


def random_groups(
    seed: int,
    *,
    forks: bool,
    states: bool = False,
    spoilt: bool = False,
    hf: dict | None = None,
) -> list[RolloutGroup[Completion]]:
    """Groups of episodes; with `forks` two of three have several sequences; `hf`: with routes,
    which agree where sequences of an episode and prompts of a group do."""
    rng = np.random.default_rng(seed)
    groups = []
    for number in range(NUM_GROUPS):
        prompt = tuple(rng.integers(0, VOCAB, NUM_PROMPT).tolist())
        completions = []
        for sample in range(GROUP_SIZE):
            sequences = [sequence_of(random_pieces(rng), rng, vocabulary=VOCAB)]
            num_later = 0
            if forks:
                num_later = sample
            for _ in range(num_later):
                kind = int(rng.integers(4))
                sequences.append(later_sequence(sequences[-1], prompt, rng, kind))
            if states:
                sequences = [_with_states(one, rng) for one in sequences]
            if spoilt:
                sequences = [_with_spoilt(one, rng) for one in sequences]
            if hf is not None:
                sequences = _with_routes(sequences, prompt, hf)
            *earlier, last = sequences
            completions.append(replace(last, earlier=tuple(earlier)))
        domain = DOMAINS[number % 2]
        groups.append(
            RolloutGroup(Prompt(str(number), domain, "", prompt, ""), tuple(completions), 0)
        )
    return groups


def _with_states(sequence: Completion, rng: np.random.Generator) -> Completion:
    turns = []
    for turn in sequence.turns:
        state = str(rng.integers(3))
        turns.append(replace(turn, state=state, reward=float(rng.integers(2))))
    return replace(sequence, turns=tuple(turns))


def _with_spoilt(sequence: Completion, rng: np.random.Generator) -> Completion:
    turns = [replace(turn, spoilt=bool(rng.random() < 0.3)) for turn in sequence.turns]
    return replace(sequence, turns=tuple(turns))


def _with_routes(
    sequences: list[Completion], prompt: tuple[int, ...], hf: dict
) -> list[Completion]:
    """Routes that follow from the tokens before: equal beginnings have equal ones."""
    found = []
    for one in sequences:
        tokens = (*(one.answered_ids or prompt), *one.token_ids.tolist())
        rows = []
        for end in range(1, len(tokens)):
            rng = np.random.default_rng(tokens[:end])
            rows.append(random_routes(1, hf, rng))
        routes = np.concatenate(rows)
        found.append(replace(one, routes=routes, route_versions=(VersionSpan(0, 0, len(routes)),)))
    return found


def write_groups(
    directory: Path,
    groups: list[RolloutGroup[Completion]],
    *,
    seed: int = 0,
    num_updates: int = 1,
    hf: dict | None = None,
    stale: bool = False,
    oldest_trained: int | None = None,
) -> str:
    """Record the groups as a step, with random rewards."""
    rng = np.random.default_rng(seed + 1000)
    shape = route_shape(hf) if hf else None
    scored = []
    for group in store_groups(directory.with_name(f"{directory.name}_spool"), groups, shape):
        size = len(group.completions)
        components = {"first": rng.normal(size=size), "second": rng.normal(size=size)}
        scored.append(ScoredGroup(group, components, rng.normal(size=size)))
    facts = StepFacts(domains=DOMAINS, stale=stale, oldest_trained=oldest_trained)
    record_step(directory, scored, num_updates, facts, lambda ids: "")
    return str(directory)


def plain_loop(
    model_directory: str, table: SampleTable, aggregation: str
) -> tuple[float, float, dict[str, np.ndarray]]:
    """GRPO's loss of all episodes on policy, the norm of its gradient, and the gradient: with
    transformers' model, one sequence after another, and sums that are written down here.

    A policy token weighs `1 / (number of episodes * policy tokens of its own)` with
    `seq_mean_token_mean`, `1 / all policy tokens` with `token_mean`."""
    from transformers import AutoModelForCausalLM

    policy = AutoModelForCausalLM.from_pretrained(model_directory, dtype=torch.float32).eval()
    advantages = _advantages(table)
    num_policy = np.zeros(len(advantages))
    masks = []
    spoilt = []
    for row in range(len(table)):
        mask = np.zeros(len(table.completion(row)[0]), bool)
        is_spoilt = mask.copy()
        for turn in table.turns(row):
            mask[turn.start : turn.end] = True
            is_spoilt[turn.start : turn.end] = turn.spoilt
        if not table.turns(row):
            mask[:] = True
        masks.append(mask)
        spoilt.append(is_spoilt[mask])
        num_policy[table.episode[row]] += mask.sum()
    total = 0.0
    for row in range(len(table)):
        prompt = table.prompt_ids(row).astype(np.int64)
        response = table.completion(row)[0].astype(np.int64)
        tokens = torch.from_numpy(np.concatenate([prompt, response]))
        logits = policy(tokens[None]).logits[0]
        logprobs = logits.log_softmax(-1)[torch.arange(len(tokens) - 1), tokens[1:]]
        of_policy = logprobs[len(prompt) - 1 :][torch.from_numpy(masks[row])]
        episode = table.episode[row]
        weight = 1.0 / num_policy.sum()
        if aggregation == "seq_mean_token_mean":
            weight = 1.0 / (len(advantages) * num_policy[episode])
        ratio = (of_policy - of_policy.detach()).exp()
        has_loss = torch.from_numpy(~spoilt[row]).float()
        loss = -(has_loss * weight * advantages[episode] * ratio).sum()
        loss.backward()
        total += loss.item()
    gradients = {}
    squares = 0.0
    for name, parameter in policy.named_parameters():
        assert parameter.grad is not None, name
        gradients[name] = parameter.grad.numpy()
        squares += float((parameter.grad.double() ** 2).sum())
    return total, squares**0.5, gradients


def _advantages(table: SampleTable) -> np.ndarray:
    """`(R - mean) / (std + 1e-6)` over the episodes of each group."""
    rewards = {}
    groups = {}
    for row in range(len(table)):
        rewards[int(table.episode[row])] = float(table.reward[row])
        groups[int(table.episode[row])] = int(table.group[row])
    values = np.array([rewards[episode] for episode in sorted(rewards)])
    group = np.array([groups[episode] for episode in sorted(groups)])
    found = np.empty(len(values))
    for number in np.unique(group):
        here = group == number
        centred = values[here] - values[here].mean()
        found[here] = centred / (values[here].std(ddof=1) + 1e-6)
    return found


def by_hf_names(gradients: dict[str, np.ndarray], names: list[str]) -> dict[str, np.ndarray]:
    """transformers' gradients under the names of a checkpoint: experts one by one."""
    found = {}
    for name in names:
        if name in gradients:
            found[name] = gradients[name]
            continue
        prefix, _, rest = name.partition(".experts.")
        number, projection, _ = rest.split(".")
        fused = gradients[f"{prefix}.experts.gate_up_proj"][int(number)]
        half = len(fused) // 2
        if projection == "gate_proj":
            found[name] = fused[:half]
        elif projection == "up_proj":
            found[name] = fused[half:]
        else:
            found[name] = gradients[f"{prefix}.experts.down_proj"][int(number)]
    return found
