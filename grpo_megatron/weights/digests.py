"""Digests of tensors: a fast position-dependent one for every publish, sha256 on demand.

`file_digest` (XXH3, 3 GB/s a core) is for files, which are read and written on the CPU only.

The fast digest splits a tensor's bytes into blocks of `BLOCK_WORDS` little-endian 64-bit words w_i
and computes for each block, with a fixed key k_i per position and wrapping 64-bit arithmetic,

    product = sum_i lo32(w_i + k_i) * hi32(w_i + k_i)        total = sum_i w_i

The first sum is NH, the universal hash inside UMAC (Black et al., CRYPTO 1999): two blocks that
differ agree in it with probability 2^-32 and it depends on positions. The second catches every
single changed word with certainty. The sums of all blocks, in order, then go through BLAKE2b
together with dtype and shape. Only integer additions, products and masks occur, so that a CPU and
a GPU give the same value; partial sums wrap, so their order does not matter.

It guards against accidents, not against an adversary: use `sha256_tensor` for that.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache

import numpy as np
import torch
import xxhash

BLOCK_WORDS = 1 << 15
"""64-bit words a block; 256 KiB of data, small enough for a core's second-level cache."""

_DEVICE_BLOCKS = 512
"""Blocks hashed at once on an accelerator (128 MiB of data, so 256 MiB of temporaries)."""

_LOW_32 = 0xFFFFFFFF
_KEY_SEED = 0x9E3779B97F4A7C15
_MASK_64 = (1 << 64) - 1


def digest_tensor(tensor: torch.Tensor) -> str:
    """Position-dependent digest of dtype, shape and bytes.

    A contiguous tensor is read in place with bounded extra memory; another one is copied first.

    Args:
        tensor: Any dtype and shape, on a CPU or an accelerator, little-endian.

    Returns:
        32 hexadecimal digits, the same on every device.
    """
    data = _bytes_of(tensor)
    sums = hashlib.blake2b(_header(tensor), digest_size=16)
    if data.device.type == "cpu":
        sums.update(_block_sums_cpu(data.numpy()))
        return sums.hexdigest()
    whole = data.numel() // (8 * BLOCK_WORDS)
    sums.update(_block_sums(_as_words(data[: whole * 8 * BLOCK_WORDS]).view(whole, BLOCK_WORDS)))
    rest = data[whole * 8 * BLOCK_WORDS :]
    if rest.numel():
        padded = torch.zeros(-(-rest.numel() // 8) * 8, dtype=torch.uint8, device=data.device)
        padded[: rest.numel()] = rest
        sums.update(_block_sums(padded.view(torch.int64).view(1, -1)))
    return sums.hexdigest()


def file_digest(tensor: torch.Tensor) -> str:
    """XXH3-128 of dtype, shape and bytes of a CPU tensor: 32 hexadecimal digits."""
    state = xxhash.xxh3_128(_header(tensor))
    state.update(memoryview(_bytes_of(tensor).numpy()))
    return state.hexdigest()


def sha256_tensor(tensor: torch.Tensor) -> str:
    """SHA-256 of dtype, shape and bytes as 64 hexadecimal digits, in chunks of 64 MiB."""
    data, state = _bytes_of(tensor), hashlib.sha256(_header(tensor))
    for start in range(0, data.numel(), 64 << 20):
        state.update(memoryview(data[start : start + (64 << 20)].cpu().numpy()))
    return state.hexdigest()


def _header(tensor: torch.Tensor) -> bytes:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return f"{dtype}:{','.join(map(str, tensor.shape))};".encode()


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """`uint8 [nbytes]`, sharing storage when `tensor` is contiguous."""
    flat = tensor.detach().contiguous().reshape(-1)
    return flat.view(torch.uint8)


def _as_words(data: torch.Tensor) -> torch.Tensor:
    """`int64 [nbytes / 8]`; copies only where the storage is not aligned to a word."""
    if data.data_ptr() % 8 or data.storage_offset() % 8:
        data = data.clone()
    return data.view(torch.int64)


def _block_sums(words: torch.Tensor) -> bytes:
    """Both sums of every row.

    Args:
        words: int64 [blocks, at most BLOCK_WORDS].

    Returns:
        16 bytes a block, in order.
    """
    keys = _keys(words.device)[: words.shape[1]]
    scratch = torch.empty(2, _DEVICE_BLOCKS, words.shape[1], dtype=torch.int64,
                          device=words.device)
    out = torch.empty(words.shape[0], 2, dtype=torch.int64, device=words.device)
    for start in range(0, words.shape[0], _DEVICE_BLOCKS):
        rows = words[start : start + _DEVICE_BLOCKS]
        low, high = scratch[0, : rows.shape[0]], scratch[1, : rows.shape[0]]
        torch.add(rows, keys, out=low)
        torch.bitwise_right_shift(low, 32, out=high)
        high.bitwise_and_(_LOW_32)
        low.bitwise_and_(_LOW_32).mul_(high)
        torch.sum(low, dim=1, out=out[start : start + _DEVICE_BLOCKS, 0])
        torch.sum(rows, dim=1, out=out[start : start + _DEVICE_BLOCKS, 1])
    return out.cpu().numpy().tobytes()


def _block_sums_cpu(data: np.ndarray) -> bytes:
    """`_block_sums` of `data` (uint8 [nbytes]), its last word padded with zeros.

    NumPy because a small model has hundreds of small tensors: a torch call costs ten times as
    much as its work on one.
    """
    if data.size % 8:
        data = np.concatenate([data, np.zeros(-data.size % 8, np.uint8)])
    words, keys = data.view(np.uint64), _keys_cpu()
    scratch = np.empty((2, min(words.size, BLOCK_WORDS)), np.uint64)
    sums = np.empty((-(-words.size // BLOCK_WORDS), 2), np.uint64)
    for block, out in enumerate(sums):
        row = words[block * BLOCK_WORDS : (block + 1) * BLOCK_WORDS]
        low, high = scratch[:, : row.size]
        np.add(row, keys[: row.size], out=low)
        np.right_shift(low, 32, out=high)
        np.bitwise_and(low, _LOW_32, out=low)
        np.multiply(low, high, out=low)
        out[:] = low.sum(), row.sum()
    return sums.tobytes()


@lru_cache(maxsize=1)
def _keys_cpu() -> np.ndarray:
    return _keys(torch.device("cpu")).numpy().view(np.uint64)


@lru_cache(maxsize=8)
def _keys(device: torch.device) -> torch.Tensor:
    """`int64 [BLOCK_WORDS]`: the SplitMix64 sequence (Steele et al., OOPSLA 2014)."""
    values = []
    for index in range(1, BLOCK_WORDS + 1):
        word = (index * _KEY_SEED) & _MASK_64
        word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & _MASK_64
        word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & _MASK_64
        word ^= word >> 31
        values.append(word - (1 << 64) if word >> 63 else word)
    return torch.tensor(values, dtype=torch.int64, device=device)
