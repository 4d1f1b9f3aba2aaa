"""What must not change the loss or its gradient, for every preset, in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_megatron.algorithms.case import parse_case
from grpo_megatron.algorithms.evaluate import evaluate
from grpo_megatron.algorithms.objective import Objective
from grpo_megatron.config.loader import load_objective
from grpo_megatron.config.objective import PRESETS
from tests.algorithms.evaluation import evaluated, flat

SETTINGS = {
    "gspo": ["clip_low=0.2", "clip_high=0.2"],
    "gspo_token": ["clip_low=0.2"],
    "gfpo": ["subset_size=2"],
    "deepseek_v3_2": ["kl_beta=0.1", "opsm_delta=0.05"],
    "moe_default": ["kl_beta=0.1", "opsm_delta=0.05", "clip_low=0.2", "clip_high=0.3"],
    "dense_default": ["kl_beta=0.1", "opsm_delta=0.05"],
    "grpo": ["entropy_weight=0.01", "llds_weight=0.1", "preference_weight=0.5"],
    "dr_grpo": ["denominator=domain"],
    "cispo": ["aggregation=prompt_mean"],
    "trm": ["trm_max=0.05", "trm_mean=0.02"],
    "drpo": ["drpo_delta=0.1"],
}


def random_case(seed: int, num_groups: int, *, domains: bool = True) -> dict[str, Any]:
    """Groups of 1 to 4 ragged samples, some empty, some without a reward."""
    rng = np.random.default_rng(seed)
    case: dict[str, list] = {
        name: []
        for name in (
            "rewards",
            "group_ids",
            "logprobs",
            "old_logprobs",
            "rollout_logprobs",
            "ref_logprobs",
            "entropies",
            "squared_probs",
            "values",
            "token_ids",
            "turns",
            "domains",
            "sample_ids",
        )
    }
    components: dict[str, list] = {"a": [], "b": []}
    for group in range(num_groups):
        for _ in range(int(rng.integers(1, 5))):
            n = int(rng.integers(0, 7))
            case["rewards"].append(None if rng.random() < 0.1 else int(rng.random() < 0.5))
            case["group_ids"].append(group)
            case["domains"].append(f"d{group % 2}" if domains else "d0")
            base = -rng.exponential(1.0, n) - 0.01
            case["logprobs"].append(base.tolist())
            for name in ("old_logprobs", "rollout_logprobs", "ref_logprobs"):
                case[name].append((base + rng.normal(0, 0.15, n)).tolist())
            case["entropies"].append(rng.exponential(0.4, n).tolist())
            case["squared_probs"].append((np.exp(base) ** 2).tolist())
            case["values"].append((0.5 + np.cos(7 * base) / 2).tolist())
            case["token_ids"].append(rng.integers(0, 3, n).tolist())
            ends = sorted({int(rng.integers(0, n)), n - 1}) if n else []
            case["turns"].append(
                [
                    {
                        "end": end,
                        "reward": float(rng.integers(0, 2)),
                        "state": str(rng.integers(0, 2)),
                    }
                    for end in ends
                ]
            )
            components["a"].append(float(rng.integers(0, 2)))
            components["b"].append(float(rng.random()))
    case["sample_ids"] = rng.permutation(len(case["rewards"])).tolist()
    return {**case, "components": components}


def of_preset(name: str, case: dict[str, Any]):
    parsed = parse_case(case)
    config, own = load_objective(name, SETTINGS.get(name, ()), parsed.domains)
    return Objective(config, parsed.domains, own), parsed


def reordered(case: dict[str, Any], order: np.ndarray) -> dict[str, Any]:
    moved = {
        name: [values[i] for i in order] for name, values in case.items() if name != "components"
    }
    return {
        **moved,
        "components": {
            name: [values[i] for i in order] for name, values in case["components"].items()
        },
    }


def by_sample(gradient: torch.Tensor, counts: torch.Tensor) -> list[np.ndarray]:
    return [part.numpy() for part in gradient.split(counts.tolist())]


@pytest.mark.parametrize("name", PRESETS)
@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 10_000), num_groups=st.integers(1, 5))
def test_split_and_order_change_nothing(name, seed, num_groups):
    case = random_case(seed, num_groups)
    objective, parsed = of_preset(name, case)
    whole = evaluate(objective, parsed.batch, parsed.columns, constant_length=8)
    assert np.isfinite(whole.loss) and bool(torch.isfinite(whole.gradient).all())
    rng, size = np.random.default_rng(seed), len(parsed.batch)
    parts = [
        torch.from_numpy(part)
        for part in np.array_split(rng.permutation(size), int(rng.integers(1, size + 1)))
    ]
    split = evaluate(objective, parsed.batch, parsed.columns, parts=parts, constant_length=8)
    assert split.loss == pytest.approx(whole.loss, rel=1e-9, abs=1e-12)
    np.testing.assert_allclose(split.gradient, whole.gradient, rtol=1e-9, atol=1e-12)
    order = rng.permutation(size)
    shuffled = parse_case(reordered(case, order))
    again = evaluate(
        Objective(objective.config, shuffled.domains),
        shuffled.batch,
        shuffled.columns,
        constant_length=8,
    )
    assert again.loss == pytest.approx(whole.loss, rel=1e-6, abs=1e-9)
    mine = by_sample(whole.gradient, parsed.batch.token_counts)
    for place, gradient in enumerate(by_sample(again.gradient, shuffled.batch.token_counts)):
        np.testing.assert_allclose(gradient, mine[order[place]], rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("denominator", ["batch", "domain"])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_another_domain_changes_only_the_shared_denominator(name, denominator, seed):
    """The gradient of domain d0 alone, and with d1 in the batch: one factor apart, and not even
    that with a denominator per domain."""
    case = random_case(seed, 12)
    rows = [i for i, d in enumerate(case["domains"]) if d == "d0"]
    alone = reordered(case, np.array(rows))
    numbers = {g: i for i, g in enumerate(dict.fromkeys(alone["group_ids"]))}
    alone["group_ids"] = [numbers[g] for g in alone["group_ids"]]
    gradients = []
    for document in (alone, case):
        parsed = parse_case(document)
        overrides = [*SETTINGS.get(name, ()), f"denominator={denominator}"]
        config, own = load_objective(name, overrides, parsed.domains)
        if denominator == "batch":  # its denominator counts pairs: another factor
            config = config.model_copy(update={"preference_weight": 0.0})
        found = evaluate(
            Objective(config, parsed.domains, own), parsed.batch, parsed.columns, constant_length=8
        )
        parts = by_sample(found.gradient, parsed.batch.token_counts)
        here = [i for i, d in enumerate(document["domains"]) if d == "d0"]
        gradients.append(np.concatenate([parts[i] for i in here]))
    single, mixed = gradients
    assert np.abs(single).max() > 0
    biggest = np.abs(single).argmax()
    factor = mixed[biggest] / single[biggest]
    if denominator == "domain":
        assert factor == pytest.approx(1.0, rel=1e-9)
    np.testing.assert_allclose(mixed, single * factor, rtol=1e-9, atol=1e-12)


def test_a_global_scope_couples_domains():
    case = random_case(3, 6)
    config, _ = load_objective("lite_ppo", [], ("d0", "d1"))
    parsed = parse_case(case)
    found = {}
    for scope in ("domain", "global"):
        scoped = config.model_copy(update={"statistics_scope": scope})
        found[scope] = evaluate(
            Objective(scoped, parsed.domains), parsed.batch, parsed.columns
        ).gradient
    assert not torch.allclose(found["domain"], found["global"])


@pytest.mark.parametrize("name", PRESETS)
def test_settings_of_a_domain_hold_for_its_samples(name):
    """Two domains with their own values equal two evaluations with these values."""
    case = random_case(5, 6)
    parsed = parse_case(case)
    config, _ = load_objective(
        name, [*SETTINGS.get(name, ()), "denominator=domain"], parsed.domains
    )
    values = {"d0": "clip_high=0.05", "d1": "clip_high=0.5"}
    overrides = [f"domain.{d}.{text}" for d, text in values.items()]
    config, own = load_objective(
        name, [*SETTINGS.get(name, ()), "denominator=domain", *overrides], parsed.domains
    )
    mixed = evaluate(
        Objective(config, parsed.domains, own), parsed.batch, parsed.columns, constant_length=8
    ).gradient
    tokens = parsed.batch.to_tokens(parsed.batch.domains)
    for number, text in enumerate(values.values()):
        single, _ = load_objective(
            name, [*SETTINGS.get(name, ()), "denominator=domain", text], parsed.domains
        )
        found = evaluate(
            Objective(single, parsed.domains), parsed.batch, parsed.columns, constant_length=8
        ).gradient
        torch.testing.assert_close(mixed[tokens == number], found[tokens == number])


ALONE = {
    "logprobs": [[-1.0, -0.5], [-2.0], [-0.3, -0.2, -0.1], [-1.5, -1.0]],
    "old_logprobs": [[-1.1, -0.6], [-1.9], [-0.3, -0.3, -0.1], [-1.4, -1.2]],
    "ref_logprobs": [[-1.2, -0.6], [-1.8], [-0.4, -0.3, -0.1], [-1.4, -1.1]],
    "entropies": [[0.5, 0.2], [0.3], [0.1, 0.2, 0.6], [0.4, 0.4]],
    "rewards": [1.0, 0.0, 0.5, 1.0],
    "group_ids": ["p", "p", "q", "q"],
    "domains": ["a"] * 4,
}
SECOND = {
    "logprobs": [[-0.7] * 5, [-0.2] * 3],
    "old_logprobs": [[-0.9] * 5, [-0.2] * 3],
    "ref_logprobs": [[-0.8] * 5, [-0.1] * 3],
    "entropies": [[0.9] * 5, [0.7] * 3],
    "rewards": [0.0, 9.0],
    "group_ids": ["r", "r"],
    "domains": ["b"] * 2,
}


def num_tokens(rows: list[list[float]]) -> int:
    return sum(map(len, rows))


@pytest.mark.parametrize(
    ("preset", "counted"),
    [
        ("grpo", len),
        ("gspo", len),
        ("rloo", num_tokens),
        ("reinforce_pp_baseline", None),
        ("dapo", num_tokens),
        ("dr_grpo", len),
    ],
)
@pytest.mark.parametrize("denominator", ["batch", "domain"])
def test_a_second_domain_leaves_the_first_ones_gradient(preset, counted, denominator):
    """Its numerator always; the gradient itself where domains count for themselves."""
    flags = [
        f"objective.denominator={denominator}",
        "objective.kl=k3",
        "objective.kl_beta=0.1",
        "objective.entropy_weight=0.01",
        "objective.aggregation_length=8",
    ]
    both = {name: ALONE[name] + SECOND[name] for name in ALONE}
    alone = flat(evaluated(preset, flags, **ALONE)["grad_logprobs"])
    beside = flat(evaluated(preset, flags, **both)["grad_logprobs"])[: len(alone)]
    factor = 1.0
    if denominator == "batch":
        shares = [a / b for a, b in zip(alone, beside, strict=True) if abs(b) > 1e-12]
        factor = shares[0]
        if counted is not None:
            assert factor == pytest.approx(counted(both["logprobs"]) / counted(ALONE["logprobs"]))
    np.testing.assert_allclose(np.array(beside) * factor, alone, rtol=1e-6, atol=1e-12)
    assert max(map(abs, alone)) > 1e-3
