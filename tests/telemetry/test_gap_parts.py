"""The parts of the trainer-engine gap add up, each to its cause."""

from __future__ import annotations

import numpy as np
import pytest

from grpo_megatron.telemetry.gap import gap_page, split_gap, unlike_recorded

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


def gap_columns(**changed: list[float]) -> dict[str, np.ndarray]:
    """Three tokens, of which the last is not in the loss; the engine's routes explain the first."""
    columns = {
        "rollout": [-1.0, -2.0, -4.0],
        "live": [-1.5, -2.0, -3.0],
        "through_2": [-1.4, -2.0, -3.0],
        "through_10": [-1.0, -2.1, -3.0],
        "trained": [1.0, 1.0, 0.0],
    } | changed
    return {name: np.array(values) for name, values in columns.items()}


@pytest.mark.parametrize(
    ("recorded", "replayed", "nearest"),
    [
        (0.5, False, None),  # of the tokens in the loss
        (1.0, False, None),  # of all
        (0.7, False, None),
        (0.4997, False, None),
        (0.49, False, "0.5"),
        (1.01, False, "1"),
        (1e-6, False, "0.5"),
        (0.1, True, None),  # by the last layer's routes, which the trainer replayed
        (0.09, True, "0.1"),
    ],
)
def test_a_gap_that_is_not_the_recorded_one_is_told(recorded, replayed, nearest):
    told = unlike_recorded(gap_columns(), recorded, 1e-4, replayed=replayed)
    assert told == "" if nearest is None else told.endswith(f"and is {nearest} now")


@pytest.mark.parametrize("name", ["rollout", "live"])
def test_tokens_that_have_no_gap_are_left_out(name):
    """As in training, where their log-probs are infinite."""
    columns = gap_columns(**{name: [-np.inf, -2.0, -3.0]}, trained=[1.0, 1.0, 1.0])
    expected = {"rollout": 0.0, "live": 1.0}[name]
    assert unlike_recorded(columns, expected, 1e-5, replayed=False) == ""
    assert unlike_recorded(columns, expected + 0.1, 1e-5, replayed=False)


def test_the_margin_is_that_of_the_largest_log_prob():
    """Or of 1 nat, where all are smaller."""
    columns = gap_columns(rollout=[-50.0, -2.0, -4.0], live=[-50.0, -2.0, -4.0])
    assert unlike_recorded(columns, 4e-4, 1e-5, replayed=False) == ""
    assert unlike_recorded(columns, 6e-4, 1e-5, replayed=False)
    empty = {name: values[:0] for name, values in columns.items()}
    assert unlike_recorded(empty, 9e-6, 1e-5, replayed=False) == ""
