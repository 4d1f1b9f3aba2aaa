"""Expert routes of one shard: raw ids beside the shard's token columns.

    rollout-0.routes   for every group: its prompts' routes (once, if all samples agree), then
                       each sample's completion routes; each part is [layers, tokens, experts]

A rank that holds a few layers reads just those. Sizes follow from the token counts, so nothing
but ids is in the file; a checksum for every 64 KiB and the exceptions are columns of the shard:

`route_checksums` uint64; `route_prompt` int32 [N], which of its group's prompt parts a sample has
(absent: the only one); `route_exceptions` int32 [E, 4]: sample, first row, end row, weight version
(-1: no route). A row without exception was computed by the version that sampled the next token."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import xxhash

from grpo_megatron.errors import EngineError
from grpo_megatron.files import open_atomically
from grpo_megatron.routing.shape import RouteShape, RouteStatus, invalid
from grpo_megatron.types import Completion, RolloutGroup

BLOCK_BYTES = 1 << 16
_NO_ROUTE = -1
_NO_EXCEPTION = np.iinfo(np.int32).max


def write_routes(
    path: Path,
    groups: Sequence[RolloutGroup[Completion]],
    shape: RouteShape,
    *,
    new: bool = False,
) -> dict[str, np.ndarray]:
    """Write a shard's routes durably; returns their columns.

    Raises EngineError where the engine's routes are not those of a model of `shape`,
    FileExistsError where `path` exists and is to be `new`."""
    prompt_part: list[int] = []
    checksums: list[int] = []
    with open_atomically(path, new=new) as file:
        for block in _blocks(_parts(groups, shape, prompt_part)):
            file.write(block)
            checksums.append(xxhash.xxh3_64_intdigest(block))
    exceptions = []
    sample = 0
    for group in groups:
        for completion in group.completions:
            for span in _exceptions(completion, len(group.prompt.token_ids)):
                exceptions.append((sample, *span))
            sample += 1
    columns = {"route_checksums": np.array(checksums, np.uint64)}
    if any(prompt_part):
        columns["route_prompt"] = np.array(prompt_part, np.int32)
    if exceptions:
        columns["route_exceptions"] = np.array(exceptions, np.int32)
    return columns


def _parts(
    groups: Sequence[RolloutGroup[Completion]], shape: RouteShape, prompt_part: list[int]
) -> Iterator[np.ndarray]:
    """Yield the parts of a file in order, [tokens, layers, experts]; which prompt part of its group
    each sample has is appended to `prompt_part`."""
    for group in groups:
        prompts, part_of_sample = _distinct_prompts(group, shape)
        prompt_part += part_of_sample
        yield from prompts
        start = len(group.prompt.token_ids)
        for completion in group.completions:
            num_rows = max(len(completion.token_ids) - 1, 0)
            yield _ids(completion, start, start + num_rows, shape)


def _blocks(parts: Iterable[np.ndarray]) -> Iterator[bytes]:
    """Yield parts [tokens, layers, experts] layer by layer, in blocks; the last one is shorter."""
    data = bytearray()
    for part in parts:
        data += np.ascontiguousarray(part.transpose(1, 0, 2)).tobytes()
        while len(data) >= BLOCK_BYTES:
            yield bytes(data[:BLOCK_BYTES])
            del data[:BLOCK_BYTES]
    if data:
        yield bytes(data)


def _ids(completion: Completion, start: int, end: int, shape: RouteShape) -> np.ndarray:
    """Return routes of rows [start, end), [tokens, layers, experts]; zeros where there are none."""
    if completion.routes is None:
        return np.zeros((end - start, len(shape.layers), shape.experts_per_token), shape.dtype)
    _, num_layers, num_experts = completion.routes.shape
    if num_layers <= max(shape.layers) or num_experts != shape.experts_per_token:
        raise EngineError(
            f"the engine's routes have {num_layers} layers of {num_experts} experts "
            f"per token, the model has {shape}",
            where="routed experts",
            remedy="the engine serves another model than the trainer's",
        )
    return completion.routes[start:end, list(shape.layers)].astype(shape.dtype, copy=False)


def _distinct_prompts(
    group: RolloutGroup[Completion], shape: RouteShape
) -> tuple[list[np.ndarray], list[int]]:
    """Return the different prompt routes of a group, and which each sample has."""
    parts: list[np.ndarray] = []
    part_of_sample = []
    for completion in group.completions:
        ids = _ids(completion, 0, len(group.prompt.token_ids), shape)
        number = _place_of(ids, parts)
        if number == len(parts):
            parts.append(ids)
        part_of_sample.append(number)
    return parts, part_of_sample


def _place_of(ids: np.ndarray, parts: Sequence[np.ndarray]) -> int:
    """Return where in `parts` the same ids are; their number where nowhere."""
    for number, part in enumerate(parts):
        if np.array_equal(part, ids):
            return number
    return len(parts)


def _exceptions(completion: Completion, num_prompt: int) -> Iterator[tuple[int, int, int]]:
    """Yield spans of rows (first, end, version) without a route of the version that used them."""
    exception = _exceptions_by_row(completion, num_prompt)
    firsts = np.flatnonzero(np.diff(exception, prepend=np.iinfo(np.int32).min))
    ends = [*firsts[1:], len(exception)]
    for first, end in zip(firsts, ends, strict=True):
        if exception[first] != _NO_EXCEPTION:
            yield int(first), int(end), int(exception[first])


def _exceptions_by_row(completion: Completion, num_prompt: int) -> np.ndarray:
    """Return which version routed each row where it is not the one that used it, int64; else a
    number that is no version."""
    num_rows = num_routed(completion, num_prompt)
    sampled_by = np.zeros(num_rows, np.int64)
    if completion.versions:
        sampled_by[:] = completion.versions[0].version
    for span in completion.versions:
        sampled_by[num_prompt - 1 + span.start : num_prompt - 1 + span.end] = span.version
    routed_by = np.full(num_rows, _NO_ROUTE)
    if completion.routes is not None:
        for span in completion.route_versions:
            routed_by[span.start : span.end] = span.version
    return np.where(routed_by != sampled_by, routed_by, _NO_EXCEPTION)


def num_routed(completion: Completion, num_prompt: int) -> int:
    """Return how many rows of a sample may have a route: all but the last."""
    return num_prompt + len(completion.token_ids) - 1


def first_difference(
    one: Completion, num_prompt: int, other: Completion, num_other_prompt: int, num_rows: int
) -> int:
    """Return the first of `num_rows` rows on which two samples have other routes, or a usable one
    on one side only; `num_rows` where there is none. Both have as many (`num_routed`)."""
    status = _exceptions_by_row(one, num_prompt)[:num_rows]
    differs = status != _exceptions_by_row(other, num_other_prompt)[:num_rows]
    if one.routes is not None and other.routes is not None:
        unequal = one.routes[:num_rows] != other.routes[:num_rows]
        differs |= unequal.any((1, 2))
    elif one.routes is not other.routes:
        differs[:] = True
    if not differs.any():
        return num_rows
    return int(differs.argmax())


class RouteFile:
    """Read access to one shard's routes; bytes stay on disk until they are sliced."""

    def __init__(self, path: Path, columns: Mapping[str, np.ndarray], shape: RouteShape):
        self.path = path
        self.shape = shape
        self._checksums = columns["route_checksums"]
        self._is_bad: dict[int, bool] = {}  # of the blocks that were looked at
        self._bytes = np.empty(0, np.uint8)
        if path.exists() and path.stat().st_size > 0:  # of nothing there is no memory map
            self._bytes = np.memmap(path, np.uint8, "r")
        exceptions = columns.get("route_exceptions", np.empty((0, 4), np.int32))
        self._exceptions = exceptions[np.argsort(exceptions[:, 0], kind="stable")]
        self._place(columns)

    def _place(self, columns: Mapping[str, np.ndarray]) -> None:
        """Find where each sample's prompt and completion routes begin, in bytes: the file has one
        group after the other, of each its prompt parts and then its completions.

        Arrays are int64; [Q] is by group, [N] by sample, and samples are in the order of groups."""
        group = np.asarray(columns["group"])  # [N]
        prompt_part = np.asarray(columns.get("route_prompt", np.zeros(len(group), np.int32)))  # [N]
        prompt_lengths = np.diff(columns["prompt_offsets"])  # [Q]
        num_groups = len(prompt_lengths)
        self._num_prompt = prompt_lengths[group]  # [N]
        self._num_completion = np.maximum(np.diff(columns["completion_offsets"]) - 1, 0)  # [N]

        part_bytes = np.asarray(self.shape.num_bytes(prompt_lengths))  # [Q], of one prompt part
        num_parts = np.zeros(num_groups, np.int64)  # [Q]
        np.maximum.at(num_parts, group, prompt_part + 1)
        parts_bytes = num_parts * part_bytes  # [Q]

        completion_bytes = np.asarray(self.shape.num_bytes(self._num_completion))  # [N]
        bytes_before = np.concatenate([[0], np.cumsum(completion_bytes)])  # [N+1], completions only
        first_sample = np.searchsorted(group, np.arange(num_groups + 1))  # [Q+1]
        bytes_before_group = bytes_before[first_sample]  # [Q+1], completions only
        completions_bytes = np.diff(bytes_before_group)  # [Q]

        group_bytes = parts_bytes + completions_bytes  # [Q]
        group_start = np.cumsum(group_bytes) - group_bytes  # [Q]
        completions_start = group_start + parts_bytes  # [Q]
        bytes_within_group = bytes_before[:-1] - bytes_before_group[group]  # [N]
        self._prompt_start = group_start[group] + prompt_part * part_bytes[group]  # [N]
        self._sample_start = completions_start[group] + bytes_within_group  # [N]

    def read(self, sample: int, layers: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """Return routes of a sample in some `layers`, which are positions in `shape.layers`.

        Returns ids [len(layers), T_p + T - 1, K], RouteStatus uint8 [len(layers), T_p + T - 1]."""
        prompt_ids, prompt_status = self._part(
            self._prompt_start[sample], self._num_prompt[sample], layers
        )
        own_ids, own_status = self._part(
            self._sample_start[sample], self._num_completion[sample], layers
        )
        ids = np.concatenate([prompt_ids, own_ids], 1)
        status = np.concatenate([prompt_status, own_status], 1)
        is_invalid = (status == RouteStatus.OK) & invalid(ids, self.shape.num_experts)
        status[is_invalid] = RouteStatus.INVALID
        first, last = np.searchsorted(self._exceptions[:, 0], [sample, sample + 1])
        for _, start, end, version in self._exceptions[first:last]:
            why = RouteStatus.STALE
            if version == _NO_ROUTE:
                why = RouteStatus.MISSING
            status[:, start:end] = why
        return ids, status

    def prompt_key(self, sample: int) -> tuple[int, ...]:
        """Return what is equal for two samples of a group exactly where routes and their status are
        the same on all tokens of the prompt."""
        num_prompt = int(self._num_prompt[sample])
        key = [int(self._prompt_start[sample])]
        first, last = np.searchsorted(self._exceptions[:, 0], [sample, sample + 1])
        for _, start, end, version in self._exceptions[first:last].tolist():
            if start < num_prompt:
                key += [start, min(end, num_prompt), int(version == _NO_ROUTE)]
        return tuple(key)

    def _part(
        self, start: int, tokens: int, layers: Sequence[int]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Read as `read` does, but only the part of `tokens` rows that begins at byte `start`."""
        size = int(self.shape.num_bytes(tokens)) // max(len(self.shape.layers), 1)
        row = self.shape.experts_per_token * self.shape.dtype.itemsize
        ids = np.zeros((len(layers), tokens, self.shape.experts_per_token), self.shape.dtype)
        status = np.full((len(layers), tokens), RouteStatus.OK, np.uint8)
        for i, layer in enumerate(layers):
            begin = int(start) + layer * size
            data = np.asarray(self._bytes[begin : begin + size])
            if len(data) == size:
                ids[i] = data.view(self.shape.dtype).reshape(ids[i].shape)
            for bad in self._bad_blocks(begin, begin + size):
                low = max(bad * BLOCK_BYTES - begin, 0) // row
                high = -(-min((bad + 1) * BLOCK_BYTES - begin, size) // row)
                status[i, low:high] = RouteStatus.CORRUPT
        return ids, status

    def _bad_blocks(self, begin: int, end: int) -> list[int]:
        """Blocks in a range of bytes whose checksum disagrees; each is read once."""
        if end <= begin:
            return []
        bad = []
        for block in range(begin // BLOCK_BYTES, (end - 1) // BLOCK_BYTES + 1):
            if block not in self._is_bad:
                data = self._bytes[block * BLOCK_BYTES : (block + 1) * BLOCK_BYTES]
                found = xxhash.xxh3_64_intdigest(data.data)
                self._is_bad[block] = found != self._checksums[block]
            if self._is_bad[block]:
                bad.append(block)
        return bad
