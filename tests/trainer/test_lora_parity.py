"""Adapters compute, learn and merge the same at every layout."""

from __future__ import annotations

import numpy as np
import pytest

from tests.trainer.test_layout_parity import APART, LAYOUTS_2, LAYOUTS_4, assert_same

TRAIN = "tests.trainer.lora_ranks:train_adapters"
MERGE = "tests.trainer.lora_ranks:merged_logprobs"
EACH = {"rank": 3}
KINDS = {
    "each": EACH,
    "shared": {"rank": 3, "experts": "shared"},
    "dora": {"rank": 3, "dora": True},
}
GATE = ("ep2",)


def in_gate(names) -> list:
    """Mark what is not selected for `make test` as of the tier `matrix`."""
    marked = []
    for name in names:
        marks = [] if name in GATE else [pytest.mark.matrix]
        marked.append(pytest.param(name, marks=marks))
    return marked


@pytest.fixture(scope="module")
def expected(world1, moe_model, samples):
    """Of one rank, by kind."""
    found = {}

    def of(kind: str) -> dict:
        if kind not in found:
            found[kind] = world1.run(
                TRAIN,
                model=moe_model,
                samples=samples,
                layout=APART,
                lora=KINDS[kind],
                gradients=True,
            )
        return found[kind]

    return of


@pytest.mark.parametrize("layout", in_gate(LAYOUTS_2))
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_two_ranks_equal_one(world2, expected, moe_model, samples, layout, kind):
    found = world2.run(
        TRAIN,
        model=moe_model,
        samples=samples,
        layout=LAYOUTS_2[layout],
        lora=KINDS[kind],
        gradients=True,
    )
    assert_same(found, expected(kind))
    has_magnitudes = any("lora_magnitude_vector" in name for name in found["tensors"])
    assert has_magnitudes == (kind == "dora")


@pytest.mark.matrix
@pytest.mark.parametrize("layout", LAYOUTS_4)
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_four_ranks_equal_one(world4, expected, moe_model, samples, layout, kind):
    found = world4.run(
        TRAIN,
        model=moe_model,
        samples=samples,
        layout=LAYOUTS_4[layout],
        lora=KINDS[kind],
        gradients=True,
    )
    assert_same(found, expected(kind))


@pytest.mark.parametrize("kind", ["each", "dora"])
def test_adapters_switched_off_and_merged(world1, moe_model, samples, kind):
    """Begun, they change nothing, to the bit."""
    found = world1.run(MERGE, model=moe_model, samples=samples, layout={}, lora=KINDS[kind])
    for fresh, adapted, off, merged in zip(
        found["fresh"], found["adapted"], found["off"], found["merged"], strict=True
    ):
        np.testing.assert_array_equal(fresh, off)
        assert np.abs(adapted - off).max() > 0.01
        np.testing.assert_allclose(merged, adapted, atol=2e-5)


@pytest.mark.parametrize("layout", in_gate(["ep2", "tp2_sp", "tp2_etp1"]))
def test_merged_weights_are_the_papers(world2, moe_model, layout):
    """arXiv:2402.09353, formula (5): the magnitude times the rows of `W + scale B A`, normed."""
    found = world2.run(
        "tests.trainer.lora_ranks:merged_weights",
        model=moe_model,
        layout=LAYOUTS_2[layout],
        lora={"rank": 3, "alpha": 5, "dora": True},
    )
    num_adapted = 0
    for name, weight in found["base"].items():
        module = name.removesuffix(".weight")
        a = found["adapters"].get(f"{module}.lora_A.weight")
        expected = weight
        if a is not None:
            num_adapted += 1
            b = found["adapters"][f"{module}.lora_B.weight"]
            magnitude = found["adapters"][f"{module}.lora_magnitude_vector"]
            adapted = weight + 5 / 3 * b @ a
            norms = np.linalg.norm(adapted, axis=1)
            assert np.abs(magnitude / norms - 1).max() > 0.05
            expected = magnitude[:, None] * adapted / norms[:, None]
        np.testing.assert_allclose(found["merged"][name], expected, atol=1e-6, err_msg=name)
    assert num_adapted > 4 * 7


@pytest.mark.parametrize("layout", in_gate(["tp2_sp", "pp2"]))
@pytest.mark.parametrize("dora", [False, True])
def test_dense_models(world1, world2, dense_model, samples, layout, dora):
    """Only some of q, k and v have an adapter."""
    lora = {"rank": 3, "targets": ["q_proj", "v_proj", "mlp"], "rank_stabilised": True}
    lora["dora"] = dora
    arguments = {"model": dense_model, "samples": samples, "lora": lora, "gradients": True}
    expected = world1.run(TRAIN, layout=APART, **arguments)
    found = world2.run(TRAIN, layout=LAYOUTS_2[layout], **arguments)
    assert_same(found, expected)
    assert not any("k_proj" in name for name in found["tensors"])


@pytest.mark.matrix
@pytest.mark.parametrize("layout", ["dp2", "ep2", "pp2", "tp2_sp"])
def test_replayed_routes(world1, world2, routed, layout):
    """Adapters beside the experts that the engine chose, in dense and in MoE layers."""
    model, samples = routed
    arguments = {"model": model, "samples": samples, "lora": EACH, "replay": "r3"}
    expected = world1.run(TRAIN, layout=APART, gradients=True, **arguments)
    found = world2.run(TRAIN, layout=LAYOUTS_2[layout], gradients=True, **arguments)
    assert_same(found, expected)
