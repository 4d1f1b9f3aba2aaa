"""Hugging Face checkpoints: read by memory map, held against a model, read into one over ranks."""

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from grpo_megatron.checkpoints.durable import explained
from grpo_megatron.checkpoints.shard_files import will_need
from grpo_megatron.checkpoints.stacked_experts import Member, Stacks, stacks_in
from grpo_megatron.errors import CheckpointError
from grpo_megatron.plan.family import family_of
from grpo_megatron.plan.fp8_weights import BLOCK
from grpo_megatron.plan.model_facts import read_config
from grpo_megatron.weights.fp8_blocks import dequantise, scale_name, scale_shape
from grpo_megatron.weights.gather import Shard, ShardedModel
from grpo_megatron.weights.parameters import (
    EMBEDDING,
    REWARD_HEAD,
    Parameter,
    carried_names,
    carried_parameter,
)

_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_SINGLE_FILE = "model.safetensors"
_LISTED = 20
LANGUAGE_HEAD = "lm_head.weight"
"""The output layer of a language model, in Hugging Face's checkpoints."""
_ROWS_AT_ONCE = 8192
Shape = tuple[int, ...]


class HFReader:
    """The tensors of a Hugging Face checkpoint: what its index names, or its single file holds.

    Files are mapped and read in slices. What lies in a stack of experts has the name that it has
    everywhere else. stacks: default, those of the family in config.json. Raises CheckpointError
    where there are no safetensors, or a single file beside an index that does not name it, a shard
    is missing, or a file is truncated."""

    def __init__(self, directory: Path, stacks: Stacks | None = None):
        self.directory = directory
        if stacks is None:
            stacks = stacks_in(directory)
        self._stacks = stacks
        self._files: dict[str, safe_open] = {}
        self._places: dict[str, tuple[int, dict]] = {}
        index = directory / "model.safetensors.index.json"
        if index.exists():
            with explained("unreadable index", directory):
                self.files = dict(json.loads(index.read_text())["weight_map"])
                if not all(isinstance(file, str) for file in self.files.values()):
                    raise TypeError("the name of a file is no text")
            shards = sorted(set(self.files.values()))
            missing = [shard for shard in shards if not (directory / shard).exists()]
            if missing:
                raise CheckpointError(f"missing shards: {missing}", where=str(directory))
            if (directory / _SINGLE_FILE).exists() and _SINGLE_FILE not in shards:
                raise CheckpointError(
                    f"{_SINGLE_FILE} is beside {index.name}, which does not name it: transformers "
                    "reads the one, engines the other",
                    where=str(directory),
                    remedy="remove the one that is not of this model",
                )
        elif (directory / _SINGLE_FILE).exists():
            self.files = dict.fromkeys(self._open(_SINGLE_FILE).keys(), _SINGLE_FILE)
        else:
            raise CheckpointError(
                "no model.safetensors and no index",
                where=str(directory),
                remedy="give a Hugging Face checkpoint in safetensors format",
            )

    def names(self) -> set[str]:
        """Name all tensors, without the scales of block-quantised ones."""
        named = set()
        for name in self.files.keys() - {scale_name(name) for name in self.files}:
            if self._stacks.has(name):
                named.update(self._stacks.matrices(name, self._slice(name).get_shape()[0]))
            else:
                named.add(name)
        return named

    def shapes(self) -> dict[str, Shape]:
        """Return the shapes of all tensors by name, in the order of names."""
        return {name: self.shape(name) for name in sorted(self.names())}

    def check_index(self) -> None:
        """Open every file. Raises CheckpointError where one holds other tensors than named."""
        named: dict[str, set[str]] = defaultdict(set)
        for name, file in self.files.items():
            named[file].add(name)
        for file, wanted in sorted(named.items()):
            other = sorted(wanted.symmetric_difference(self._open(file).keys()))
            if other:
                raise CheckpointError(
                    f"{file} and the index disagree about {other[:3]}",
                    where=str(self.directory),
                    remedy="download it again",
                )

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor. Raises CheckpointError where it is missing."""
        member = self._member(name)
        if member is not None:
            return member.matrix_shape(self._stack_shape(member))
        return tuple(self._slice(name).get_shape())

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype of the tensor as `rows` gives it.

        Raises CheckpointError for one that is no weight, or whose scales are not those of its
        blocks."""
        member = self._member(name)
        if member is not None:
            name = member.stack
        stored = self._slice(name).get_dtype()
        if scale_name(name) in self.files:
            self._refuse_other_scales(name, stored)
            return torch.bfloat16
        if stored not in _DTYPES:
            raise CheckpointError(
                f"tensor {name!r} is {stored}; weights are {', '.join(_DTYPES)}, "
                f"or F8_E4M3 with a tensor {scale_name(name)!r}",
                where=str(self.directory),
            )
        return _DTYPES[stored]

    def _refuse_other_scales(self, name: str, stored: str) -> None:
        """Raise CheckpointError where the scales beside a tensor are not those of its blocks.
        stored: its dtype in files."""
        scales = scale_name(name)
        if stored != "F8_E4M3":
            raise CheckpointError(
                f"tensor {name!r} is {stored}, and {scales!r} has scales of FP8 numbers",
                where=str(self.directory),
                remedy="remove the scales if the tensor was dequantised, else download it again",
            )
        shape = tuple(self._slice(name).get_shape())
        found = tuple(self._slice(scales).get_shape())
        wanted = scale_shape(shape)
        is_matrix = len(shape) == 2
        if not is_matrix or found != wanted:
            raise CheckpointError(
                f"{scales!r} is {found}, and {name!r}, {shape}, has {wanted} blocks of "
                f"{BLOCK} x {BLOCK} numbers",
                where=str(self.directory),
                remedy="download it again, or take the release whose weights are not quantised",
            )

    def tensor(self, name: str) -> torch.Tensor:
        """Read a whole tensor in its own shape, as `rows` does; also one of a single number that
        has no rows."""
        shape = self.shape(name)
        if shape:
            return self.rows(name, 0, shape[0])
        self.dtype(name)  # refuses what is no weight
        with explained(f"cannot read {name!r} from {self.files[name]}", self.directory):
            number: torch.Tensor = self._open(self.files[name]).get_tensor(name)
        return number

    def rows(self, name: str, start: int, end: int) -> torch.Tensor:
        """Read `tensor[start:end]`: a view of the mapped file, except of a dequantised tensor.

        Raises CheckpointError where it is missing, unreadable or no weight."""
        member = self._member(name)
        if member is not None:
            return self._rows_of_member(name, member, start, end)
        dtype = self.dtype(name)
        if scale_name(name) not in self.files:
            rows: torch.Tensor = self._slice(name)[start:end]
            return rows
        first = start // BLOCK
        with explained(scale_name(name), self.directory):
            scales = self._slice(scale_name(name))[first : -(-end // BLOCK)]
            whole = dequantise(self._slice(name)[first * BLOCK : end], scales, dtype)
        part: torch.Tensor = whole[start - first * BLOCK :]
        return part

    def _rows_of_member(self, name: str, member: Member, start: int, end: int) -> torch.Tensor:
        """Read rows of a matrix in a stack."""
        num_rows, _ = self.shape(name)
        first = member.place * num_rows
        wanted = slice(first + start, first + end)
        of_expert = slice(member.expert, member.expert + 1)
        with explained(f"cannot read {member.stack!r}", self.directory):
            stack = self._slice(member.stack)
            if member.is_transposed(stack.get_shape()):
                transposed: torch.Tensor = stack[of_expert, :, wanted]
                return transposed[0].T
            rows: torch.Tensor = stack[of_expert, wanted, :]
        return rows[0]

    def _stack_shape(self, member: Member) -> Shape:
        """Return the shape of the stack. Raises CheckpointError for one that holds no such
        matrices, or quantised ones."""
        stack = self._slice(member.stack)
        shape = tuple(stack.get_shape())
        if not member.can_be_in(shape):
            raise CheckpointError(
                f"{member.stack!r} is {shape}, which holds no {member.count} matrices of "
                f"{member.num_inputs} inputs for each expert",
                where=str(self.directory),
                remedy="is config.json of this checkpoint?",
            )
        stored = stack.get_dtype()
        if stored not in _DTYPES:
            raise CheckpointError(
                f"{member.stack!r} is {stored}; experts in one tensor are read as "
                f"{', '.join(_DTYPES)}",
                where=str(self.directory),
                remedy="take the release whose weights are not quantised",
            )
        return shape

    def prefetch(self, name: str) -> None:
        """Let the disk read the tensor before `rows` asks for it."""
        member = self._member(name)
        if member is not None:
            name = member.stack
        file = self.files[name]
        if file not in self._places:
            with open(self.directory / file, "rb") as opened:
                size = int.from_bytes(opened.read(8), "little")
                self._places[file] = 8 + size, json.loads(opened.read(size))
        start, header = self._places[file]
        begin, end = header[name]["data_offsets"]
        if member is not None:
            num_bytes = (end - begin) // header[name]["shape"][0]
            begin += member.expert * num_bytes
            end = begin + num_bytes
        will_need(self.directory / file, start + begin, end - begin)

    def _member(self, name: str) -> Member | None:
        """Say where in a stack a tensor is; None for one that is none, or under its own name."""
        if name in self.files:
            return None
        member = self._stacks.member(name)
        if member is None or member.stack not in self.files:
            return None
        if member.expert >= self._slice(member.stack).get_shape()[0]:
            return None
        return member

    def _slice(self, name: str) -> Any:
        """safetensors' lazy view of a tensor."""
        if name not in self.files:
            raise CheckpointError(f"tensor {name!r} is missing", where=str(self.directory))
        with explained(f"cannot read {name!r} from {self.files[name]}", self.directory):
            return self._open(self.files[name]).get_slice(name)

    def _open(self, file: str) -> Any:
        if file not in self._files:
            with explained(f"unreadable shard {file}", self.directory):
                self._files[file] = safe_open(self.directory / file, "pt")
        return self._files[file]


class HFSource:
    """A Hugging Face checkpoint as the parameters of a model.

    With `carry`, also what the checkpoint has and Megatron's model has not (`carried_names`).
    left_out: names of tensors that no parameter needs.
    Raises CheckpointError for other tensors or shapes than the model's, and for what is no
    weight."""

    def __init__(
        self,
        parameters: Sequence[Parameter],
        directory: Path,
        *,
        carry: bool = True,
        left_out: Sequence[str] = (),
    ):
        self.reader = reader = HFReader(directory)
        reader.check_index()
        found = reader.shapes()
        for name in left_out:
            found.pop(name, None)
        wanted: dict[str, Shape] = {}
        for parameter in parameters:
            wanted.update(parameter.hf)
        self.parameters = list(parameters)
        hf = read_config(directory)
        if hf.get("tie_word_embeddings") and LANGUAGE_HEAD in found.keys() - wanted.keys():
            [embedding] = [one for one in self.parameters if one.name == EMBEDDING]
            [(name, shape)] = embedding.hf
            refuse_untied_head(reader, name, shape)
            del found[LANGUAGE_HEAD]
        for name in sorted(carried_names(hf, found)):
            shape = found.pop(name)
            if carry:
                self.parameters.append(carried_parameter(name, shape))
        names = family_of(hf["model_type"]).file
        remedy = f"is config.json of this checkpoint? The names are those of {names}"
        refuse_unfit(directory, found, wanted, remedy=remedy)
        for parameter in self.parameters:
            for name, _ in parameter.hf:
                reader.dtype(name)  # refuses what is no weight

    def dtype(self, parameter: Parameter) -> torch.dtype:
        """Return the one dtype of a parameter's tensors. Raises CheckpointError for several."""
        names = [name for name, _ in parameter.hf]
        found = {self.reader.dtype(name) for name in names}
        if len(found) > 1:
            raise CheckpointError(
                f"{names} are one parameter in Megatron, but have dtypes {sorted(map(str, found))}",
                remedy="choose one with --dtype",
                where=str(self.reader.directory),
            )
        return found.pop()

    def tensors(self, parameter: Parameter) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield names and tensors of a parameter; views of the mapped file where they can be."""
        for name, _ in parameter.hf:
            yield name, self.reader.tensor(name)

    def prefetch(self, parameter: Parameter) -> None:
        """Let the disk read the tensors of a parameter before `tensors` asks for them."""
        for name, _ in parameter.hf:
            self.reader.prefetch(name)


def refuse_untied_head(reader: HFReader, name: str, shape: Shape) -> None:
    """Compare the output layer that a checkpoint with tied embeddings has beside them. name, shape:
    of the embeddings.

    Raises CheckpointError where it is another matrix."""
    is_same = reader.shape(LANGUAGE_HEAD) == shape
    for start in range(0, shape[0], _ROWS_AT_ONCE):
        if not is_same:
            break
        end = min(start + _ROWS_AT_ONCE, shape[0])
        head = reader.rows(LANGUAGE_HEAD, start, end)
        is_same = torch.equal(head, reader.rows(name, start, end))
    if not is_same:
        raise CheckpointError(
            f"{LANGUAGE_HEAD} is another matrix than {name}, and config.json says that they "
            "are one (tie_word_embeddings)",
            where=str(reader.directory),
            remedy="set tie_word_embeddings to false in config.json if the output layer has "
            "weights of its own, else remove it from the checkpoint",
        )


def refuse_unfit(
    directory: Path,
    found: Mapping[str, Shape],
    wanted: Mapping[str, Shape],
    model: str = "config.json",
    remedy: str = "is config.json of this checkpoint?",
) -> None:
    """Compare names and shapes of a checkpoint's tensors, `found`, with those of a model.

    Raises CheckpointError that lists all differences."""
    other = []
    for name, shape in wanted.items():
        if name in found and found[name] != shape:
            other.append(f"{name}: {found[name]}, the model has {shape}")
    lines = []
    for what, names in (
        ("missing", wanted.keys() - found.keys()),
        ("of another shape", other),
        ("without a place in the model", found.keys() - wanted.keys()),
    ):
        if not names:
            continue
        lines.append(f"  {len(names)} {what}:")
        for name in sorted(names)[:_LISTED]:
            lines.append(f"    {name}")
        if len(names) > _LISTED:
            lines.append("    ...")
    if lines:
        raise CheckpointError(
            "\n".join([f"the tensors are not those of {model}:", *lines]),
            where=str(directory),
            remedy=remedy,
        )


@torch.no_grad()
def import_weights(model: ShardedModel, directory: Path) -> None:
    """Fill every parameter; each rank copies the rows and columns that it holds. Collective.

    A reward model may begin with the checkpoint of a language model: its head stays as it is, and
    the output layer is left out.
    Raises CheckpointError where the checkpoint is of another model or cannot be read."""
    parameters = [entry.parameter for entry in model.entries]
    unread: set[str] = set()
    left_out: list[str] = []
    if any(parameter.name == REWARD_HEAD for parameter in parameters):
        left_out = [LANGUAGE_HEAD]
        if REWARD_HEAD not in HFReader(directory).names():
            unread = {REWARD_HEAD}
    wanted = [parameter for parameter in parameters if parameter.name not in unread]
    reader = HFSource(wanted, directory, left_out=left_out).reader
    for part in model.shards:
        if part.name in unread:
            continue
        parameter = model.map.parameter(part.name, part.full_shape)
        held = [_held(reader, name, shape[0], part) for name, shape in parameter.hf]
        row_parts = 1
        if part.dim == 0:
            row_parts = part.size
        merged = parameter.merge(held, row_parts)
        part.tensor[: len(merged)] = merged
        part.tensor[len(merged) :] = 0  # padding of the vocabulary


def _held(reader: HFReader, name: str, rows: int, part: Shard) -> torch.Tensor:
    """Read what this rank holds of a tensor; a view of the mapped file."""
    if part.dim == 1:
        return reader.tensor(name).chunk(part.size, 1)[part.rank]
    count = -(-rows // part.size)  # padding is at the end
    return reader.rows(name, min(part.rank * count, rows), min((part.rank + 1) * count, rows))
