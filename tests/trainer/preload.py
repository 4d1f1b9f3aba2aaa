"""What ranks of worker groups are forked with: torch, Megatron and the trainer."""

import gc

from grpo_megatron.trainer.megatron import platform  # noqa: F401  (before Megatron)

# isort: split
import grpo_megatron.trainer.service  # noqa: F401

gc.freeze()  # as ranks of a run do
