"""Digests of tensors that were recorded, beside them, when a checkpoint was written."""

import json
from collections.abc import Mapping
from pathlib import Path

import torch

from grpo_megatron.checkpoints.durable import write_json
from grpo_megatron.errors import MismatchError
from grpo_megatron.weights.tensor_entry import digest_tensor

DIGESTS_OF_TENSORS = "conversion.json"
"""File of a converted or merged checkpoint."""


class RecordedDigests:
    """Those of one checkpoint; there are none where it was written by somebody else."""

    def __init__(self, directory: Path):
        self._directory = directory
        self._of_tensors: dict[str, str] = {}
        try:
            record = json.loads((directory / DIGESTS_OF_TENSORS).read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            return
        if isinstance(record, dict) and isinstance(record.get("tensors"), dict):
            self._of_tensors = record["tensors"]

    def __bool__(self) -> bool:
        """Whether any were recorded."""
        return bool(self._of_tensors)

    def differs(self, name: str, tensor: torch.Tensor) -> bool:
        """Whether a tensor, in the dtype and shape in which it was written, has another digest than
        was recorded of it."""
        return name in self._of_tensors and digest_tensor(tensor) != self._of_tensors[name]

    def check(self, name: str, tensor: torch.Tensor) -> None:
        """Raise MismatchError where a tensor is not what was written."""
        if self.differs(name, tensor):
            raise MismatchError(
                f"tensor {name!r} is not what was written, by {DIGESTS_OF_TENSORS}",
                where=str(self._directory),
                remedy="restore the checkpoint from a copy; of a run or a stage, remove the folder "
                "and resume it; if it was changed on purpose, remove "
                f"{DIGESTS_OF_TENSORS} from it",
            )


def record_digests(directory: Path, digests: Mapping[str, str]) -> None:
    """Write the digests of a checkpoint's tensors, by name."""
    write_json(directory / DIGESTS_OF_TENSORS, {"tensors": dict(digests)})
