"""A run whose engine routes otherwise: what `mismatch` and `replay` say of its recorded steps."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from grpo_megatron.cli.main import main
from tests import engine_faults
from tests.e2e import runs

pytestmark = pytest.mark.engine

ONE_RANK = ("trainer.num_ranks=1", "trainer.expert_parallel_size=1")
LAYOUTS = [
    pytest.param(
        (*ONE_RANK, "trainer.max_tokens_per_microbatch=128"),
        id="one_rank",
        marks=pytest.mark.matrix,
    ),
    pytest.param(
        ("trainer.tensor_parallel_size=2", "trainer.expert_parallel_size=1"),
        id="tp2_sp",
        marks=pytest.mark.matrix,
    ),
    pytest.param(
        (
            "trainer.pipeline_parallel_size=2",
            "trainer.expert_parallel_size=1",
            "trainer.recompute=full",
        ),
        id="pp2_recompute",
        marks=pytest.mark.matrix,
    ),
    pytest.param(
        ("trainer.context_parallel_size=2", "trainer.expert_parallel_size=2"),
        id="cp2_ep2",
        marks=pytest.mark.matrix,
    ),
    pytest.param(("trainer.share_prefixes=false",), id="apart", marks=pytest.mark.matrix),
]


@pytest.fixture(scope="module")
def noisy(tmp_path_factory) -> Path:
    """Router weights of the engine alone are wrong; routes are replayed; two updates a step."""
    root = tmp_path_factory.mktemp("runs")
    done = runs.command(
        "train",
        runs.RECIPE,
        f"runs_dir={root}",
        "name=noisy",
        "num_steps=4",
        "routing.replay=r3",
        "routing.on_missing=fail",
        "publish.canary=false",
        "batch.updates_per_rollout=2",
        environment=engine_faults.environment(runs.FOLDER, noise="mlp.gate:0.02"),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return root / "noisy"


def test_the_routing_part_of_the_gap(noisy):
    """The gap is large, most of it is routing, and the parts add up."""
    done = runs.command("mismatch", f"{noisy}@2")
    assert done.returncode == 0, done.stdout + done.stderr
    size = {
        m[1]: float(m[2])
        for m in re.finditer(r"^  (routing|rest|total) +\S+ +(\S+) +\S+$", done.stdout, re.M)
    }
    assert size["total"] > 1e-3
    assert size["routing"] > size["rest"]
    assert float(re.search(r"within (\S+)$", done.stdout, re.M)[1]) <= 1e-6
    layers = re.findall(r"routing, layer (\d+) .* elsewhere (\S+)%", done.stdout)
    assert [layer for layer, _ in layers] == ["0", "1", "2", "3"]
    assert all(float(rate) > 0.1 for _, rate in layers)
    page = (noisy / "mismatch-2.html").read_text()
    assert "<script" not in page and "http" not in page
    assert page.count('class="map"') == 3
    assert runs.no_survivors(noisy)


def test_metrics_count_the_flips(noisy):
    for record in runs.metrics(noisy):
        assert record["routing/rollout_slot_flip_rate"] > 0.005
        assert record["routing/unusable_fraction"] == 0
        assert 0 < record["routing/rollout_any_layer_flip_rate"] <= 1


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_recorded_step_is_reproduced_at_another_layout(noisy, layout):
    """Step 3 has no checkpoint of its own: step 2 is trained on the way."""
    before = {path: path.stat().st_mtime_ns for path in noisy.rglob("*.safetensors")}
    done = runs.command("replay", f"{noisy}@3", *layout)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the step is reproduced" in done.stdout
    assert re.search(r"loss/value +\S+ +\S+", done.stdout)
    assert "live router would send elsewhere" in done.stdout
    assert runs.no_survivors(noisy)
    assert before == {path: path.stat().st_mtime_ns for path in noisy.rglob("*.safetensors")}


@pytest.mark.matrix
def test_the_first_step_is_computed_from_the_weights_that_the_run_was_given(noisy):
    """It has no checkpoint; another layout reproduces it."""
    assert not (noisy / "checkpoints" / "step_000000").exists()
    done = runs.command("replay", f"{noisy}@0", *ONE_RANK)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the step is reproduced" in done.stdout


def test_a_step_that_differs_is_told(noisy):
    done = runs.command(
        "replay",
        f"{noisy}@2",
        *ONE_RANK,
        "objective.clip_high=1e-6",
        "objective.entropy_weight=0.1",
    )
    assert done.returncode == 7
    assert "loss/value was" in done.stderr


@pytest.mark.parametrize(
    ("target", "says"), [("@99", "these can: 0, 1, 2, 3"), ("@x", "not a step number")]
)
def test_bad_targets(noisy, capsys, target, says):
    assert main(["replay", f"{noisy}{target}"]) != 0
    assert says in capsys.readouterr().err
