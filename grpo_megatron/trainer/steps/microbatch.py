"""From recorded samples to the packed tensors of one optimizer step.

`SampleTable -> MicroBatch`, several of them an `UpdateBatch`; `grpo_megatron.types` shows the whole
chain with an example.

Shape legend: T packed tokens (with padding), S samples, n policy tokens, C context-parallel ranks,
m policy tokens whose log-probs this rank computes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams

from grpo_megatron.batching.packing import ExpertBalance
from grpo_megatron.batching.prefix_rows import RowTree, SamplePaths, lay_out
from grpo_megatron.batching.row_images import RowImages, positions_with_images, row_images
from grpo_megatron.batching.row_split import RowSplit, split_row
from grpo_megatron.batching.store import SampleTable
from grpo_megatron.device_copies import to_device
from grpo_megatron.trainer.megatron.context_parallel import ContextRank, OwnTokens
from grpo_megatron.trainer.megatron.packed_attention import RowPart
from grpo_megatron.trainer.megatron.row_context import RowContext, attach
from grpo_megatron.trainer.vocab_parallel.divergence import TeacherTokens
from grpo_megatron.trainer.vocab_parallel.logprobs import KeptIds
from grpo_megatron.types import SamplingMask

if TYPE_CHECKING:
    from grpo_megatron.trainer.routing.router_replay import Routes, RoutingPass


@dataclass(frozen=True)
class TokenUses:
    """How often the tokens of a row are used, on the host: fp32 [T], padding 0."""

    here: torch.Tensor
    """Samples of the row that have the token."""
    in_update: torch.Tensor
    """Samples of the optimizer step that have it, at least 1."""

    def weights(self, *, once: bool) -> torch.Tensor:
        """Return what a token counts in sums over samples, fp32 [T]; with `once` the same token of
        all samples of the optimizer step counts 1 together."""
        if once:
            return self.here / self.in_update
        return self.here


@dataclass
class MicroBatch:
    """Samples in a row, their policy tokens, and what passes before the loss found on them.

    They lie end to end, but what several begin with is there once (`batching.prefix_rows`), so that
    a token may be the row of several policy tokens. A sample is an episode, of one sequence or of
    several, each a row of the table; its policy tokens are those of all of them, one after another.

    Context-parallel ranks have the same micro-batches, and each computes its part of the row.

    Where a pass has no output on this rank (`is_output_rank`), what it found is empty."""

    index: int  # position in this rank's plan
    table_rows: np.ndarray  # int64: the sequences of all samples, those of one as in the table
    episodes: np.ndarray  # int64 [S]: numbers of the samples (`SampleTable.episode`)
    lengths: tuple[int, ...]  # by sequence, prompt and completion tokens
    split: RowSplit
    """The row, and who computes which of its tokens."""
    own_tokens: torch.Tensor
    """Where this rank's tokens are in the row, int64 [T / C], on the host."""
    tokens: torch.Tensor  # int64 [1, T / C]: this rank's
    position_ids: torch.Tensor  # int64 [1, T / C], or with images [3, T / C]
    packed: PackedSeqParams
    own: OwnTokens
    """The policy tokens that this rank looks at; below are those of all."""
    predicting: torch.Tensor  # int64 [n]: the position before each policy token in the row
    targets: torch.Tensor  # int64 [n]: the policy tokens
    sample: torch.Tensor  # int64 [n], 0..S-1
    uses: TokenUses
    images: RowImages | None
    """What this rank's tokens of images are; None: there are none."""
    rollout_logprobs: torch.Tensor  # fp32 [n]; minus infinity: unusable
    kept: KeptIds | None = None  # of truncated sampling
    # what passes found
    old_logprobs: torch.Tensor | None = None
    """fp32 [n], of the old policy; None: the current policy is the old one."""
    old_untruncated_logprobs: torch.Tensor | None = None
    """fp32 [n], over the whole vocabulary; as `old_logprobs` unless sampling truncates."""
    old_entropies: torch.Tensor | None = None
    """fp32 [n], of the old policy."""
    old_squared_probs: torch.Tensor | None = None
    """fp32 [n], sums of the old policy's squared probabilities; None: advantages need none."""
    ref_logprobs: torch.Tensor | None = None
    """fp32 [n], of the reference, not truncated; None: the objective does not want them."""
    values: torch.Tensor | None = None
    """fp32 [n], of the critic before the step; None: there is no critic."""
    teachers: list[TeacherTokens] = field(default_factory=list)
    """What the teachers of a distillation think of the tokens (`trainer.steps.teachers`)."""

    @property
    def tree(self) -> RowTree:
        """The tree of the row, with padding as its last segment."""
        return self.split.tree

    @property
    def num_tokens(self) -> int:
        """T, with padding."""
        return self.tree.num_tokens

    @property
    def num_real(self) -> int:
        """Tokens before the padding."""
        num_real = 0
        for token_rows in self.tree.token_rows:
            num_real = max(num_real, int(token_rows.max(initial=-1)) + 1)
        return num_real


@dataclass
class UpdateBatch:
    """This rank's micro-batches of one optimizer step."""

    episodes: torch.Tensor
    """int64, ascending: numbers of the samples of all ranks in its loss, that is, of episodes.
    Micro-batches may hold more, of which only advantages need the tokens."""
    microbatches: Sequence[MicroBatch]
    num_tokens: int
    """Prompt and completion tokens of all samples and ranks."""
    num_computed_tokens: int = 0
    """Tokens that all ranks compute, without padding: a shared one counts once a row."""
    num_distinct_tokens: float = 0.0
    """Tokens of all samples, of which one that samples share counts once."""
    experts: ExpertBalance | None = None
    """How even the ranks with the experts are, where it is known beforehand."""
    num_split_prompts: int = 0
    """Prompts that are computed more than once because the engine's routes on them differ."""
    routes: list[Routes] | None = None
    """The engine's, of each micro-batch."""
    old_routing: RoutingPass | None = None
    """What the routers did in the old policy's pass."""

    @property
    def loss_scale(self) -> float:
        """Undoes the averages over micro-batches (Megatron) and over data parallelism."""
        num_replicas = int(parallel_state.get_data_parallel_world_size())
        return float(len(self.microbatches) * num_replicas)


@dataclass
class _Sequences:
    """What a table has of some rows, one entry for each."""

    token_ids: list[np.ndarray] = field(default_factory=list)  # prompt and completion
    policy_places: list[np.ndarray] = field(default_factory=list)  # of policy tokens among these
    targets: list[np.ndarray] = field(default_factory=list)  # the policy tokens
    rollout_logprobs: list[np.ndarray] = field(default_factory=list)  # theirs, of the engine
    masks: list[SamplingMask | None] = field(default_factory=list)  # theirs, where known


def _read_sequences(table: SampleTable, table_rows: np.ndarray) -> _Sequences:
    """Read the rows (int64) of a recorded step."""
    found = _Sequences()
    for row in table_rows.tolist():
        prompt = table.prompt_ids(row)
        completion, logprobs = table.completion(row)
        of_policy = table.policy_places(row)
        mask = table.kept(row)
        if mask is not None:
            mask = mask.of(of_policy)
        found.token_ids.append(np.concatenate([prompt, completion]))
        found.policy_places.append(len(prompt) + of_policy)
        found.targets.append(completion[of_policy])
        found.rollout_logprobs.append(logprobs[of_policy])
        found.masks.append(mask)
    return found


def build_microbatch(
    index: int,
    table: SampleTable,
    table_rows: np.ndarray,
    *,
    pad_to: int,
    device: torch.device,
    paths: SamplePaths | None = None,
    context: ContextRank | None = None,
) -> MicroBatch:
    """Pack `table_rows`, int64; pad the total to a multiple of `pad_to` with a sequence of its own.

    index: position in the rank's plan; paths: what these samples share, by default nothing;
    context: which part of the row is computed here, by default all; `pad_to` is a multiple of its
    size. Without rows there is nothing but padding."""
    if context is None:
        context = ContextRank()
    sequences = _read_sequences(table, table_rows)
    lengths = [len(token_ids) for token_ids in sequences.token_ids]
    if paths is None:
        paths = SamplePaths.without_sharing(np.array(lengths, np.int64))
    split = split_row(lay_out(paths), context.size, pad_to // context.size)
    tree = split.tree
    part = RowPart(split, context.rank)
    tokens, predicting = _laid_out(sequences, tree)
    positions = tree.positions
    images = row_images(table, table_rows, tree)
    if images is not None:
        positions = positions_with_images(table, table_rows, tree)
        images = images.of_rank(split, context.rank)
    own_tokens = split.own(context.rank)
    position_ids = to_device(torch.from_numpy(positions[..., own_tokens]), device)
    flat = partial(_flat, device)
    bounds = flat([np.array(tree.bounds)], torch.int32)
    episodes, episode_of_token = _episodes(sequences, table.episode[table_rows])
    kept, rollout_logprobs = _sampled_from(sequences, device)
    return MicroBatch(
        index=index,
        table_rows=table_rows,
        episodes=episodes,
        lengths=tuple(lengths),
        split=split,
        own_tokens=torch.from_numpy(own_tokens),
        tokens=flat([tokens[own_tokens]], torch.int64)[None],
        position_ids=position_ids.reshape(-1, len(own_tokens)),
        packed=_packed(part, bounds, position_ids),
        own=_own_tokens(part, predicting, sequences.targets, kept, device),
        predicting=flat(predicting, torch.int64),
        targets=flat(sequences.targets, torch.int64),
        sample=flat([episode_of_token], torch.int64),
        uses=_token_uses(tree, paths),
        images=images,
        rollout_logprobs=flat(rollout_logprobs, torch.float32),
        kept=kept,
    )


def _laid_out(sequences: _Sequences, tree: RowTree) -> tuple[np.ndarray, list[np.ndarray]]:
    """Return the tokens of the row, int64 [T], padding 0; and, by sequence, the position before
    each of its policy tokens in the row."""
    tokens = np.zeros(tree.num_tokens, np.int64)
    predicting = []
    for token_ids, places, token_rows in zip(
        sequences.token_ids, sequences.policy_places, tree.token_rows, strict=True
    ):
        tokens[token_rows] = token_ids
        predicting.append(token_rows[places - 1])
    return tokens, predicting


def _episodes(sequences: _Sequences, episode: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the numbers of the episodes, int64 [S]; and which of these each policy token belongs
    to, int64 [n].

    episode: number by sequence, int64; sequences of one are neighbours."""
    is_first = np.diff(episode, prepend=-1) != 0
    counts = np.array([len(targets) for targets in sequences.targets], np.int64)
    place = np.cumsum(is_first) - 1
    return episode[is_first], np.repeat(place, counts)


def _sampled_from(
    sequences: _Sequences, device: torch.device
) -> tuple[KeptIds | None, list[np.ndarray]]:
    """Return the sets that truncated sampling had left, None where nothing was truncated; and the
    engine's log-probs, minus infinity for tokens that are not in their set."""
    if all(mask is None for mask in sequences.masks):
        return None, sequences.rollout_logprobs
    token, ids, known = _joined_masks(sequences.masks, sequences.targets)
    usable = np.where(known, np.concatenate(sequences.rollout_logprobs), -np.inf)
    kept = KeptIds(
        token=_flat(device, [token], torch.int64),
        ids=_flat(device, [ids], torch.int64),
        missing=_flat(device, [~known], torch.bool),
        token_on_host=token,
    )
    return kept, [usable]


def _flat(device: torch.device, parts: Sequence[np.ndarray], dtype: torch.dtype) -> torch.Tensor:
    """Join arrays end to end, on the device."""
    joined = np.empty(0)
    if parts:
        joined = np.concatenate(parts)
    return to_device(torch.as_tensor(joined).to(dtype), device)


def _own_tokens(
    part: RowPart,
    predicting: Sequence[np.ndarray],
    targets: Sequence[np.ndarray],
    kept: KeptIds | None,
    device: torch.device,
) -> OwnTokens:
    """Take the policy tokens before which this rank has a token of the row.

    predicting: positions before all of them, targets: they themselves; int64, by sequence."""
    split = part.split
    all_predicting = np.concatenate([np.empty(0, np.int64), *predicting])
    all_targets = np.concatenate([np.empty(0, np.int64), *targets])
    own_index = np.flatnonzero(split.owners[all_predicting] == part.rank)
    own = OwnTokens(
        predicting=_flat(device, [split.places[all_predicting[own_index]]], torch.int64),
        targets=_flat(device, [all_targets[own_index]], torch.int64),
        kept=kept,
        num_all=len(all_predicting),
    )
    if split.is_whole:
        return own
    return replace(
        own,
        kept=_own_kept(kept, own_index),
        index=_flat(device, [own_index], torch.int64),
        index_on_host=own_index,
    )


def _own_kept(kept: KeptIds | None, own_index: np.ndarray) -> KeptIds | None:
    """Take the kept sets of some policy tokens, int64 [m]."""
    if kept is None:
        return None
    assert kept.token_on_host is not None  # as `build_microbatch` made it
    number_of = np.full(len(kept.missing), -1)
    number_of[own_index] = np.arange(len(own_index))
    numbers = number_of[kept.token_on_host]
    entries = np.flatnonzero(numbers >= 0)
    token = numbers[entries]
    where = kept.ids.device
    return KeptIds(
        token=to_device(torch.from_numpy(token), where),
        ids=kept.ids.index_select(0, to_device(torch.from_numpy(entries), where)),
        missing=kept.missing.index_select(0, to_device(torch.from_numpy(own_index), where)),
        token_on_host=token,
    )


def _packed(part: RowPart, bounds: torch.Tensor, positions: torch.Tensor) -> PackedSeqParams:
    """Describe the row to Megatron, and its tree and split to our attention and rotation.

    bounds: of segments, int32 [B + 1]; positions: of this rank's tokens, int64 [T / C] or, in time,
    height and width, [3, T / C]."""
    tree = part.split.tree
    packed = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=bounds,
        cu_seqlens_kv=bounds,
        max_seqlen_q=int(tree.lengths.max()),
        max_seqlen_kv=tree.longest_path,
    )
    attach(packed, RowContext(part=part, positions=positions))
    return packed


def _token_uses(tree: RowTree, paths: SamplePaths) -> TokenUses:
    """Count how often each token of a row is used by its samples, and by those of the step."""
    token_rows = np.concatenate([np.empty(0, np.int64), *tree.token_rows])
    here = np.bincount(token_rows, minlength=tree.num_tokens)
    in_update = np.ones(tree.num_tokens, np.int64)
    in_update[token_rows] = np.repeat(paths.uses.ravel(), paths.lengths.ravel())
    return TokenUses(torch.from_numpy(here).float(), torch.from_numpy(in_update).float())


def _joined_masks(
    masks: list[SamplingMask | None], targets: list[np.ndarray]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return token and id of every entry, in order; and bool [n], whether the token is in its
    set."""
    sizes_of = []
    ids_of = []
    for mask, target in zip(masks, targets, strict=True):
        if mask is None:
            sizes_of.append(np.zeros(len(target), np.int64))
        else:
            sizes_of.append(mask.sizes)
            ids_of.append(mask.ids)
    sizes = np.concatenate(sizes_of)
    ids = np.concatenate(ids_of)
    token = np.repeat(np.arange(len(sizes)), sizes)
    is_target = ids == np.concatenate(targets)[token]
    known = np.bincount(token, is_target, len(sizes)) > 0
    return token, ids, known
