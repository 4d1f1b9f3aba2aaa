"""Every objective through the real trainer: the layout does not change what it computes."""

from __future__ import annotations

import numpy as np
import pytest

from grpo_megatron.config.objective import OF_TURNS, PRESETS, ObjectiveConfig
from tests.tiers import rest_in_matrix
from tests.trainer.models import MOE, write_model, write_samples
from tests.trainer.test_layout_parity import APART, OF_PACKING, TOLERANCE

pytestmark = pytest.mark.engine
# few layers and few micro-batches: this is about objectives
SHALLOW = MOE | {"num_hidden_layers": 2}
BIG = {"max_tokens_per_microbatch": 512}
LAYOUTS = {
    "tp2_sp": {"tensor_parallel_size": 2},
    "pp2": {"pipeline_parallel_size": 2},
    "ep2": {"expert_parallel_size": 2},
    "cp2": {"context_parallel_size": 2},
    "small_microbatches": None,
}
EXTRA = {  # what the presets leave at zero, and choices that none of them makes
    "terms": {
        "preset": "grpo",
        "entropy_weight": 0.01,
        "kl": "k2",
        "kl_beta": 0.1,
        "llds_weight": 0.1,
        "preference_weight": 0.3,
    },
    "sequence_weights": {
        "preset": "gspo",
        "mismatch": "mis_sequence",
        "mismatch_max": 1e9,
        "denominator": "domain",
    },
    "adaptive": {"preset": "gfpo", "subset": "adaptive"},
    "preference": {"preset": "dr_grpo", "preference_weight": 0.3},  # without a KL
    "positives": {
        "preset": "grpo",
        "advantage": "batch",
        "advantage_std": "none",
        "advantage_clip": 0.4,
        "positive_nll_weight": 0.1,
        "rollout_drift_weight": 1e-3,
        "kl": "is_k2",
        "kl_beta": 0.1,
    },
    "trust_region": {
        "preset": "dppo",
        "clip": "dppo_kl",
        "clip_high": 1e-3,
        "proximal": "recompute",
        "mismatch": "kpop",
        "kpop_threshold": 10.0,
    },
    "floor": {"preset": "grpo", "mismatch": "tis", "mismatch_floor": 0.5},
    "token_baseline": {"preset": "otb", "mismatch": "tis", "otb_zero_tail": True},
}
NAMES = [*(name for name in PRESETS if name not in OF_TURNS), *EXTRA]
"""Those of turns are in `test_episode_parity`: the samples of this file have one."""
CASE = "tests.trainer.trainer_ranks:train_objectives"


def objective(name: str) -> dict:
    settings = EXTRA.get(name, {"preset": name})
    narrow = ("gspo", "luspo", "moe")
    wide = {"clip_low": 0.2, "clip_high": 0.2} if name.startswith(narrow) else {}
    beta = {"kl_beta": 0.05} if settings["preset"] in ("deepseek_v3_2", "moe_default") else {}
    trust = {"trm_max": 8.0, "trm_mean": 20.0} if name == "trm" else {}
    limit = {"conflict_entropy_limit": 100.0}  # the entropy of an untrained model is high
    return {**wide, **beta, **trust, **limit, "subset_size": 3, **settings}


SENSITIVE = ("gtpo_entropy", "grpo_s", "high_entropy")
"""Entropies of an untrained model are nearly equal: standardising them amplifies rounding,
advantages around 0 change sign, and which are the highest is chance. They are compared on a model
whose entropies differ."""
AMPLIFIED = ("vespo",)
"""Its weight of a sample is a power of the product of a sequence's ratios, here to log-probs that
have nothing to do with the policy's: rounding of every token adds up over the sequence and is
multiplied by the power. On one rank, another split into micro-batches alone moves the gradient norm
by 2.9e-6, and GSPO's by 1e-7."""
OBJECTIVES = {name: objective(name) for name in NAMES}


def first_with_each_choice() -> list[str]:
    """Names that together have every choice of every setting that any name has, and every number
    that any of them sets: the others only combine these."""
    chosen = []
    covered: set[tuple[str, str]] = set()
    for name in [*SENSITIVE, *EXTRA, *NAMES]:
        config = ObjectiveConfig(**OBJECTIVES[name]).model_dump(exclude={"preset"})
        default = ObjectiveConfig().model_dump()
        choices = set()
        for field, value in config.items():
            is_choice = isinstance(value, str | bool) or value is None
            if is_choice:
                choices.add((field, str(value)))
            elif value != default[field]:
                choices.add((field, "set"))
        if choices - covered:
            chosen.append(name)
            covered |= choices
    return chosen


GATE = first_with_each_choice()
ROBUST = [name for name in NAMES if name not in SENSITIVE]


@pytest.fixture(scope="module")
def two_updates(tmp_path_factory):
    return write_samples(
        tmp_path_factory.mktemp("store") / "step_000001", num_updates=2, num_domains=2
    )


@pytest.fixture(scope="module")
def wanted(request) -> set[str]:
    """Names of which a test of this session asks for the numbers."""
    names = set(EXTRA)
    for item in request.session.items:
        if item.path == request.path and hasattr(item, "callspec"):
            names.add(item.callspec.params["name"])
    return names


@pytest.fixture(scope="module")
def train(wanted, tmp_path_factory, two_updates):
    models = tmp_path_factory.mktemp("models")
    plain = write_model(models / "plain", SHALLOW, 1)
    sharp = write_model(models / "sharp", SHALLOW | {"initializer_range": 0.25}, 31)

    def run(world, layout):
        found = {}
        for model, names in ((sharp, SENSITIVE), (plain, ROBUST)):
            objectives = {name: OBJECTIVES[name] for name in names if name in wanted}
            found |= world.run(
                CASE, model=model, samples=two_updates, layout=layout, objectives=objectives
            )
        return found

    return run


@pytest.fixture(scope="module")
def reference(world1, train):
    """Every sample computed alone; the layouts compute prompts once."""
    return train(world1, {**BIG, **APART})


@pytest.fixture(
    scope="module",
    params=[
        "ep2",  # with two data-parallel ranks, over which statistics and denominators are reduced
        # tensor ranks share log-probs, and one stage has them: test_layout_parity has those
        pytest.param("pp2", marks=pytest.mark.matrix),
        pytest.param("cp2", marks=pytest.mark.matrix),
        pytest.param("tp2_sp", marks=pytest.mark.matrix),
        pytest.param("small_microbatches", marks=pytest.mark.matrix),
    ],
)
def found(request, world1, world2, train):
    layout = LAYOUTS[request.param]
    return train(world2 if layout else world1, {**BIG, **layout} if layout else {})


@pytest.mark.parametrize("name", rest_in_matrix(NAMES, GATE))
def test_layouts_agree(reference, found, name):
    expected, got = reference[name], found[name]
    assert len(expected["losses"]) == 2 and min(expected["grad_norms"]) > 0
    # losses are sums of terms of about 1 that cancel
    np.testing.assert_allclose(
        got["losses"], expected["losses"], rtol=TOLERANCE, atol=TOLERANCE / 2
    )
    tolerance = TOLERANCE
    if name in SENSITIVE or name in AMPLIFIED:
        tolerance = 10 * TOLERANCE
    np.testing.assert_allclose(got["grad_norms"], expected["grad_norms"], rtol=tolerance)
    for key, value in expected["metrics"].items():
        if name not in SENSITIVE and key not in OF_PACKING:
            np.testing.assert_allclose(
                got["metrics"][key], value, rtol=1e-3, atol=1e-5, err_msg=key
            )
    assert got["state"].keys() == expected["state"].keys()
    for key, value in expected["state"].items():
        np.testing.assert_allclose(got["state"][key], value, rtol=1e-4)


def test_the_adaptive_subset_reports_what_it_saw(reference):
    for key in ("success@even", "success@odd"):
        counts = [count for _, count in reference["adaptive"]["state"][key]]
        assert sum(counts) > 0


def test_a_preference_without_kl_is_held_against_the_reference(reference):
    """The first update starts at the reference, where the margin is 0; the second does not."""
    metrics = reference["preference"]["metrics"]
    assert metrics["reference/k3"] > 0


PASSES = {
    "on policy": ({"preset": "grpo"}, {}, 0),
    "entropies": ({"preset": "grpo_s"}, {}, 1),
    "squares": ({"preset": "grpo", "advantage": "otb", "advantage_std": "none"}, {}, 1),
    "likely answers": ({"preset": "xrpo"}, {}, 1),
    "uncertain tokens": ({"preset": "grpo", "top_entropy_share": 0.5}, {}, 1),
    "a step's size": ({"preset": "grpo", "ess_scaling": "linear"}, {}, 1),
    "a KL that weighs": ({"preset": "grpo", "kl": "k3", "kl_beta": 0.1}, {}, 1),
    "a KL that is measured": ({"preset": "grpo", "kl": "k3", "kl_beta": 0.0}, {}, 0),
    "a KL in the reward": ({"preset": "grpo", "kl": "reward_k1", "kl_beta": 0.1}, {}, 2),
    "recomputed routes": ({"preset": "grpo"}, {"replay": "r2"}, 0),
    "routes that are kept": (
        {"preset": "grpo"},
        {"replay": "r2", "keep_loss": "kl", "keep_weight": 0.1},
        1,
    ),
}


def test_planned_passes_are_those_of_a_step(world1, moe_model, samples):
    cases = {name: (objective, routing) for name, (objective, routing, _) in PASSES.items()}
    found = world1.run(
        "tests.trainer.trainer_ranks:count_passes",
        model=moe_model,
        samples=samples,
        num_updates=1,
        cases=cases,
    )
    assert found == {name: (count, count) for name, (_, _, count) in PASSES.items()}


def test_planned_passes_of_several_updates(world1, moe_model, three_updates):
    cases = {
        "old policy": ({"preset": "grpo"}, {}),
        "none": ({"preset": "grpo", "proximal": "interpolated"}, {}),
    }
    found = world1.run(
        "tests.trainer.trainer_ranks:count_passes",
        model=moe_model,
        samples=three_updates,
        num_updates=3,
        cases=cases,
    )
    assert found == {"old policy": (1, 1), "none": (0, 0)}
