"""Which ranks are traced, and with how much work."""

from dataclasses import dataclass

import numpy as np

from grpo_megatron.batching.prefix_rows import RowTree
from grpo_megatron.batching.row_split import split_row
from grpo_megatron.config.run import RunConfig
from grpo_megatron.config.trainer import TrainerConfig
from grpo_megatron.plan.memory import (
    fullest_static,
    has_frozen_routers,
    samples_in_microbatch,
    workload_of,
)
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
    read_at: tuple[int, ...] = ()
    """Tokens of every completion whose scalars a reward model is trained on; empty: all tokens of
    the completion are the policy's."""

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
        return self.samples_per_microbatch * len(self._policy_places)

    @property
    def _policy_places(self) -> np.ndarray:
        """Which tokens of every completion are the policy's, int64, ascending."""
        if self.read_at:
            return np.array(self.read_at, np.int64)
        return np.arange(self.completion)

    def own_policy_tokens(self, layout: TrainerConfig, place: int) -> int:
        """Return the policy tokens that a context-parallel rank looks at. place: its number among
        the ranks of its stage."""
        lengths = np.full(self.samples_per_microbatch, self.sequence)
        row = RowTree(lengths, np.full(len(lengths), -1), ())
        num_ranks = layout.context_parallel_size
        owners = split_row(row, num_ranks, self.token_multiple // num_ranks).owners
        places = self.sequence - self.completion - 1 + self._policy_places
        rows = places + self.sequence * np.arange(self.samples_per_microbatch)[:, None]
        own = place // layout.tensor_parallel_size % num_ranks
        return int((owners[rows] == own).sum())


def load_of(config: RunConfig, sizes: Sizes, stage: int) -> Load:
    """Full micro-batches, as many as fill the pipeline up to `stage`."""
    layout = config.trainer
    work = workload_of(config, sizes)
    sequence = config.rollout.max_model_len
    samples = max(min(work["tokens"] // sequence, samples_in_microbatch(config)), 1)
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
        completion=longest_completion(config),
        token_multiple=layout.token_multiple,
        read_at=_read_at(config),
    )


def _read_at(config: RunConfig) -> tuple[int, ...]:
    """Return where a reward model reads a completion of full length: at its end, and one that
    judges steps also in the middle."""
    completion = longest_completion(config)
    if config.kind != "reward_model":
        return ()
    if config.preferences.rows == "steps":
        return (completion // 2, completion - 1)
    return (completion - 1,)


def longest_completion(config: RunConfig) -> int:
    """Return tokens of the longest completion that leaves room for a prompt."""
    return min(config.rollout.max_new_tokens, config.rollout.max_model_len - 1)


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
