"""Random inputs of the log-prob head, the same in the test and in the workers."""

from __future__ import annotations

import torch


def head_inputs(seed: int, vocab_size: int) -> dict[str, torch.Tensor]:
    """float64; 24 positions of which 13 are asked for."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    inputs = {
        "hidden": normal(24, 1, 16),
        "weight": normal(vocab_size, 16),
        "rows": torch.randperm(24, generator=generator)[:13].sort().values,
        "targets": torch.randint(vocab_size, (13,), generator=generator),
        "a": normal(13),
        "b": normal(13),
        "c": normal(13),
    }
    # kept sets of 1 to 30 ids; the target of token 3 is not in its set, token 8 has no set
    sets = torch.rand(13, vocab_size, generator=generator).argsort(1) < torch.randint(
        30, (13, 1), generator=generator
    )
    sets[torch.arange(13), inputs["targets"]] = True
    sets[3, inputs["targets"][3]], sets[3, (inputs["targets"][3] + 1) % vocab_size] = False, True
    sets[8] = False
    return inputs | {"sets": sets}
