"""What ranks of worker groups are forked with: torch, Megatron and the trainer."""

import gc

import torch._dynamo  # noqa: F401  (the first optimizer of a rank imports it, in a second or two)

# isort: split
from grpo_megatron.trainer.megatron import platform  # noqa: F401  (before Megatron)

# isort: split
import grpo_megatron.trainer.service  # noqa: F401

gc.freeze()  # as ranks of a run do
