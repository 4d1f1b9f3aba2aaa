"""What trainer ranks are asked to compute for a part, and what rank 0 answers."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from grpo_megatron.weights.carrier_names import Carrier, LinkKind

TrainerTable = dict[str, Any]
"""Keys of `[trainer]`."""


class TrainSteps(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Train a recorded step whose samples are split into several optimizer steps."""

    model: Path
    """Hugging Face checkpoint to start from."""
    samples: Path
    """A recorded step."""
    trainer: TrainerTable
    replays_routes: bool = False
    """Take the experts that are recorded (R3), so that rounding chooses no others."""
    torch_layers: bool = False
    """torch's layers also where Transformer Engine is installed."""
    gradients: Path | None = None
    """Where rank 0 writes the gradients of the last optimizer step, by Hugging Face names, before
    clipping; without the distributed optimizer."""


class TrainedSteps(msgspec.Struct, frozen=True, kw_only=True):
    """What training found."""

    losses: list[float]
    """Of each optimizer step."""
    grad_norms: list[float]
    """Of each optimizer step, before clipping."""
    logprobs: list[float]
    """Of all policy tokens in the table's order, before the first optimizer step."""
    kernels: list[str]
    peak_bytes: int


class MeasureMemory(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Take one optimizer step of a recorded step and measure the highest memory."""

    hf: dict[str, Any]
    """config.json of the model, whose weights are made at random."""
    samples: Path
    trainer: TrainerTable


class MeasuredMemory(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes of the fullest rank, at three points."""

    after_build: int
    after_first_step: int
    """The highest so far; Adam's moments are there."""
    peak: int
    """The highest of the second step."""


class MeasureSpeed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Time the passes of an optimizer step on recorded steps, with random weights."""

    hf: dict[str, Any]
    samples: list[Path]
    """Recorded steps, one for each micro-batch size."""
    trainer: TrainerTable
    repeats: int = 3
    replays_routes: bool = False
    """Time the training pass with replayed routes too."""
    trace: Path | None = None
    """Where a trace of one optimizer step on the last of `samples` is written."""


class Times(msgspec.Struct, frozen=True, kw_only=True):
    """Median seconds on one recorded step, of the slowest rank."""

    tokens: int
    """Of all ranks, prompts and completions."""
    logprobs_s: float
    """A forward pass that ends in log-probs."""
    train_s: float
    """Forward and backward."""
    optimizer_s: float
    replayed_train_s: float = 0.0
    """As `train_s`, with replayed routes; 0: not asked for."""
    peak_bytes: int = 0


class MeasuredSpeed(msgspec.Struct, frozen=True, kw_only=True):
    """Times by recorded step, and the kernels that took longest."""

    times: list[Times]
    top_kernels: list[tuple[str, float, int]] = []
    """Name, microseconds in total, calls; of the traced step."""


class CarryWeights(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Send made-up weights through a weight stream, from one process to others."""

    carrier: Carrier
    mib: int
    """Of all tensors together."""
    gpus: list[int]
    """The GPU of each member, which sends first and then receives; others have no part."""


class CarriedWeights(msgspec.Struct, frozen=True, kw_only=True):
    """What the members of a weight stream found."""

    links: dict[LinkKind, int]
    """How many carried weights in which way."""
    seconds: float
    """From the first message to the last receiver's answer, of a publish after another."""
    sent: dict[str, str]
    """Digest of each message."""
    received: list[dict[str, str]]
    """The same of each receiver."""
    changed: list[str]
    """Tensors that arrived otherwise than they were sent."""


Request = TrainSteps | MeasureMemory | MeasureSpeed
Answer = TrainedSteps | MeasuredMemory | MeasuredSpeed


def encode_requests(requests: Sequence[Request | CarryWeights]) -> bytes:
    """Return the requests as JSON that `decode_requests` reads."""
    return msgspec.json.encode(list(requests), enc_hook=str)


def decode_requests(data: bytes) -> list[Request]:
    """Read requests. Raises msgspec.MsgspecError for what are none."""
    return msgspec.json.decode(data, type=list[Request], dec_hook=_decoded)


def _decoded(kind: type, value: Any) -> Any:
    """Make what JSON has no type for: paths."""
    return kind(value)
