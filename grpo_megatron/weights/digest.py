"""Digests of tensors by torch's own operations, so that they are computed where the bytes are.

The bytes are read as a table of 64-bit words, `_WIDTH` wide. A digest is two numbers: the weighted
sum of the sums of its rows, and that of the sums of its columns, modulo 2^64. One changed word
changes both; words that changed places change one. It guards against accidents, not against an
adversary, is the same on every device, and takes two passes over the bytes (a hash function such as
XXH3 does not exist among torch's operations)."""

from functools import lru_cache

import torch
import xxhash

from grpo_megatron.weights.transfer_plan import dtype_name

_WIDTH = 1024
_BLOCK_ROWS = 32
_WORD_BYTES = 8
_SIGN = 1 << 63
_ODD_FACTORS = (0x2545F4914F6CDD1D, 0x5851F42D4C957F2D)  # of xorshift* and of Knuth's MMIX


def digest_of(tensor: torch.Tensor, label: str = "") -> torch.Tensor:
    """Return the digest of a contiguous tensor: int64 [2], on its device.

    label: what else must be the same, for instance the tensor's name. Equal bytes of another type
    or shape have another digest."""
    words = _as_words(tensor)
    whole_rows = words.numel() // _WIDTH
    table = words[: whole_rows * _WIDTH].view(whole_rows, _WIDTH)
    row_sums, column_sums = _sums(table)
    rest = words[whole_rows * _WIDTH :]
    if rest.numel() > 0:
        row_sums = torch.cat((row_sums, rest.sum().view(1)))
        column_sums[: rest.numel()] += rest
    rows = (row_sums * _weights(row_sums.numel(), tensor.device, 0)).sum()
    columns = (column_sums * _weights(_WIDTH, tensor.device, 1)).sum()
    return torch.stack((rows, columns)) + _label_number(tensor, label)


def _sums(table: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Sums of the rows and of the columns of `table`: int64 [rows], [columns]."""
    if table.device.type != "cpu":
        return table.sum(1), table.sum(0)
    # torch's `sum(0)` leaves a CPU's vector units and caches unused; blocks of rows fit into both.
    row_sums = table.new_zeros(table.shape[0])
    block_sums = table.new_zeros(_BLOCK_ROWS, _WIDTH)
    for block, sums in zip(table.split(_BLOCK_ROWS), row_sums.split(_BLOCK_ROWS), strict=True):
        block_sums[: block.shape[0]].add_(block)
        torch.sum(block, 1, out=sums)
    return row_sums, block_sums.sum(0)


def _as_words(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes as int64 [ceil(bytes / 8)], filled up with zeros. Copies only what must be."""
    data = tensor.detach().reshape(-1).view(torch.uint8)
    missing = -data.numel() % _WORD_BYTES
    if missing:
        data = torch.cat((data, data.new_zeros(missing)))
    if data.storage_offset() % _WORD_BYTES:
        data = data.clone()
    return data.view(torch.int64)


@lru_cache(maxsize=64)
def _weights(count: int, device: torch.device, lane: int) -> torch.Tensor:
    """Odd numbers that look random: int64 [count]."""
    index = torch.arange(1, count + 1, dtype=torch.int64, device=device)
    mixed = index * _ODD_FACTORS[lane]
    mixed = (mixed ^ (mixed >> 29)) * _ODD_FACTORS[1 - lane]
    return (mixed ^ (mixed >> 32)) | 1


def _label_number(tensor: torch.Tensor, label: str) -> int:
    """A signed 64-bit number of type, shape and label."""
    dtype = dtype_name(tensor.dtype)
    sizes = ",".join(map(str, tensor.shape))
    number = xxhash.xxh3_64_intdigest(f"{label};{dtype};{sizes}".encode())
    return number - _SIGN
