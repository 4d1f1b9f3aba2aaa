"""`grpo-megatron prove --pretend`: every part, whole, on a GPU that only pretends."""

from __future__ import annotations

import json

import pytest

from grpo_megatron.cli.main import main
from grpo_megatron.prove import compare
from grpo_megatron.prove.child import CONDITIONS_FILE
from grpo_megatron.prove.conditions import Conditions
from grpo_megatron.prove.evidence import Recorder
from grpo_megatron.prove.part import Job
from grpo_megatron.prove.parts import layers

pytestmark = pytest.mark.device

NEEDS_TRANSFORMER_ENGINE = {"layers", "run-fp8"}
NEEDS_NODES = {"nodes"}


@pytest.mark.timeout(1800)
def test_every_part_passes_but_those_that_need_what_is_not_here(tmp_path):
    folder = tmp_path / "prove"
    code = main(["prove", "--pretend", "--to", str(folder), "--minutes", "25"])
    found = json.loads((folder / "prove.json").read_text())
    by_status: dict[str, set[str]] = {"passed": set(), "failed": set(), "impossible": set()}
    for outcome in found["outcomes"]:
        by_status[outcome["status"]].add(outcome["part"])
    assert not by_status["failed"], (folder / "prove.json").read_text()
    assert code == 0
    assert by_status["impossible"] == NEEDS_TRANSFORMER_ENGINE | NEEDS_NODES
    page = (folder / "prove.html").read_text()
    assert "The GPU only pretended" in page
    for outcome in found["outcomes"]:
        if outcome["status"] == "passed":
            assert outcome["evidence"]["checks"] or outcome["evidence"]["figures"]


def test_a_tolerance_that_nothing_meets_fails_the_comparison(tmp_path):
    recorder = Recorder(tmp_path / "evidence.json")
    one = compare.TrainedSteps(
        losses=[0.1, 0.2], grad_norms=[1.0, 2.0], logprobs=[-1.0, -2.0], kernels=[], peak_bytes=0
    )
    other = compare.TrainedSteps(
        losses=[0.1, 0.2], grad_norms=[1.0, 2.02], logprobs=[-1.0, -2.0], kernels=[], peak_bytes=0
    )
    compare.compare_steps(recorder, "x", other, one, compare.FLOAT32)
    standings = [check.standing for check in recorder.evidence.checks]
    assert standings == ["holds", "holds", "fails"]


def test_the_comparison_of_layers_runs_through_with_torch_on_both_sides(tmp_path):
    """Without Transformer Engine both sides have torch's layers: errors are torch's own."""
    conditions = Conditions(device="none", transformer_engine="pretended")
    (tmp_path / CONDITIONS_FILE).write_text("{}")
    folder = tmp_path / "layers"
    folder.mkdir()
    job = Job(folder, conditions, Recorder(folder / "evidence.json"))
    layers.run(job)
    checks = job.recorder.evidence.checks
    *compared, not_chosen = checks
    assert len(compared) == 12  # three models, two precisions, log-probs and gradients
    assert {check.standing for check in compared} == {"holds"}, checks
    assert not_chosen.standing == "impossible" and "Transformer Engine" in not_chosen.detail
    assert "gradients are those of torch" in checks[1].what
