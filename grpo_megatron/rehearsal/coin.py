"""The reward that lets a model which knows nothing be right half of the time."""

import zlib

COMPONENT = "rehearsal_coin"


def coin(completion: str, answer: str, *, prompt: str, token_ids: tuple[int, ...]) -> float:
    """1 or 0 by a checksum of prompt and completion: the same sample always has the same score."""
    tokens = ",".join(map(str, token_ids))
    return float(zlib.crc32(f"{prompt}\n{tokens}".encode()) % 2)
