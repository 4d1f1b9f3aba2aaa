"""What the controller asks of the trainer, and what the trainer reports.

Every rank executes every request; rank 0 answers. The base of each request names the type of its
answer: `ExportModel` is a `Request[int]`, and `await link.call(ExportModel(…))` an int."""

from pathlib import Path, PurePath
from typing import Any, Generic, TypeVar, get_args

import msgspec

from grpo_megatron.weights.boxes import Box
from grpo_megatron.weights.carrier_names import LinkKind
from grpo_megatron.weights.publish_plan import OpenedStream, SentWeights
from grpo_megatron.weights.tensor_entry import TensorEntry

Answer = TypeVar("Answer")


class Request(msgspec.Struct, Generic[Answer], frozen=True, tag_field="request"):
    """One thing that the trainer is asked to do; `Answer` is what comes back."""

    @property
    def name(self) -> str:
        """The request's name, as errors and logs call it."""
        return type(self).__name__


# --- training


class TrainReport(msgspec.Struct, frozen=True, kw_only=True):
    """The report of one recorded step, equal on all ranks."""

    metrics: dict[str, float]
    """By name, means over the step."""
    normalisers: dict[str, str] = {}
    """What each metric is a mean over: tokens, samples, updates, ..."""
    state: dict[str, Any]
    """What the objective learned so far (`Objective.state`)."""
    updates: int
    """Optimizer steps that were taken."""
    losses: list[float] = []
    """Of each optimizer step."""
    grad_norms: list[float] = []
    """Of each optimizer step, before clipping."""
    tokens: int
    """Prompt and policy tokens that were trained."""
    old_logprobs_s: float = 0.0
    """Seconds of the passes before the first optimizer step."""
    train_s: float = 0.0
    """Seconds of the whole step, in the trainer."""
    memory: dict[str, dict[str, int]] = {}
    """Of each model that rank 0 trains, by its name: the bytes that it holds between two steps, by
    component as the plan names them."""


class Train(Request[TrainReport], frozen=True, kw_only=True, tag=True):
    """Take all optimizer steps of a recorded step."""

    directory: Path
    """The recorded step, in the store."""
    first_update: int
    """Optimizer steps of the run before this step; they fix the learning rate."""
    num_updates: int
    """Optimizer steps of the whole run."""
    state: dict[str, Any]
    """What the objective learned before this step (`TrainReport.state`)."""
    replayed: bool = False
    """Clip and mask decisions follow the recorded ones, which are not written anew."""
    exact: bool = False
    """These very weights sampled it, so the step proves that the engines have them, if it can."""


class TrainColdStart(Request[TrainReport], frozen=True, kw_only=True, tag=True):
    """Take one supervised optimizer step per update of the recorded step."""

    directory: Path
    first_update: int


class ResetOptimizer(Request[None], frozen=True, kw_only=True, tag=True):
    """Drop all moments; take the optimizer settings of the cold start, or of RL."""

    cold_start: bool


class SnapshotReference(Request[None], frozen=True, tag=True):
    """RL begins: the policy as it is now is its own reference."""


class RenewReference(Request[None], frozen=True, kw_only=True, tag=True):
    """A step had nothing to train: the reference is renewed where it is due after that step, as
    `Train` does."""

    after: int
    """The step, from 0."""


# --- preferences


class TakeWeights(Request[None], frozen=True, tag=True):
    """Before the first step: the policy takes the weights of a checkpoint."""

    directory: Path


class TakeAdapters(Request[None], frozen=True, tag=True):
    """Before the first step: the policy takes adapters in PEFT's format."""

    directory: Path


class ScoreAnswers(Request[list[float]], frozen=True, tag=True):
    """Look at recorded answers; returns the sum of log-probs of each row."""

    directory: Path
    with_adapters: bool = True
    """False: the weights alone look at them, as if the policy had no adapters."""


class ScoreSteps(Request[list[list[float]]], frozen=True, tag=True):
    """Look at recorded answers whose steps have labels; returns the logits of the steps by row."""

    directory: Path


# --- checks


class LogprobComparison(msgspec.Struct, frozen=True):
    """An engine's log-probs beside the trainer's."""

    problem: str
    """What disagrees; empty where nothing does."""
    remedy: str
    metrics: dict[str, float]


class CompareLogprobs(Request[LogprobComparison], frozen=True, tag=True):
    """Compute the log-probs of recorded completions, and compare them with the engine's."""

    directory: Path


class MeasureLogprobDiff(Request[dict[str, float]], frozen=True, kw_only=True, tag=True):
    """Write log-probs of a recorded step under several routings; the answer is their metrics."""

    directory: Path
    to: Path
    by_layer: bool
    state: dict[str, Any]
    """What the objective learned before this step: it decides which samples are trained."""


# --- checkpoints


class SaveCheckpoint(Request[None], frozen=True, kw_only=True, tag=True):
    """Write weights, optimizer, references and `state`, which `LoadCheckpoint` answers."""

    directory: Path
    state: dict[str, Any]
    beside: bool = False
    """Answer once everything is copied: files are written beside what is asked next, and the
    checkpoint exists after `FinishCheckpoint`."""


class FinishCheckpoint(Request[bool], frozen=True, kw_only=True, tag=True):
    """Give a checkpoint its name that was saved beside others; the answer is whether there is none
    left to finish."""

    wait: bool
    """Wait for files that are still being written."""


class LoadCheckpoint(Request[dict[str, Any]], frozen=True, tag=True):
    """Restore weights, optimizer and references."""

    directory: Path


class FindCorruptFiles(Request[list[str]], frozen=True, tag=True):
    """Name files of a checkpoint, and of the reference that it names, that are not as written."""

    directory: Path


class ExportModel(Request[int], frozen=True, tag=True):
    """Write a Hugging Face checkpoint and read it back; the answer is its bytes."""

    directory: Path
    answer_ends: list[int] = []
    """Of a reward model: tokens at which it reads answers, beside those of config.json."""


# --- publishing


class DescribeWeights(Request[list[TensorEntry]], frozen=True, kw_only=True, tag=True):
    """List the Hugging Face tensors that a publish is made of."""

    adapters: bool = False
    """Those of the adapters instead, which engines compute beside the weights; none before they
    begin."""


class OpenTransfer(Request[list[OpenedStream]], frozen=True, kw_only=True, tag=True):
    """Plan the transfer, of the weights or of the adapters, and listen for the engines' workers."""

    adapters: bool = False
    kept: list[dict[str, list[Box]]]
    """What each worker of each replica keeps, by tensor name."""


class JoinTransfer(Request[dict[LinkKind, int]], frozen=True, kw_only=True, tag=True):
    """Wait until the engines' workers have joined; the answer is how many links between two members
    carry weights in which way."""

    adapters: bool = False


class SendWeights(Request[SentWeights], frozen=True, kw_only=True, tag=True):
    """Send all weights, or all adapters, once; the answer has the digest of each message."""

    version: int
    adapters: bool = False


class Stop(Request[None], frozen=True, tag=True):
    """Every rank ends."""


AnyRequest = (
    Train
    | TrainColdStart
    | ResetOptimizer
    | SnapshotReference
    | RenewReference
    | TakeWeights
    | TakeAdapters
    | ScoreAnswers
    | ScoreSteps
    | CompareLogprobs
    | MeasureLogprobDiff
    | SaveCheckpoint
    | FinishCheckpoint
    | LoadCheckpoint
    | FindCorruptFiles
    | ExportModel
    | DescribeWeights
    | OpenTransfer
    | JoinTransfer
    | SendWeights
    | Stop
)


def answer_type(request: Request[Answer]) -> Any:
    """Return the `Answer` that the class of `request` was declared with."""
    [declared] = type(request).__orig_bases__  # type: ignore[attr-defined]  # of `typing.Generic`
    [answer] = get_args(declared)
    return answer


def to_json_values(message: object) -> Any:
    """Return a request or an answer as what `json.dumps` takes.

    Not-a-number stays one, which msgspec's own JSON has no word for."""
    return msgspec.to_builtins(message, enc_hook=_path_to_text)


def read_request(values: Any) -> AnyRequest:
    """Read what `to_json_values` made of a request. Raises msgspec.ValidationError."""
    request: AnyRequest = msgspec.convert(values, AnyRequest, dec_hook=_text_to_path)
    return request


def read_answer(request: Request[Answer], values: Any) -> Answer:
    """Read what `to_json_values` made of the answer. Raises msgspec.ValidationError."""
    answer: Answer = msgspec.convert(values, answer_type(request), dec_hook=_text_to_path)
    return answer


def _path_to_text(value: object) -> str:
    if isinstance(value, PurePath):
        return str(value)
    raise NotImplementedError(f"{type(value).__name__} has no JSON form")


def _text_to_path(wanted: type, value: Any) -> Any:
    if wanted is Path:
        return Path(value)
    raise NotImplementedError(f"{wanted.__name__} has no JSON form")
