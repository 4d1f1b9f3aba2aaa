"""Requests and answers survive the connection; the trainer knows what to do with each."""

from __future__ import annotations

import ast
import inspect
import json
import math
from pathlib import Path
from typing import get_args

import msgspec
import pytest

from grpo_megatron.trainer import requests
from grpo_megatron.trainer.requests import (
    AnyRequest,
    CompareLogprobs,
    DescribeWeights,
    ExportModel,
    FindCorruptFiles,
    FinishCheckpoint,
    JoinTransfer,
    LoadCheckpoint,
    LogprobComparison,
    MeasureLogprobDiff,
    OpenTransfer,
    RenewReference,
    ResetOptimizer,
    SaveCheckpoint,
    ScoreAnswers,
    ScoreSteps,
    SendWeights,
    SnapshotReference,
    Stop,
    TakeAdapters,
    TakeWeights,
    Train,
    TrainColdStart,
    TrainReport,
    read_answer,
    read_request,
    to_json_values,
)
from grpo_megatron.weights.boxes import Box
from grpo_megatron.weights.publish_plan import OpenedStream, Part, Piece, SentWeights, Stream
from grpo_megatron.weights.tensor_entry import TensorEntry

REPORT = TrainReport(
    metrics={"loss/value": math.nan, "grad/norm": math.inf, "tokens/count": 7.0},
    normalisers={"loss/value": "tokens"},
    state={"running_mean": 0.5, "history": [1, 2]},
    updates=2,
    losses=[1.5, math.nan],
    grad_norms=[3.0, 4.0],
    tokens=77,
)
TENSOR = TensorEntry("model.norm.weight", "bfloat16", (8,))
BOX = Box((4,), (4,))
STREAM = Stream((0, 2), (Part(TENSOR, BOX, (Piece(1, BOX),)),), 1 << 20)
DIRECTORY = Path("/runs/a b/step_000001")
EXAMPLES = [
    (Train(directory=DIRECTORY, first_update=3, num_updates=9, state={"m": 1.0}), REPORT),
    (TrainColdStart(directory=DIRECTORY, first_update=0), REPORT),
    (ResetOptimizer(cold_start=True), None),
    (SnapshotReference(), None),
    (RenewReference(after=9), None),
    (TakeWeights(Path("/models/base")), None),
    (TakeAdapters(Path("/adapters")), None),
    (ScoreAnswers(Path("/store/step_000001"), with_adapters=False), [-1.5, -2.25]),
    (ScoreAnswers(Path("/store/step_000001")), [-1.5, -2.25]),
    (ScoreSteps(Path("/store/step_000001")), [[-1.5], [], [0.5, 2.25]]),
    (CompareLogprobs(DIRECTORY), LogprobComparison("a and b", "look", {"x": math.inf})),
    (
        MeasureLogprobDiff(directory=DIRECTORY, to=Path("gaps"), by_layer=True, state={"a": 1.0}),
        {"x": 1.0},
    ),
    (SaveCheckpoint(directory=DIRECTORY, state={"step": 1, "before": math.nan}), None),
    (FinishCheckpoint(wait=True), False),
    (LoadCheckpoint(DIRECTORY), {"step": 1, "before": math.nan, "sampler": {"order": [1, 2]}}),
    (FindCorruptFiles(DIRECTORY), ["step_000001/model.bin"]),
    (ExportModel(DIRECTORY), 1 << 40),
    (DescribeWeights(), [TENSOR]),
    (
        OpenTransfer(kept=[{TENSOR.name: [BOX]}, {}]),
        [OpenedStream("10.0.0.1", 4711, "nccl", STREAM)],
    ),
    (JoinTransfer(), {"gpu memory": 8, "host memory": 56}),
    (SendWeights(version=5), SentWeights({"0/1/5": "ab12"}, 100, 20)),
    (Stop(), None),
]


def through_json(message: object) -> object:
    return json.loads(json.dumps(to_json_values(message)))


def test_there_is_an_example_of_every_request():
    assert {type(request) for request, _ in EXAMPLES} == set(get_args(AnyRequest))
    declared = {
        found
        for found in vars(requests).values()
        if inspect.isclass(found) and issubclass(found, requests.Request)
    }
    assert declared == set(get_args(AnyRequest)) | {requests.Request}


@pytest.mark.parametrize(("request_", "answer"), EXAMPLES, ids=lambda found: type(found).__name__)
def test_requests_and_answers_survive_the_connection(request_, answer):
    read = read_request(through_json(request_))
    assert type(read) is type(request_)
    assert repr(read) == repr(request_)  # not-a-number equals nothing
    found = read_answer(request_, through_json(answer))
    assert type(found) is type(answer)
    assert repr(found) == repr(answer)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"request": "Trian"}, "Invalid value 'Trian'"),
        ({"request": "ExportModel"}, "missing required field `directory`"),
        ({"request": "SendWeights", "version": "many"}, "Expected `int`, got `str`"),
    ],
)
def test_what_is_no_request_is_refused(values, expected):
    with pytest.raises(msgspec.ValidationError, match=expected):
        read_request(values)


def test_the_service_has_a_case_for_every_request():
    """Read and not imported: the service needs Megatron, and mypy knows no exhaustive match."""
    source = Path(requests.__file__).with_name("service.py").read_text()
    patterns = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.MatchClass)]
    cases = [pattern.cls.id for pattern in patterns]
    assert sorted(cases) == sorted(kind.__name__ for kind in get_args(AnyRequest))


def test_requests_of_different_lengths_are_not_compared():
    """Who watches takes the longest of a phase: looking for a checkpoint is not writing it."""
    from grpo_megatron.trainer.trainer_rank import _phase, _subject

    folder = Path("checkpoints/step_000004")
    saves = [SaveCheckpoint(directory=folder, state={}, beside=beside) for beside in (False, True)]
    finishes = [FinishCheckpoint(wait=wait) for wait in (False, True)]
    assert len({_phase(request) for request in (*saves, *finishes)}) == 4
    assert [_subject(request) for request in (saves[0], finishes[0])] == ["step_000004", ""]
