"""The sample store: one immutable, checksummed directory per step.

    step_000123/manifest.json          step, counts, shards with checksums
    step_000123/rollout-0.safetensors  tokens, written by a rollout worker (`batching.spool`)
    step_000123/rollout-0.routes       their experts, where recorded (`batching.route_file`)
    step_000123/train.safetensors      one row a sample: where it is, its rewards
    step_000123/images/                files of images, by their digests (`batching.image_folder`)
    step_000123/decisions-0.safetensors  `rows` int64 [S]; per name, packed bits of their tokens

It is written under `step_000123.tmp` and renamed when complete, so a directory that has its
final name is whole. It carries samples to the trainer, is the crash log, and can be replayed."""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike, DTypeLike

from grpo_megatron.batching.columns import file_checksum, read_columns, write_columns
from grpo_megatron.batching.image_folder import IMAGES, ImageFolder
from grpo_megatron.batching.manifest import ShardEntry, StepFacts, read_manifest, write_manifest
from grpo_megatron.batching.route_file import RouteFile, write_routes
from grpo_megatron.batching.sequences import NO_SEQUENCE, Fork, fork_columns, shard_order
from grpo_megatron.errors import DataError
from grpo_megatron.files import empty_directory, replace_directory
from grpo_megatron.routing.shape import RouteShape, RouteStatus
from grpo_megatron.types import (
    Completion,
    PromptImage,
    RolloutGroup,
    SamplingMask,
    Turn,
    policy_mask,
    require_sound,
)

_ROW_COLUMNS = {
    "shard": np.int32,
    "index": np.int64,
    "group": np.int32,
    "update": np.int32,
    "reward": np.float64,
    "domain": np.int32,
    "truncated": np.uint8,
}
_LENGTH_COLUMNS = ("prompt_length", "completion_length", "policy_length")
UNKNOWN = -1


def write_shard(
    path: Path,
    groups: Sequence[RolloutGroup[Completion]],
    route_shape: RouteShape | None = None,
    *,
    new: bool = False,
) -> ShardEntry:
    """Columns of many groups in one file, durably; a prompt is stored once per group. With
    `route_shape`, routes are recorded too. Returns the shard's entry of the manifest.

    Raises FileExistsError where `path` exists and is to be `new`, EngineError where the record of a
    sample contradicts itself (`types.require_sound`).

    Samples are sequences, in the order of `shard_order`: of an episode with earlier ones there are
    several. Columns (N samples, Q prompts): `prompt_ids` int32 with `prompt_offsets` int64 [Q+1];
    `completion_ids` int32 and `rollout_logprobs` float32 with `completion_offsets` int64 [N+1];
    `group` int32 [N], which prompt; weight versions as spans `span_version|start|end` int32 with
    `span_offsets` int64 [N+1]. Where any prompt has images, these: `image_digest` uint8 [M, 32] and
    `image_start|rows|columns` int32 with `image_offsets` int64 [Q+1]. Of truncated sampling, the
    ids that were kept: `kept_ids` int32 with `kept_offsets` int64 [n+1], by completion token. Where
    any sample has turns, these:
    `turn_start|end` int32, `turn_reward` float64, `turn_spoilt` uint8, `turn_state` int32 with
    `turn_offsets` int64 [N+1]; a state is the number of a text, `state_texts` uint8 (UTF-8) with
    `state_offsets` int64, or -1. Where any episode has several sequences, what a later one shares
    with one before (`Fork`): `fork_after` int64, -1: with none; `fork_tokens` int64; `fork_is_cut`
    uint8, [N] each."""
    for group in groups:
        for completion in group.completions:
            require_sound(completion, group.prompt.prompt_id)
    prompts: list[Sequence[int]] = []
    images: list[tuple[PromptImage, ...]] = []
    completions: list[Completion] = []
    group_of: list[int] = []
    order = shard_order(groups)
    groups = order.groups
    for number, group in enumerate(groups):
        prompts.append(group.prompt.token_ids)
        images.append(group.prompt.images)
        completions += group.completions
        group_of += [number] * len(group.completions)
    prompt_ids, prompt_offsets = _ragged(prompts, np.int32)
    columns = {"prompt_ids": prompt_ids, "prompt_offsets": prompt_offsets}
    columns |= _image_columns(images)
    columns |= _completion_columns(completions)
    columns["group"] = np.array(group_of, np.int32)
    columns |= _span_columns(completions)
    columns |= _kept_columns(completions)
    columns |= _turn_columns(completions)
    prompts_of = [prompts[number] for number in group_of]
    columns |= fork_columns(order.places, prompts_of, completions, with_routes=bool(route_shape))
    if route_shape is not None:
        columns |= write_routes(path.with_suffix(".routes"), groups, route_shape, new=new)
    checksum = write_columns(path, columns, new=new)
    return ShardEntry(name=path.name, checksum=checksum, routes=route_shape)


def _image_columns(images: Sequence[Sequence[PromptImage]]) -> dict[str, np.ndarray]:
    """Images of every prompt; no columns where no prompt has any."""
    if not any(images):
        return {}
    flat = list(itertools.chain.from_iterable(images))
    digests = b"".join(bytes.fromhex(image.digest) for image in flat)
    return {
        "image_digest": np.frombuffer(digests, np.uint8).reshape(len(flat), -1),
        "image_start": np.array([image.start for image in flat], np.int32),
        "image_rows": np.array([image.rows for image in flat], np.int32),
        "image_columns": np.array([image.columns for image in flat], np.int32),
        "image_offsets": _offsets([len(of_prompt) for of_prompt in images]),
    }


def _completion_columns(completions: Sequence[Completion]) -> dict[str, np.ndarray]:
    token_ids = []
    logprobs = []
    for completion in completions:
        token_ids.append(completion.token_ids)
        logprobs.append(completion.logprobs)
    completion_ids, completion_offsets = _ragged(token_ids, np.int32)
    return {
        "completion_ids": completion_ids,
        "rollout_logprobs": _concatenate(logprobs, np.float32),
        "completion_offsets": completion_offsets,
    }


def _span_columns(completions: Sequence[Completion]) -> dict[str, np.ndarray]:
    """Which version sampled which tokens."""
    spans: list[tuple[int, int, int]] = []
    num_spans = []
    for completion in completions:
        num_spans.append(len(completion.versions))
        for span in completion.versions:
            spans.append((span.version, span.start, span.end))
    columns = np.array(spans, np.int32).reshape(-1, 3)
    return {
        "span_version": columns[:, 0],
        "span_start": columns[:, 1],
        "span_end": columns[:, 2],
        "span_offsets": _offsets(num_spans),
    }


def _kept_columns(completions: Sequence[Completion]) -> dict[str, np.ndarray]:
    """What truncated sampling left; no columns where nothing is known of any completion."""
    if all(completion.kept is None for completion in completions):
        return {}
    ids = []
    sizes = []
    for completion in completions:
        if completion.kept is None:
            sizes.append(np.zeros(len(completion.token_ids), np.int64))
        else:
            ids.append(completion.kept.ids)
            sizes.append(completion.kept.sizes)
    return {
        "kept_ids": _concatenate(ids, np.int32),
        "kept_offsets": _offsets(_concatenate(sizes, np.int64)),
    }


def _turn_columns(completions: Sequence[Completion]) -> dict[str, np.ndarray]:
    """Turns of episodes; no columns where every completion is one turn that nothing is known of."""
    if not any(completion.turns for completion in completions):
        return {}
    turns: list[Turn] = []
    num_turns = []
    number_of: dict[str, int] = {}
    for completion in completions:
        num_turns.append(len(completion.turns))
        for turn in completion.turns:
            turns.append(turn)
            if turn.state:
                number_of.setdefault(turn.state, len(number_of))
    states = [state.encode("utf-8", "surrogatepass") for state in number_of]
    number_of[""] = UNKNOWN
    return {
        "turn_start": np.array([turn.start for turn in turns], np.int32),
        "turn_end": np.array([turn.end for turn in turns], np.int32),
        "turn_reward": np.array([turn.reward for turn in turns], np.float64),
        "turn_spoilt": np.array([turn.spoilt for turn in turns], np.uint8),
        "turn_state": np.array([number_of[turn.state] for turn in turns], np.int32),
        "turn_offsets": _offsets(num_turns),
        "state_texts": np.frombuffer(b"".join(states), np.uint8),
        "state_offsets": _offsets([len(state) for state in states]),
    }


def _ragged(
    parts: Sequence[Sequence[int] | np.ndarray], dtype: DTypeLike
) -> tuple[np.ndarray, np.ndarray]:
    """Parts one after another, and their offsets, int64 [number of parts + 1]."""
    return _concatenate(parts, dtype), _offsets([len(part) for part in parts])


def _concatenate(parts: Sequence[ArrayLike], dtype: DTypeLike) -> np.ndarray:
    """Parts one after another; of no parts an empty array."""
    if not parts:
        return np.empty(0, dtype)
    return np.concatenate([np.asarray(part, dtype) for part in parts])


def _offsets(lengths: ArrayLike) -> np.ndarray:
    """Where parts of these lengths begin, and where the last one ends; int64 [N+1]."""
    ends = np.cumsum(np.asarray(lengths, np.int64))
    return np.concatenate([np.zeros(1, np.int64), ends])


@dataclass(frozen=True, slots=True)
class SampleRow:
    """A row of a `SampleTable`: where a sample's tokens are, and what the controller decided about
    it. The table has a column for every field. An episode of several sequences has a row for each,
    one after the other, equal in what is decided."""

    shard: int
    index: int  # sample index within the shard
    group: int  # group number within the step
    update: int  # which optimizer step of this batch trains it
    reward: float  # NaN: unscorable
    domain: int = 0  # index into the recipe's domains
    truncated: bool = False
    prompt_length: int = UNKNOWN  # tokens; known of all rows of a step or of none
    completion_length: int = UNKNOWN
    policy_length: int = UNKNOWN  # those of the completion that the policy sampled
    episode: int = UNKNOWN  # number of the episode, ascending; by default every row is one


def begin_step(directory: Path) -> Path:
    """Make the empty working directory of a step; returns it. Leftovers are removed."""
    return empty_directory(directory.with_name(directory.name + ".tmp"))


def finish_step(
    directory: Path,
    shards: Sequence[ShardEntry],
    rows: Sequence[SampleRow],
    facts: StepFacts,
    components: Mapping[str, np.ndarray] | None = None,
    steps: Sequence[tuple[int, int, float]] = (),
    teacher_logprobs: Mapping[str, np.ndarray] | None = None,
) -> None:
    """Write the training rows and the manifest, then give the directory its final name.

    components: rewards by component, float64 [N], NaN where skipped; steps: rewards of single
    steps, as row, last completion token of the step, reward; teacher_logprobs: by
    `served_teachers`."""
    working = directory.with_name(directory.name + ".tmp")
    columns: dict[str, np.ndarray] = {}
    for name, dtype in _ROW_COLUMNS.items():
        columns[name] = np.array([getattr(row, name) for row in rows], dtype)
    for name in _LENGTH_COLUMNS:
        lengths = np.array([getattr(row, name) for row in rows], np.int64)
        if (lengths != UNKNOWN).all():
            columns[name] = lengths
    episodes = np.array([row.episode for row in rows], np.int64)
    if (episodes != UNKNOWN).all():
        columns["episode"] = episodes
    step_rows = []
    step_ends = []
    step_rewards = []
    for row, end, reward in steps:
        step_rows.append(row)
        step_ends.append(end)
        step_rewards.append(reward)
    columns["step_row"] = np.array(step_rows, np.int64)
    columns["step_end"] = np.array(step_ends, np.int64)
    columns["step_reward"] = np.array(step_rewards, np.float64)
    for name, values in (components or {}).items():
        columns[f"component/{name}"] = values
    for name, values in (teacher_logprobs or {}).items():
        columns[f"taught/{name}"] = values
    train_checksum = write_columns(working / "train.safetensors", columns)
    write_manifest(working, facts, train_checksum, list(shards))
    replace_directory(working, directory)


class SampleTable:
    """Read access to a finished step of N samples. A shard is opened when a sample of it is asked
    for, and its token arrays stay on disk until they are sliced.

    Columns, [N] each: `shard`, `index`, `group`, `update`, `reward`, `domain`, `truncated` as in
    `SampleRow`; `components`, float64 by name. `steps` are rewards of single steps, as rows, last
    tokens and rewards, [K] each; `teacher_logprobs` what teachers behind servers said of policy
    tokens, by teacher ("0/ids", "0/logprobs"), [their n, top k].

    A row is a sequence. An episode of several has neighbouring rows with the same number in
    `episode`; all else that is decided of it is equal in them.

    Raises DataError: the directory is incomplete, of another format, a checksum disagrees, or the
    rows of an episode are not neighbours."""

    def __init__(self, directory: Path, *, verify: bool = True):
        self.directory = directory
        self.manifest = read_manifest(directory)
        if verify:
            _require_checksums(directory, self.manifest.checksums)
        self._shards: dict[int, dict[str, np.ndarray]] = {}  # those that were opened
        self._routes: dict[int, RouteFile | None] = {}
        train = read_columns(directory / "train.safetensors")
        self.shard = np.array(train["shard"])
        self.index = np.array(train["index"])
        self.group = np.array(train["group"])
        self.update = np.array(train["update"])
        self.reward = np.array(train["reward"])
        self.domain = np.array(train["domain"])
        self.truncated = np.array(train["truncated"]).astype(bool)
        self.steps = (
            np.array(train["step_row"]),
            np.array(train["step_end"]),
            np.array(train["step_reward"]),
        )
        self._lengths: dict[str, np.ndarray] = {}  # none in steps of older versions
        for name in _LENGTH_COLUMNS:
            if name in train:
                self._lengths[name] = np.array(train[name])
        self.episode = np.arange(len(self.shard))
        """Number of each row's episode, int64 [N], 0..M-1, ascending."""
        if "episode" in train:
            self.episode = _numbered_episodes(np.array(train["episode"]), directory)
        self.components: dict[str, np.ndarray] = {}
        self.teacher_logprobs: dict[str, np.ndarray] = {}
        for column, values in train.items():
            kind, _, name = column.partition("/")
            if kind == "component":
                self.components[name] = np.array(values)
            elif kind == "taught":
                self.teacher_logprobs[name] = values  # left on disk

    def __len__(self) -> int:
        return len(self.shard)

    @cached_property
    def prompt_lengths(self) -> np.ndarray:
        """Tokens of each sample's prompt, int64 [N]."""
        if "prompt_length" in self._lengths:
            return self._lengths["prompt_length"]
        return self._of_shards(_prompt_lengths)

    @cached_property
    def completion_lengths(self) -> np.ndarray:
        """Tokens of each completion, T, with those of the environment; int64 [N]."""
        if "completion_length" in self._lengths:
            return self._lengths["completion_length"]
        return self._of_shards(_completion_lengths)

    @cached_property
    def policy_lengths(self) -> np.ndarray:
        """Tokens of each completion that the policy sampled, int64 [N]."""
        if "policy_length" in self._lengths:
            return self._lengths["policy_length"]
        return self._of_shards(_policy_lengths)

    @cached_property
    def first_rows(self) -> np.ndarray:
        """Of every episode its first row, int64 [M]."""
        return np.flatnonzero(np.diff(self.episode, prepend=-1))

    @cached_property
    def episode_policy_lengths(self) -> np.ndarray:
        """Tokens of each episode that the policy sampled, int64 [M]."""
        return np.bincount(self.episode, self.policy_lengths, len(self.first_rows)).astype(np.int64)

    def _shard(self, number: int) -> dict[str, np.ndarray]:
        """The columns of a shard, which are mapped once."""
        if number not in self._shards:
            entry = self.manifest.shards[number]
            self._shards[number] = read_columns(self.directory / entry.name)
        return self._shards[number]

    def _route_file(self, number: int) -> RouteFile | None:
        """The routes of a shard, which are mapped once; None where none were recorded."""
        if number not in self._routes:
            entry = self.manifest.shards[number]
            found = None
            if entry.routes is not None:
                path = (self.directory / entry.name).with_suffix(".routes")
                found = RouteFile(path, self._shard(number), entry.routes)
            self._routes[number] = found
        return self._routes[number]

    def _of_shards(self, column: Callable[[Mapping[str, np.ndarray]], np.ndarray]) -> np.ndarray:
        """Of every sample what `column` gives for all samples of a shard, int64 [N]."""
        found = np.empty(len(self), np.int64)
        for number in range(len(self.manifest.shards)):
            rows = self.shard == number
            found[rows] = column(self._shard(number))[self.index[rows]]
        return found

    def prompt_ids(self, row: int) -> np.ndarray:
        """Token ids of a sample's prompt, int32 [T_p]."""
        columns = self._shard(int(self.shard[row]))
        group = columns["group"][self.index[row]]
        start, end = columns["prompt_offsets"][group : group + 2]
        ids: np.ndarray = columns["prompt_ids"][start:end]
        return ids

    def images(self, row: int) -> tuple[PromptImage, ...]:
        """The images of a sample's prompt, in the order of their places."""
        columns = self._shard(int(self.shard[row]))
        if "image_offsets" not in columns:
            return ()
        group = columns["group"][self.index[row]]
        first, last = columns["image_offsets"][group : group + 2].tolist()
        images = []
        for number in range(first, last):
            image = PromptImage(
                columns["image_digest"][number].tobytes().hex(),
                int(columns["image_start"][number]),
                int(columns["image_rows"][number]),
                int(columns["image_columns"][number]),
            )
            images.append(image)
        return tuple(images)

    @property
    def image_folder(self) -> ImageFolder:
        """The files of all images of the step."""
        return ImageFolder(self.directory / IMAGES)

    def prompt_key(self, row: int) -> tuple[int, int]:
        """Return what samples have in common whose prompt is stored once."""
        shard = int(self.shard[row])
        return shard, int(self._shard(shard)["group"][self.index[row]])

    def prompt_route_key(self, row: int) -> tuple[int, ...]:
        """Return what is equal for two samples exactly where the engine recorded the same routes on
        their prompts; empty where none are recorded."""
        file = self._route_file(int(self.shard[row]))
        if file is None:
            return ()
        return (int(self.shard[row]), *file.prompt_key(int(self.index[row])))

    def _at(self, row: int, offsets: str) -> tuple[Mapping[str, np.ndarray], int, int]:
        """The columns of a sample's shard, and where in them it is."""
        columns = self._shard(int(self.shard[row]))
        index = self.index[row]
        return columns, *columns[offsets][index : index + 2]

    def completion(self, row: int) -> tuple[np.ndarray, np.ndarray]:
        """Token ids int32 [T] and behaviour log-probs float32 [T], NaN at tokens of the
        environment."""
        columns, start, end = self._at(row, "completion_offsets")
        return columns["completion_ids"][start:end], columns["rollout_logprobs"][start:end]

    @cached_property
    def has_turns(self) -> bool:
        """Whether any sample may have turns."""
        numbers = np.unique(self.shard).tolist()
        return any("turn_offsets" in self._shard(number) for number in numbers)

    def spoilt_tokens(self, row: int) -> np.ndarray:
        """Which of the tokens that the policy sampled are of a spoilt turn, bool [n of it]."""
        turns = self.turns(row)
        if not turns:
            return np.zeros(int(self.policy_lengths[row]), bool)
        sizes = [turn.end - turn.start for turn in turns]
        return np.repeat([turn.spoilt for turn in turns], sizes)

    def too_old_tokens(self, row: int) -> np.ndarray:
        """Which of the tokens that the policy sampled are of weights before the manifest's
        `oldest_trained`, bool [n of it]."""
        oldest = self.manifest.oldest_trained
        if oldest is None:
            return np.zeros(int(self.policy_lengths[row]), bool)
        versions = self.versions(row)[self.policy_places(row)]
        return np.asarray(versions < oldest)

    def tokens_without_loss(self, row: int) -> np.ndarray:
        """Which of the tokens that the policy sampled are spoilt or too old, bool [n of it]."""
        found: np.ndarray = self.spoilt_tokens(row) | self.too_old_tokens(row)
        return found

    def without_loss(self, rows: np.ndarray) -> np.ndarray | None:
        """`tokens_without_loss` of some rows, int64, one after another, bool [n of them]; None
        where all have a loss."""
        if not self.has_turns and self.manifest.oldest_trained is None:
            return None
        parts = [self.tokens_without_loss(row) for row in rows.tolist()]
        found = _concatenate(parts, bool)
        if not found.any():
            return None
        return found

    def turns(self, row: int) -> tuple[Turn, ...]:
        """Return the turns of a completion; empty: the policy sampled all of it at once."""
        columns = self._shard(int(self.shard[row]))
        if "turn_offsets" not in columns:
            return ()
        _, first, last = self._at(row, "turn_offsets")
        turns = []
        for number in range(int(first), int(last)):
            turn = Turn(
                int(columns["turn_start"][number]),
                int(columns["turn_end"][number]),
                float(columns["turn_reward"][number]),
                _state_text(columns, int(columns["turn_state"][number])),
                bool(columns["turn_spoilt"][number]),
            )
            turns.append(turn)
        return tuple(turns)

    def fork(self, row: int) -> Fork | None:
        """What a sequence shares with an earlier row of its episode; None for the first one."""
        first_row = int(self.first_rows[self.episode[row]])
        columns = self._shard(int(self.shard[row]))
        if row == first_row or "fork_after" not in columns:
            return None
        sample = int(self.index[row])
        earlier = int(columns["fork_after"][sample])
        is_cut = bool(columns["fork_is_cut"][sample])
        for other in range(first_row, row):
            if self.shard[other] == self.shard[row] and self.index[other] == earlier:
                return Fork(other, int(columns["fork_tokens"][sample]), is_cut)
        return Fork(NO_SEQUENCE, 0, is_cut)

    def of_episodes(self, column: np.ndarray) -> np.ndarray:
        """Take what is decided of samples by episode. column: [N], equal in rows of an episode;
        returns [M]."""
        found: np.ndarray = column[self.first_rows]
        return found

    def rows_of(self, episodes: np.ndarray) -> np.ndarray:
        """The rows of some episodes, int64, ascending."""
        return np.flatnonzero(np.isin(self.episode, episodes))

    def policy_places(self, row: int) -> np.ndarray:
        """Where in a completion the tokens are that the policy sampled, int64 [n of it]."""
        num_tokens = int(self.completion_lengths[row])
        if self.policy_lengths[row] == num_tokens:
            return np.arange(num_tokens)
        return np.flatnonzero(policy_mask(self.turns(row), num_tokens))

    def policy_tokens(self, row: int) -> tuple[np.ndarray, np.ndarray]:
        """Of the tokens that the policy sampled: ids int32, and behaviour log-probs float32."""
        token_ids, logprobs = self.completion(row)
        if self.policy_lengths[row] == len(token_ids):
            return token_ids, logprobs
        places = self.policy_places(row)
        return token_ids[places], logprobs[places]

    def kept(self, row: int) -> SamplingMask | None:
        """What truncated sampling kept at every completion token; None: everything."""
        columns, start, end = self._at(row, "completion_offsets")
        if "kept_ids" not in columns:
            return None
        offsets = np.asarray(columns["kept_offsets"][start : end + 1])
        return SamplingMask(columns["kept_ids"][offsets[0] : offsets[-1]], offsets - offsets[0])

    def all_policy_ids(self) -> np.ndarray:
        """Policy tokens of all samples, flat, int64 [n]."""
        parts = []
        for row in range(len(self)):
            token_ids, _ = self.policy_tokens(row)
            parts.append(token_ids)
        return _concatenate(parts, np.int64)

    def versions(self, row: int) -> np.ndarray:
        """Weight version of every completion token, int32 [T]; where it is the environment's, of
        the weights that read it."""
        columns, first, last = self._at(row, "span_offsets")
        lengths = columns["span_end"][first:last] - columns["span_start"][first:last]
        return np.repeat(columns["span_version"][first:last], lengths)

    @property
    def route_shapes(self) -> list[RouteShape]:
        """Of the shards with routes; empty: nothing was recorded."""
        return [entry.routes for entry in self.manifest.shards if entry.routes is not None]

    def routes(
        self, row: int, layers: Sequence[int], shape: RouteShape
    ) -> tuple[np.ndarray, np.ndarray]:
        """Experts of a sample's tokens in some layers (numbers from 0) of a model of `shape`.

        Returns ids [len(layers), T_p + T - 1, K], RouteStatus uint8 [len(layers), T_p + T - 1]."""
        file = self._route_file(int(self.shard[row]))
        why = RouteStatus.MISSING
        if file is not None:
            if file.shape == shape:
                places = [shape.layers.index(layer) for layer in layers]
                return file.read(int(self.index[row]), places)
            why = RouteStatus.MISSHAPEN
        num_rows = int(self.prompt_lengths[row] + self.completion_lengths[row]) - 1
        return (
            np.zeros((len(layers), num_rows, shape.experts_per_token), shape.dtype),
            np.full((len(layers), num_rows), why, np.uint8),
        )


def _prompt_lengths(shard: Mapping[str, np.ndarray]) -> np.ndarray:
    """Tokens of the prompt of every sample of a shard, int64."""
    of_groups = np.diff(shard["prompt_offsets"])
    lengths: np.ndarray = of_groups[shard["group"]]
    return lengths


def _completion_lengths(shard: Mapping[str, np.ndarray]) -> np.ndarray:
    """Tokens of every completion of a shard, int64."""
    return np.diff(shard["completion_offsets"])


def _policy_lengths(shard: Mapping[str, np.ndarray]) -> np.ndarray:
    """Tokens of every completion of a shard that the policy sampled, int64."""
    lengths = _completion_lengths(shard)
    if "turn_offsets" not in shard:
        return lengths
    num_turns = np.diff(shard["turn_offsets"])
    sample = np.repeat(np.arange(len(lengths)), num_turns)
    of_turns = np.asarray(shard["turn_end"]) - np.asarray(shard["turn_start"])
    in_turns = np.bincount(sample, of_turns, len(lengths)).astype(np.int64)
    return np.where(num_turns > 0, in_turns, lengths)


def _state_text(shard: Mapping[str, np.ndarray], number: int) -> str:
    """The state of a number; "" where it is not known."""
    if number == UNKNOWN:
        return ""
    start, end = shard["state_offsets"][number : number + 2]
    text: bytes = shard["state_texts"][start:end].tobytes()
    return text.decode("utf-8", "surrogatepass")


def _numbered_episodes(numbers: np.ndarray, directory: Path) -> np.ndarray:
    """Episodes as numbers without gaps, in the order of rows. DataError: rows are apart."""
    starts = np.diff(numbers, prepend=UNKNOWN) != 0
    if starts.sum() != len(np.unique(numbers)):
        raise DataError(
            "the rows of an episode are not neighbours",
            where=str(directory),
            remedy="delete the step; it is sampled anew",
        )
    found: np.ndarray = np.cumsum(starts) - 1
    return found


def _require_checksums(directory: Path, checksums: Mapping[str, str]) -> None:
    """Raise DataError where a file is missing or is not the one that was written."""
    for name, checksum in checksums.items():
        file = directory / name
        if not file.exists() or file_checksum(file) != checksum:
            raise DataError(
                f"{name} is missing or its checksum differs from the manifest",
                where=str(directory),
                remedy="delete the step; it is sampled anew",
            )


def write_decisions(
    directory: Path,
    rank: int,
    num_ranks: int,
    found: Sequence[tuple[np.ndarray, Mapping[str, np.ndarray]]],
) -> None:
    """Write which tokens a rank clipped or rejected, to be replayed at another layout, where
    rounding may decide otherwise.

    found: of every micro-batch, table rows int64 [S], and masks bool [n] by name."""
    if rank == 0:  # an earlier attempt may have had more ranks
        for path in directory.glob("decisions-*.safetensors"):
            if int(path.stem.partition("-")[2]) >= num_ranks:
                path.unlink()
    rows_of: list[np.ndarray] = []
    masks_of: dict[str, list[np.ndarray]] = {}
    for rows, masks in found:
        rows_of.append(rows)
        for name, mask in masks.items():
            masks_of.setdefault(name, []).append(mask)
    columns = {}
    for name, parts in masks_of.items():
        columns[name] = np.packbits(np.concatenate(parts))
    columns["rows"] = _concatenate(rows_of, np.int64)
    write_columns(directory / f"decisions-{rank}.safetensors", columns)


def read_decisions(directory: Path, lengths: np.ndarray) -> dict[str, np.ndarray]:
    """Recorded masks of the whole step in the order of its table, bool [n] by name.

    Raises DataError when they belong to another step. lengths: policy tokens, int64 [N]."""
    starts = _offsets(lengths)
    found: dict[str, np.ndarray] = {}
    for path in sorted(directory.glob("decisions-*.safetensors")):
        columns = read_columns(path)
        rows = columns.pop("rows")
        if len(rows) and not 0 <= rows.min() <= rows.max() < len(lengths):
            raise DataError("decisions belong to another step", where=str(path))
        index = _concatenate([np.arange(*starts[row : row + 2]) for row in rows], np.int64)
        for name, packed in columns.items():
            if len(packed) != math.ceil(len(index) / 8):
                raise DataError(
                    f"{name} has {len(packed)} bytes for {len(index)} tokens", where=str(path)
                )
            mask = found.setdefault(name, np.zeros(starts[-1], bool))
            mask[index] = np.unpackbits(packed, count=len(index)).astype(bool)
    return found
