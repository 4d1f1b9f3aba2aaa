"""Tensors of a Hugging Face checkpoint, memory-mapped; block-fp8 ones are dequantised as read."""

import json
from collections import defaultdict
from pathlib import Path

import torch
from safetensors import safe_open

from grpo_megatron.checkpoints.durable import explained
from grpo_megatron.checkpoints.shard_files import will_need
from grpo_megatron.errors import CheckpointError
from grpo_megatron.weights.fp8 import BLOCK, dequantise, scale_name

_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class HFReader:
    """What the index names (or the single file holds), read in slices.

    Raises CheckpointError: no safetensors, a shard is missing, or a file is truncated."""

    def __init__(self, directory: Path):
        self.directory = directory
        self._files: dict[str, safe_open] = {}
        self._places: dict[str, tuple[int, dict]] = {}
        index = directory / "model.safetensors.index.json"
        if index.exists():
            with explained("unreadable index", directory):
                self.files = dict(json.loads(index.read_text())["weight_map"])
            missing = {f for f in self.files.values() if not (directory / f).exists()}
            if missing:
                raise CheckpointError(f"missing shards: {sorted(missing)}", where=str(directory))
        elif (directory / "model.safetensors").exists():
            names = self._open("model.safetensors").keys()
            self.files = dict.fromkeys(names, "model.safetensors")
        else:
            raise CheckpointError("no model.safetensors and no index", where=str(directory),
                                  remedy="give a Hugging Face checkpoint in safetensors format")

    def names(self) -> set[str]:
        """Without the scales of block-quantised tensors."""
        return set(self.files) - {scale_name(name) for name in self.files}

    def check_index(self) -> None:
        """Open every file. Raises CheckpointError where one holds other tensors than named."""
        named: dict[str, set[str]] = defaultdict(set)
        for name, file in self.files.items():
            named[file].add(name)
        for file, wanted in sorted(named.items()):
            if other := sorted(wanted.symmetric_difference(self._open(file).keys())):
                raise CheckpointError(f"{file} and the index disagree about {other[:3]}",
                                      where=str(self.directory), remedy="download it again")

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._slice(name).get_shape())

    def dtype(self, name: str) -> torch.dtype:
        """Of the tensor as `rows` gives it. Raises CheckpointError for one that is no weight."""
        stored = self._slice(name).get_dtype()
        if scale_name(name) in self.files and stored == "F8_E4M3":
            return torch.bfloat16
        if stored not in _DTYPES:
            raise CheckpointError(
                f"tensor {name!r} is {stored}; weights are {', '.join(_DTYPES)}, or F8_E4M3 with "
                f"a tensor {scale_name(name)!r}", where=str(self.directory))
        return _DTYPES[stored]

    def tensor(self, name: str) -> torch.Tensor:
        return self.rows(name, 0, self.shape(name)[0])

    def rows(self, name: str, start: int, end: int) -> torch.Tensor:
        """`tensor[start:end]`: a view of the mapped file, except of a dequantised tensor."""
        dtype = self.dtype(name)
        if scale_name(name) not in self.files:
            return self._slice(name)[start:end]
        first = start // BLOCK
        with explained(scale_name(name), self.directory):
            scales = self._slice(scale_name(name))[first : -(-end // BLOCK)]
            whole = dequantise(self._slice(name)[first * BLOCK : end], scales, dtype)
        return whole[start - first * BLOCK :]

    def prefetch(self, name: str) -> None:
        """Let the disk read the tensor before `rows` asks for it."""
        file = self.files[name]
        if file not in self._places:
            with open(self.directory / file, "rb") as opened:
                size = int.from_bytes(opened.read(8), "little")
                self._places[file] = 8 + size, json.loads(opened.read(size))
        start, header = self._places[file]
        begin, end = header[name]["data_offsets"]
        will_need(self.directory / file, start + begin, end - begin)

    def _slice(self, name: str):
        if name not in self.files:
            raise CheckpointError(f"tensor {name!r} is missing", where=str(self.directory))
        with explained(f"cannot read {name!r} from {self.files[name]}", self.directory):
            return self._open(self.files[name]).get_slice(name)

    def _open(self, file: str):
        if file not in self._files:
            with explained(f"unreadable shard {file}", self.directory):
                self._files[file] = safe_open(self.directory / file, "pt")
        return self._files[file]

