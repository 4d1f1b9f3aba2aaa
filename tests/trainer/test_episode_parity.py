"""Episodes of several turns and sequences: packed, with shared beginnings and at every layout they
have the loss and the gradients of a plain loop over their sequences.

These run on gloo with CPU kernels: they say nothing about NCCL, CUDA streams or fused kernels.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from grpo_megatron.batching.drift_file import read_drift
from grpo_megatron.batching.mask_file import read_masks
from grpo_megatron.batching.store import SampleTable
from grpo_megatron.types import Completion, RolloutGroup, Turn, VersionSpan
from tests.tiers import rest_in_matrix
from tests.trainer.episode_samples import (
    DOMAINS,
    by_hf_names,
    plain_loop,
    random_groups,
    write_groups,
)
from tests.trainer.models import INTERLEAVED, MOE, write_model
from tests.trainer.test_layout_parity import (
    APART,
    LAYOUTS_2,
    LAYOUTS_4,
    LOSS_NOISE,
    TRAIN,
    assert_same,
)

pytestmark = pytest.mark.engine

OF_OBJECTIVES = "tests.trainer.trainer_ranks:train_objectives"
TOLERANCE = 1e-5
ALONE = {**APART, "max_tokens_per_microbatch": 100}
"""With room for all sequences of an episode."""
AGGREGATIONS = ("token_mean", "seq_mean_token_mean")


@pytest.fixture(scope="session")
def episodes(tmp_path_factory) -> str:
    """Of one sequence each."""
    directory = tmp_path_factory.mktemp("episodes")
    return write_groups(directory / "step_000001", random_groups(1, forks=False))


@pytest.fixture(scope="session")
def forked(tmp_path_factory) -> str:
    """Two of three have two or three sequences."""
    directory = tmp_path_factory.mktemp("forked")
    return write_groups(directory / "step_000001", random_groups(2, forks=True))


@pytest.fixture(scope="session")
def spoilt(tmp_path_factory) -> str:
    """As `forked`; about a third of the turns are spoilt."""
    directory = tmp_path_factory.mktemp("spoilt")
    return write_groups(directory / "step_000001", random_groups(5, forks=True, spoilt=True))


@pytest.fixture(scope="session")
def with_states(tmp_path_factory) -> str:
    """As `forked`, with states and rewards of turns, older than the weights that train them."""
    directory = tmp_path_factory.mktemp("states")
    groups = random_groups(6, forks=True, states=True)
    return write_groups(directory / "step_000001", groups, stale=True, num_updates=2)


def gradients(world, model: str, samples: str, layout: dict, **objective) -> dict:
    return world.run(
        TRAIN, model=model, samples=samples, layout=layout, gradients=True, objective=objective
    )


def assert_as_plain_loop(found: dict, model: str, samples: str, aggregation: str) -> None:
    """Loss, pre-clip norm and every gradient; losses are sums of terms of about 1 that cancel."""
    loss, norm, of_parameters = plain_loop(model, SampleTable(Path(samples)), aggregation)
    expected = by_hf_names(of_parameters, list(found["tensors"]))
    np.testing.assert_allclose(found["losses"], [loss], rtol=TOLERANCE, atol=LOSS_NOISE)
    np.testing.assert_allclose(found["norms"], [norm], rtol=TOLERANCE)
    for name, tensor in expected.items():
        worst = np.abs(found["tensors"][name] - tensor).max()
        assert worst <= TOLERANCE * max(np.abs(tensor).max(), 1e-3), f"{name}: {worst}"


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("kind", ["dense", "moe"])
@pytest.mark.parametrize("samples", ["episodes", "forked"])
def test_one_rank_computes_what_a_plain_loop_does(request, world1, samples, kind, aggregation):
    model = request.getfixturevalue(f"{kind}_model")
    directory = request.getfixturevalue(samples)
    found = gradients(world1, model, directory, {}, aggregation=aggregation)
    assert found["computed_fraction"] < 0.95
    assert_as_plain_loop(found, model, directory, aggregation)


@pytest.mark.parametrize("samples", ["episodes", "forked"])
def test_so_it_does_without_sharing(request, world1, moe_model, samples):
    directory = request.getfixturevalue(samples)
    found = gradients(world1, moe_model, directory, ALONE, aggregation="token_mean")
    assert found["computed_fraction"] == 1
    assert_as_plain_loop(found, moe_model, directory, "token_mean")


@pytest.mark.parametrize("layout", ["dp2", "tp2_sp", "pp2", "ep2", "cp2"])
@pytest.mark.parametrize("samples", ["episodes", "forked"])
def test_two_ranks_do_too(request, world2, moe_model, samples, layout):
    directory = request.getfixturevalue(samples)
    settings = LAYOUTS_2[layout]
    found = gradients(world2, moe_model, directory, settings, aggregation="token_mean")
    assert found["computed_fraction"] < 0.95
    assert_as_plain_loop(found, moe_model, directory, "token_mean")


@pytest.mark.parametrize("layout", rest_in_matrix(("tp2_sp", "cp2"), ("tp2_sp",)))
def test_spoilt_turns_have_no_gradient(world1, world2, moe_model, spoilt, layout):
    for world, settings in ((world1, {}), (world2, LAYOUTS_2[layout])):
        found = gradients(world, moe_model, spoilt, settings, aggregation="token_mean")
        assert_as_plain_loop(found, moe_model, spoilt, "token_mean")


def with_old_turns(sequence: Completion) -> Completion:
    """Versions 2 for spoilt turns, which are sound then, and 5 for the rest."""
    versions = np.full(sequence.num_tokens, 5)
    for turn in sequence.turns:
        if turn.spoilt:
            versions[turn.start : turn.end] = 2
    spans = [VersionSpan(int(version), i, i + 1) for i, version in enumerate(versions)]
    turns = tuple(replace(turn, spoilt=False) for turn in sequence.turns)
    earlier = tuple(with_old_turns(one) for one in sequence.earlier)
    return replace(sequence, versions=tuple(spans), turns=turns, earlier=earlier)


@pytest.mark.parametrize("layout", rest_in_matrix(("tp2_sp", "cp2"), ("cp2",)))
def test_tokens_that_are_too_old_have_no_gradient(
    world1, world2, moe_model, spoilt, tmp_path, layout
):
    """As if their turns were spoilt: the same store, in which versions say it."""
    groups = []
    for group in random_groups(5, forks=True, spoilt=True):
        old = tuple(with_old_turns(one) for one in group.completions)
        groups.append(replace(group, completions=old))
    directory = write_groups(tmp_path / "step_000001", groups, oldest_trained=4)
    for world, settings in ((world1, {}), (world2, LAYOUTS_2[layout])):
        found = gradients(world, moe_model, directory, settings, aggregation="token_mean")
        assert_as_plain_loop(found, moe_model, spoilt, "token_mean")


OBJECTIVES = {
    "gagpo": {"preset": "gagpo"},
    "gigpo": {"preset": "gigpo"},
    "gigpo_turn_geo": {"preset": "gigpo", "ratio": "turn_geo", "aggregation": "token_mean"},
    "gspo": {"preset": "gspo"},
    "deepseekmath_process": {"preset": "deepseekmath_process"},
    "entropies": {"preset": "gtpo_entropy"},
}
"""What looks at turns, at whole episodes, and at columns of all policy tokens."""


@pytest.fixture(scope="session")
def objectives_apart(world1, moe_model, with_states):
    return world1.run(
        OF_OBJECTIVES, model=moe_model, samples=with_states, layout=ALONE, objectives=OBJECTIVES
    )


@pytest.mark.parametrize(
    "layout",
    [
        "ep2",  # with two data-parallel ranks
        pytest.param("cp2", marks=pytest.mark.matrix),
        pytest.param("dp2", marks=pytest.mark.matrix),
        pytest.param("tp2_sp", marks=pytest.mark.matrix),
        pytest.param("pp2", marks=pytest.mark.matrix),
    ],
)
def test_objectives_of_turns_at_every_layout(
    world2, moe_model, with_states, objectives_apart, layout
):
    found = world2.run(
        OF_OBJECTIVES,
        model=moe_model,
        samples=with_states,
        layout=LAYOUTS_2[layout],
        objectives=OBJECTIVES,
    )
    for name, expected in objectives_apart.items():
        assert max(expected["grad_norms"]) > 1e-3, name
        for values, absolute in (("losses", TOLERANCE / 2), ("grad_norms", 0.0)):
            np.testing.assert_allclose(
                found[name][values], expected[values], rtol=TOLERANCE, atol=absolute, err_msg=name
            )


@pytest.mark.parametrize("layout", ["pp2_ep2", "cp2_tp2"])
def test_four_ranks_do_too(world4, moe_model, forked, layout):
    found = gradients(world4, moe_model, forked, LAYOUTS_4[layout], aggregation="token_mean")
    assert_as_plain_loop(found, moe_model, forked, "token_mean")


def test_sequences_share_more_than_their_prompts(world1, dense_model, forked):
    """What is computed is less than with every prompt once and every response alone."""
    table = SampleTable(Path(forked))
    alone = table.prompt_lengths + table.completion_lengths
    prompts = {table.prompt_ids(row).tobytes(): row for row in range(len(table))}
    with_prompts = sum(table.prompt_lengths[row] for row in prompts.values())
    with_prompts += table.completion_lengths.sum()
    layout = {"max_tokens_per_microbatch": 100_000}
    found = gradients(world1, dense_model, forked, layout)
    assert found["num_microbatches"] == 1
    assert found["computed_fraction"] < 0.95 * with_prompts / alone.sum()


def test_episodes_of_one_turn_are_completions(world1, moe_model, tmp_path):
    """To the last bit."""
    found = []
    for with_turns in (False, True):
        groups = []
        for group in random_groups(3, forks=False):
            completions = []
            for one in group.completions:
                rng = np.random.default_rng(one.num_tokens)
                logprobs = -rng.random(one.num_tokens, np.float32)
                turns = (Turn(0, one.num_tokens, 1.0, "s"),) if with_turns else ()
                completions.append(replace(one, logprobs=logprobs, turns=turns))
            groups.append(RolloutGroup(group.prompt, tuple(completions), 0))
        samples = write_groups(tmp_path / f"step_{int(with_turns):06d}", groups)
        found.append(gradients(world1, moe_model, samples, {}))
    plain, turns = found
    assert plain["losses"] == turns["losses"] and plain["norms"] == turns["norms"]
    for name, tensor in plain["tensors"].items():
        np.testing.assert_array_equal(turns["tensors"][name], tensor)


@pytest.mark.parametrize("replay", ["r2", "r3"])
def test_replayed_experts_of_shared_sequences(world1, routed, tmp_path, replay):
    """Shared or apart: the engine's experts are those of the same tokens."""
    model, _ = routed
    samples = write_groups(
        tmp_path / "step_000001", random_groups(4, forks=True, hf=INTERLEAVED), hf=INTERLEAVED
    )
    routing = {"replay": replay, "keep_loss": "cross_entropy", "balance_weight": 0.01}
    arguments = {"model": model, "samples": samples, "gradients": True, "routing": routing}
    apart = world1.run(TRAIN, layout=ALONE, **arguments)
    shared = world1.run(TRAIN, layout={}, **arguments)
    assert shared["split_prompts"] == 0 and shared["computed_fraction"] < 0.95
    assert_same(shared, apart)


def test_other_experts_on_the_same_tokens_keep_sequences_apart(world1, routed, tmp_path):
    """One layer of one token is routed otherwise in the later sequences."""
    model, _ = routed
    groups = []
    for group in random_groups(4, forks=True, hf=INTERLEAVED):
        completions = []
        for one in group.completions:
            if one.earlier:
                routes = one.routes.copy()
                routes[0, 1] = (routes[0, 1] + 1) % INTERLEAVED["num_experts"]
                one = replace(one, routes=routes)
            completions.append(one)
        groups.append(RolloutGroup(group.prompt, tuple(completions), 0))
    samples = write_groups(tmp_path / "step_000001", groups, hf=INTERLEAVED)
    arguments = {"model": model, "samples": samples, "gradients": True, "routing": {"replay": "r3"}}
    apart = world1.run(TRAIN, layout=ALONE, **arguments)
    shared = world1.run(TRAIN, layout={}, **arguments)
    assert shared["split_prompts"] > 0
    assert_same(shared, apart)


@pytest.mark.parametrize("layout", [{}, LAYOUTS_2["dp2"]], ids=["one", "dp2"])
def test_decisions_and_drift_are_of_policy_tokens(world1, world2, moe_model, layout, tmp_path):
    """What was clipped is clipped again, sequence by sequence."""
    groups = random_groups(7, forks=True)
    samples = write_groups(tmp_path / "step_000001", groups, stale=True, num_updates=2)
    world = world2 if layout else world1
    first, again = world.run(
        "tests.trainer.trainer_ranks:train_and_replay",
        model=moe_model,
        samples=samples,
        layout=layout,
    )
    assert again["metrics"]["replay/decisions_changed"] == 0
    np.testing.assert_allclose(again["losses"], first["losses"], rtol=1e-6, atol=1e-8)
    table = SampleTable(Path(samples))
    decisions = read_masks(table.directory, table.policy_lengths)
    assert any(mask.any() for mask in decisions.values())
    assert {len(mask) for mask in decisions.values()} == {table.policy_lengths.sum()}
    drift = read_drift(table.directory, table.policy_lengths)
    assert list(drift) == list(range(len(table)))
    assert [len(one.before) for one in drift.values()] == table.policy_lengths.tolist()


@pytest.mark.parametrize("mode", [pytest.param("sampled", marks=pytest.mark.matrix), "full"])
def test_teachers_teach_policy_tokens(world1, world2, moe_model, forked, tmp_path, mode):
    """One for each domain; apart on one rank, shared at other layouts."""
    teachers = []
    for number, domain in enumerate(DOMAINS):
        path = write_model(tmp_path / domain, MOE, 20 + number)
        teachers.append({"path": path, "domains": [domain]})
    arguments = {
        "model": moe_model,
        "samples": forked,
        "distillation": {"teachers": teachers, "mode": mode},
    }
    distil = "tests.trainer.trainer_ranks:distil"
    expected = world1.run(distil, layout=ALONE, **arguments)
    assert expected["last_kl"] > 0.1
    for layout in ("tp2_sp", "cp2"):
        assert_same(world2.run(distil, layout=LAYOUTS_2[layout], **arguments), expected)
