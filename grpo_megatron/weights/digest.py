"""Digests of tensors that are computed where the bytes are, with operations that torch has.

The bytes are read as a table of 64-bit words, `_WIDTH` wide. A digest is two numbers: the weighted
sum of the sums of its rows, and that of the sums of its columns, modulo 2^64. One changed word
changes both; words that changed places change one. It guards against accidents, not against an
adversary, is the same on every device, and takes two passes over the bytes (a hash function such as
XXH3 does not exist among torch's operations)."""

from functools import lru_cache

import numpy as np
import torch
import xxhash

from grpo_megatron.weights.tensor_entry import dtype_name

_WIDTH = 1024
_BLOCK_ROWS = 64
_WORD_BYTES = 8
_SIGN = 1 << 63
_ODD_FACTORS = (0x2545F4914F6CDD1D, 0x5851F42D4C957F2D)  # of xorshift* and of Knuth's MMIX


def digest_of(tensor: torch.Tensor, label: str = "") -> torch.Tensor:
    """Return the digest of a contiguous tensor: int64 [2], on its device.

    label: what else must be the same, for instance the tensor's name. Equal bytes of another type
    or shape have another digest."""
    data = tensor.detach().reshape(-1).view(torch.uint8)
    if data.device.type == "cpu":
        return _sums_by_numpy(data) + _label_number(tensor, label)
    return _sums_by_torch(data) + _label_number(tensor, label)


def _sums_by_torch(data: torch.Tensor) -> torch.Tensor:
    """Weighted sums of rows and columns: int64 [2]. data: uint8 [bytes]."""
    words = _as_words(data)
    whole_rows = words.numel() // _WIDTH
    table = words[: whole_rows * _WIDTH].view(whole_rows, _WIDTH)
    row_sums = table.sum(1)
    column_sums = table.sum(0)
    rest = words[whole_rows * _WIDTH :]
    if rest.numel() > 0:
        row_sums = torch.cat((row_sums, rest.sum().view(1)))
        column_sums[: rest.numel()] += rest
    rows = (row_sums * _weights(row_sums.numel(), data.device, 0)).sum()
    columns = (column_sums * _weights(_WIDTH, data.device, 1)).sum()
    return torch.stack((rows, columns))


def _sums_by_numpy(data: torch.Tensor) -> torch.Tensor:
    """Return the same sums as `_sums_by_torch`. numpy is quicker on a CPU, above all for small
    tensors; blocks of rows are read twice while they are in a cache."""
    words = _as_words(data).numpy()
    whole_rows = len(words) // _WIDTH
    rest = words[whole_rows * _WIDTH :]
    found = np.zeros(2, np.int64)
    if whole_rows == 0:  # most pieces of a small model: a row that is not filled
        found[0] = rest.sum(keepdims=True) @ _numpy_weights(1, 0)
        found[1] = rest @ _numpy_weights(_WIDTH, 1)[: len(rest)]
        return torch.from_numpy(found)
    row_sums = np.zeros(-(-len(words) // _WIDTH), np.int64)
    column_sums = np.zeros(_WIDTH, np.int64)
    table = words[: whole_rows * _WIDTH].reshape(whole_rows, _WIDTH)
    for start in range(0, whole_rows, _BLOCK_ROWS):
        block = table[start : start + _BLOCK_ROWS]
        block.sum(1, out=row_sums[start : start + len(block)])
        column_sums += block.sum(0)
    if len(rest) > 0:
        row_sums[-1] = rest.sum()
        column_sums[: len(rest)] += rest
    found[0] = row_sums @ _numpy_weights(len(row_sums), 0)
    found[1] = column_sums @ _numpy_weights(_WIDTH, 1)
    return torch.from_numpy(found)


def _as_words(data: torch.Tensor) -> torch.Tensor:
    """Return bytes as int64 [ceil(bytes / 8)], filled up with zeros. Copies only what must be."""
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


@lru_cache(maxsize=64)
def _numpy_weights(count: int, lane: int) -> np.ndarray:
    weights: np.ndarray = _weights(count, torch.device("cpu"), lane).numpy()
    return weights


def _label_number(tensor: torch.Tensor, label: str) -> int:
    """Return a signed 64-bit number of type, shape and label."""
    dtype = dtype_name(tensor.dtype)
    sizes = ",".join(map(str, tensor.shape))
    number = xxhash.xxh3_64_intdigest(f"{label};{dtype};{sizes}".encode())
    return number - _SIGN
