"""A batch that is trained several times (`batch.epochs`)."""

from __future__ import annotations

import numpy as np
import pytest

from tests.trainer.models import write_samples

pytestmark = pytest.mark.engine
CASES = "tests.trainer.epoch_ranks"
OBJECTIVE = {"preset": "grpo", "clip_low": 0.02, "clip_high": 0.02}
BIG = {"max_tokens_per_microbatch": 512}
NUM_UPDATES = 2


@pytest.fixture
def samples(tmp_path) -> str:
    return write_samples(tmp_path / "step_000001", num_updates=NUM_UPDATES, num_domains=2)


def same_tensors(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        np.testing.assert_allclose(found[name], tensor, rtol=0, atol=1e-6, err_msg=name)


def test_epochs_are_the_same_updates_again(world1, moe_model, samples):
    """As steps taken one by one: old log-probs from before the first, each with its own rate."""
    case = {"model": moe_model, "samples": samples, "layout": BIG}
    case |= {"epochs": 3, "objective": OBJECTIVE}
    expected = world1.run(f"{CASES}:train_one_by_one", **case)
    report = world1.run(f"{CASES}:train_epochs", **case)
    assert report["updates"] == len(report["losses"]) == 3 * NUM_UPDATES
    np.testing.assert_allclose(report["losses"], expected["losses"], rtol=1e-5, atol=1e-7)
    same_tensors(report["tensors"], expected["tensors"])
    assert len(set(expected["rates"])) == 3 * NUM_UPDATES
    assert report["metrics"]["optimizer/lr"] == pytest.approx(np.mean(expected["rates"]))
    # on policy but for one update, then not any more
    once = world1.run(f"{CASES}:train_epochs", **case | {"epochs": 1})
    np.testing.assert_allclose(report["losses"][:NUM_UPDATES], once["losses"], rtol=1e-6)
    assert report["metrics"]["ratio/max"] > once["metrics"]["ratio/max"]
    assert report["tokens"] == 3 * once["tokens"]
    assert report["metrics"]["batch/skipped_updates"] == 0


def test_one_update_of_several_epochs_keeps_its_old_log_probs(world1, moe_model, tmp_path):
    """Alone it would be on policy, and its own log-probs the old ones."""
    single = write_samples(tmp_path / "step_000001", num_updates=1, num_domains=2)
    case = {"model": moe_model, "samples": single, "layout": BIG, "objective": OBJECTIVE}
    twice = world1.run(f"{CASES}:train_epochs", **case, epochs=2)
    expected = world1.run(f"{CASES}:train_one_by_one", **case, epochs=2)
    np.testing.assert_allclose(twice["losses"], expected["losses"], rtol=1e-5, atol=1e-7)
    assert twice["metrics"]["clip/region_fraction"] > 0
    alone = world1.run(f"{CASES}:train_epochs", **case, epochs=1)
    assert alone["metrics"]["clip/region_fraction"] == 0


def test_every_epoch_has_its_masks_and_a_replay_follows_them(world1, world2, moe_model, samples):
    """At another layout; then without those of the second epoch, which hold nobody there."""
    case = {"model": moe_model, "samples": samples, "epochs": 2, "objective": OBJECTIVE}
    report = world1.run(f"{CASES}:train_epochs", **case, layout=BIG)
    masked = report["masked"]
    assert set(masked) == {"low", "high", "low@epoch_1", "high@epoch_1"}
    assert masked["high@epoch_1"] + masked["low@epoch_1"] > masked["high"] + masked["low"] > 0

    again = world2.run(
        f"{CASES}:train_epochs", **case, layout=BIG | {"tensor_parallel_size": 2}, replayed=True
    )
    np.testing.assert_allclose(again["losses"], report["losses"], rtol=1e-4, atol=1e-6)
    assert again["masked"] == masked
    assert again["metrics"]["replay/decisions_changed"] < 0.01
    assert again["metrics"]["replay/decisions_recorded"] == 1.0

    freed = world1.run(f"{CASES}:train_epochs", **case, layout=BIG, replayed=True, unmask_epoch=1)
    np.testing.assert_allclose(freed["losses"][:2], report["losses"][:2], rtol=1e-6)
    assert abs(freed["losses"][2] - report["losses"][2]) > 0.1
    assert freed["metrics"]["replay/decisions_changed"] > 0.1


def test_the_first_stage_of_a_pipeline_leaves_no_masks(world2, moe_model, samples):
    layout = BIG | {"pipeline_parallel_size": 2}
    case = {"model": moe_model, "samples": samples, "epochs": 2, "objective": OBJECTIVE}
    report = world2.run(f"{CASES}:train_epochs", **case, layout=layout)
    assert sum(report["masked"].values()) > 0
