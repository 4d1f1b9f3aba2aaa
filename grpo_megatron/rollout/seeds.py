"""Seeds of what is sampled."""

import hashlib


def derive_seed(*parts: int | str) -> int:
    """Return a seed in [0, 2^31) that depends on what is sampled, never on when or where: `parts`
    are, for example, run seed, step, prompt id and sample index.

    Neighbouring inputs give unrelated seeds, whereas vLLM's children of one request (`n > 1`) use
    seed, seed + 1, ... so that neighbouring prompt seeds would overlap."""
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in parts)
    digest = hashlib.blake2b(text.encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") & 0x7FFFFFFF
