"""The parts of the trainer-engine gap add up, each to its cause."""

from __future__ import annotations

import numpy as np
import pytest

from grpo_megatron.telemetry.gap import gap_page, split_gap

LENGTHS = np.array([4, 1, 7])


@pytest.fixture
def columns() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    names = ("live", "unmasked", "through_1", "through_3", "rollout")
    return {n: rng.normal(size=LENGTHS.sum()) for n in names} | {"flipped": np.ones((4, 2))}


def test_parts_add_up(columns):
    other, older = ({n: v + d for n, v in columns.items()} for d in (0.1, 0.3))
    gap = split_gap(columns, other, older, LENGTHS)
    assert list(gap.parts) == ["sampling mask", "routing", "precision", "staleness", "rest"]
    assert gap.residual < 1e-12
    np.testing.assert_allclose(gap.total, columns["rollout"] - columns["unmasked"])
    np.testing.assert_allclose(gap.parts["precision"], 0.1)
    np.testing.assert_allclose(gap.parts["staleness"], 0.2)
    np.testing.assert_allclose(sum(gap.by_layer.values()), gap.parts["routing"])


def test_positions_restart_with_every_sample(columns):
    gap = split_gap(columns, None, None, LENGTHS)
    assert gap.position.tolist() == [0, 1, 2, 3, 0, 0, 1, 2, 3, 4, 5, 6]
    assert all(len(v) == 16 for v in gap.by_position().values())


@pytest.mark.parametrize("without", [(), ("through_1", "through_3", "flipped"), ("unmasked",)])
def test_pages_of_less(columns, without):
    kept = {n: v for n, v in columns.items() if n not in without}
    gap = split_gap(kept, None, None, LENGTHS)
    page = gap_page("t <b>", gap, {"routing/rollout_slot_flip_rate/layer_1": 0.5}, ["a & b"])
    assert "<b>" not in page and "a &amp; b" in page
    assert ("Experts" in page) == ("flipped" in kept)
    assert "nan" not in page.replace('nan"', "")


def test_no_tokens():
    empty = {n: np.empty(0) for n in ("live", "rollout")}
    gap = split_gap(empty, None, None, np.array([], int))
    assert gap.table() == [] and gap.residual == 0
    assert "</html>" in gap_page("none", gap, {}, [])
