"""Which ranks are traced, and with how much work."""

from dataclasses import dataclass

import numpy as np

from grpo_megatron.batching.prefix_rows import RowTree
from grpo_megatron.batching.row_split import split_row
from grpo_megatron.config.run import RunConfig
from grpo_megatron.config.trainer import TrainerConfig
from grpo_megatron.plan.memory import fullest_static, has_frozen_routers, workload_of
from grpo_megatron.plan.weights import Sizes


@dataclass(frozen=True)
class Load:
    """What a traced rank computes."""

    num_microbatches: int
    of_recipe: int
    """Micro-batches of an optimizer step of the recipe; more than a trace needs change nothing."""
    samples_per_microbatch: int
    sequence: int
    """Tokens of every sample."""
    completion: int
    """Tokens of every completion."""
    token_multiple: int
    """What a micro-batch is padded to."""

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch, without padding."""
        return self.samples_per_microbatch * self.sequence

    @property
    def padded_tokens(self) -> int:
        """Tokens of a micro-batch, with padding."""
        return -(-self.tokens // self.token_multiple) * self.token_multiple

    @property
    def policy_tokens(self) -> int:
        """Tokens of a micro-batch whose log-probs are wanted."""
        return self.samples_per_microbatch * self.completion

    def own_policy_tokens(self, layout: TrainerConfig, place: int) -> int:
        """Return the policy tokens that a context-parallel rank looks at. place: its number among
        the ranks of its stage."""
        lengths = np.full(self.samples_per_microbatch, self.sequence)
        row = RowTree(lengths, np.full(len(lengths), -1), ())
        num_ranks = layout.context_parallel_size
        owners = split_row(row, num_ranks, self.token_multiple // num_ranks).owners
        places = np.arange(self.sequence - self.completion - 1, self.sequence - 1)
        rows = places + self.sequence * np.arange(self.samples_per_microbatch)[:, None]
        own = place // layout.tensor_parallel_size % num_ranks
        return int((owners[rows] == own).sum())


def load_of(config: RunConfig, sizes: Sizes, stage: int) -> Load:
    """Full micro-batches, as many as fill the pipeline up to `stage`."""
    layout = config.trainer
    work = workload_of(config, sizes)
    sequence = config.rollout.max_model_len
    samples = max(work["tokens"] // sequence, 1)
    enough = max(layout.pipeline_parallel_size - stage, 2)
    multiple = 1
    if layout.virtual_pipeline_parallel_size:
        enough = 2 * layout.pipeline_parallel_size
        multiple = layout.pipeline_parallel_size
    of_recipe = -(-work["num_microbatches"] // multiple) * multiple
    return Load(
        num_microbatches=min(enough, of_recipe),
        of_recipe=of_recipe,
        samples_per_microbatch=samples,
        sequence=sequence,
        completion=min(config.rollout.max_new_tokens, sequence - 1),
        token_multiple=layout.token_multiple,
    )


def ranks_to_trace(config: RunConfig, sizes: Sizes) -> list[int]:
    """Return the fullest rank of the first pipeline stage of every kind."""
    on_gpu = config.placement.gpus_per_node > 0
    ranks = []
    for stage in sizes.first_stages():
        fullest = fullest_static(
            sizes, stage, frozen_routers=has_frozen_routers(config), on_gpu=on_gpu
        )
        ranks.append(fullest.rank)
    return ranks


def stage_and_place(layout: TrainerConfig, rank: int) -> tuple[int, int]:
    """Pipeline stage of a rank, and its number among the ranks of the stage."""
    return divmod(rank, layout.num_ranks // layout.pipeline_parallel_size)
