"""What a real training step takes, measured inside a worker."""

from __future__ import annotations

import ctypes
import gc
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist

from grpo_megatron.batching.store import SampleTable
from grpo_megatron.config.run import RunConfig
from grpo_megatron.trainer.megatron import platform  # noqa: F401
from grpo_megatron.trainer.megatron.policy import build_policy
from grpo_megatron.trainer.megatron.process_groups import (
    RankInfo,
    initialize,
    seed_everything,
    shutdown,
)
from grpo_megatron.trainer.megatron.upstream_fixes import create_adam_state
from grpo_megatron.trainer.steps.optimizer_step import logprob_pass, prepare
from grpo_megatron.trainer.steps.references import References
from grpo_megatron.trainer.steps.rl_update import Training
from tests.trainer.worker_group import fresh_store


def anonymous_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("no RssAnon in /proc/self/status")


@contextmanager
def _watched(found: list[int]) -> Iterator[None]:
    """Appends the highest anonymous memory inside the block above that before it."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    before = highest = anonymous_bytes()
    done = threading.Event()

    def watch() -> None:
        nonlocal highest
        while not done.is_set():
            highest = max(highest, anonymous_bytes())
            time.sleep(0.002)

    thread = threading.Thread(target=watch)
    thread.start()
    yield
    done.set()
    thread.join()
    found.append(highest - before)


_MMAP_THRESHOLD = -3
"""Of mallopt(3): blocks of this size are mapped apart."""


def peak_bytes(
    hf: dict[str, Any],
    recipe: dict[str, Any],
    samples: str,
    *,
    trains: bool = True,
    returns_blocks: bool = False,
) -> list[int]:
    """Highest anonymous memory of every rank above that after imports, with Adam's moments there
    from the start; where it does not train, of a pass for log-probs. returns_blocks: the C library
    gives freed blocks of 256 KiB back at once: holes between many small ones are no memory of the
    step."""
    config, found = RunConfig.model_validate(recipe), []
    if returns_blocks:
        ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, 256 << 10)
    if dist.is_initialized():
        shutdown()
    info = RankInfo.from_environment()
    initialize(config.trainer, info, fresh_store())
    seed_everything(0)
    table = SampleTable(Path(samples))
    with _watched(found):
        policy = build_policy(hf, config.trainer, config.optimizer, trains=trains)
        if trains:
            create_adam_state(policy.optimizer)
            Training(config, policy, References(config), table, {}).run(0, 1)
        else:
            logprob_pass(policy, prepare(config.trainer, table, np.arange(len(table))))
    everywhere: list = [None] * info.world_size
    dist.all_gather_object(everywhere, found[0])
    return everywhere
