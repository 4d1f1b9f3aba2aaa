"""The sample store: one immutable, checksummed directory per step.

    step_000123/manifest.json          step, counts, shards with checksums
    step_000123/rollout-0.safetensors  tokens, written by a rollout worker (`batching.spool`)
    step_000123/rollout-0.routes       their experts, where recorded (`batching.route_file`)
    step_000123/train.safetensors      one row a sample: where it is, its rewards
    step_000123/images/                files of images, by their digests (`batching.image_folder`)
    step_000123/decisions-0.safetensors  what was clipped and rejected (`batching.mask_file`)

It is written under `step_000123.tmp` and renamed when complete, so a directory that has its
final name is whole. It carries samples to the trainer, is the crash log, and can be replayed."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from grpo_megatron.batching.columns import file_checksum, read_columns, write_columns
from grpo_megatron.batching.image_folder import IMAGES, ImageFolder
from grpo_megatron.batching.manifest import ShardEntry, StepFacts, read_manifest, write_manifest
from grpo_megatron.batching.ragged import concatenate
from grpo_megatron.batching.route_file import RouteFile, write_routes
from grpo_megatron.batching.sequences import NO_SEQUENCE, Fork, shard_order
from grpo_megatron.batching.shard_columns import UNKNOWN_STATE, shard_columns
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
    """Write the completions of many groups into one file, durably (`batching.shard_columns`); with
    `route_shape`, their routes into another. Returns the shard's entry of the manifest.

    Raises FileExistsError where `path` exists and is to be `new`, EngineError where the record of a
    sample contradicts itself (`types.require_sound`)."""
    for group in groups:
        for completion in group.completions:
            require_sound(completion, group.prompt.prompt_id)
    order = shard_order(groups)
    columns = shard_columns(order, with_routes=route_shape is not None)
    if route_shape is not None:
        columns |= write_routes(path.with_suffix(".routes"), order.groups, route_shape, new=new)
    checksum = write_columns(path, columns, new=new)
    return ShardEntry(name=path.name, checksum=checksum, routes=route_shape)


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
    steps, as (row, last completion token of the step, reward); teacher_logprobs: as
    `served_teachers` gives them."""
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


@dataclass(frozen=True, slots=True)
class StepDomain:
    """A domain of a recorded step: its number in the column `domain`, and its name."""

    number: int
    name: str


class SampleTable:
    """Read access to a finished step of N samples. A shard is opened when a sample of it is asked
    for, and its token arrays stay on disk until they are sliced.

    Columns, [N] each: `shard`, `index`, `group`, `update`, `reward`, `domain`, `truncated` as in
    `SampleRow`; `components`, float64 by name. `steps` are rewards of single steps, as rows, last
    tokens and rewards, [K] each; `teacher_logprobs` what teachers behind servers said of policy
    tokens, by teacher ("0/ids", "0/logprobs"), [their n, top k].

    A row is a sequence. An episode of several has neighbouring rows with the same number in
    `episode`; all else that is decided of it is equal in them.

    With `domain` the table has the rows of that one only, and of dropped rewards its own.

    Attributes:
        domain_name: Of the only domain; "" in a table of the whole step.
        rows_of_step: Number of each row in the table of the whole step, int64 [N].

    Raises DataError: the directory is incomplete, of another format, a checksum disagrees, or the
    rows of an episode are not neighbours."""

    def __init__(self, directory: Path, *, verify: bool = True, domain: StepDomain | None = None):
        self.directory = directory
        self.manifest = read_manifest(directory)
        if verify:
            _require_checksums(directory, self.manifest.checksums)
        self._shards: dict[int, dict[str, np.ndarray]] = {}  # those that were opened
        self._routes: dict[int, RouteFile | None] = {}
        train = read_columns(directory / "train.safetensors")
        self.domain_name = ""
        self.rows_of_step = np.arange(len(train["shard"]))
        if domain is not None:
            self.domain_name = domain.name
            self.rows_of_step = np.flatnonzero(train["domain"] == domain.number)
            self.manifest = self.manifest.with_drops_of(self.domain_name)
            train = _columns_of_rows(train, self.rows_of_step)
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
        """The first row of every episode, int64 [M]."""
        return np.flatnonzero(np.diff(self.episode, prepend=-1))

    @cached_property
    def episode_policy_lengths(self) -> np.ndarray:
        """Tokens of each episode that the policy sampled, int64 [M]."""
        return np.bincount(self.episode, self.policy_lengths, len(self.first_rows)).astype(np.int64)

    def _shard(self, number: int) -> dict[str, np.ndarray]:
        """Return the columns of a shard, which are mapped once."""
        if number not in self._shards:
            entry = self.manifest.shards[number]
            self._shards[number] = read_columns(self.directory / entry.name)
        return self._shards[number]

    def _route_file(self, number: int) -> RouteFile | None:
        """Return the routes of a shard, which are mapped once; None where none were recorded."""
        if number not in self._routes:
            entry = self.manifest.shards[number]
            found = None
            if entry.routes is not None:
                path = (self.directory / entry.name).with_suffix(".routes")
                found = RouteFile(path, self._shard(number), entry.routes)
            self._routes[number] = found
        return self._routes[number]

    def _of_shards(self, column: Callable[[Mapping[str, np.ndarray]], np.ndarray]) -> np.ndarray:
        """Collect a column of all samples, int64 [N]. column: computes it for all samples of one
        shard."""
        found = np.empty(len(self), np.int64)
        for number in range(len(self.manifest.shards)):
            rows = self.shard == number
            found[rows] = column(self._shard(number))[self.index[rows]]
        return found

    def prompt_ids(self, row: int) -> np.ndarray:
        """Return token ids of a sample's prompt, int32 [T_p]."""
        columns = self._shard(int(self.shard[row]))
        group = columns["group"][self.index[row]]
        start, end = columns["prompt_offsets"][group : group + 2]
        ids: np.ndarray = columns["prompt_ids"][start:end]
        return ids

    def images(self, row: int) -> tuple[PromptImage, ...]:
        """Return the images of a sample's prompt, in the order of their places."""
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
        """Return the columns of a sample's shard, and where in them the sample begins and ends."""
        columns = self._shard(int(self.shard[row]))
        index = self.index[row]
        start, end = columns[offsets][index : index + 2]
        return columns, start, end

    def completion(self, row: int) -> tuple[np.ndarray, np.ndarray]:
        """Return token ids int32 [T] and behaviour log-probs float32 [T], NaN at tokens of the
        environment."""
        columns, start, end = self._at(row, "completion_offsets")
        return columns["completion_ids"][start:end], columns["rollout_logprobs"][start:end]

    @cached_property
    def has_turns(self) -> bool:
        """Whether any sample may have turns."""
        numbers = np.unique(self.shard).tolist()
        return any("turn_offsets" in self._shard(number) for number in numbers)

    def spoilt_tokens(self, row: int) -> np.ndarray:
        """Return which of the tokens that the policy sampled are in a spoilt turn, bool [n]."""
        turns = self.turns(row)
        if not turns:
            return np.zeros(int(self.policy_lengths[row]), bool)
        sizes = [turn.end - turn.start for turn in turns]
        return np.repeat([turn.spoilt for turn in turns], sizes)

    def too_old_tokens(self, row: int) -> np.ndarray:
        """Return which of the tokens that the policy sampled are of weights before the manifest's
        `oldest_trained`, bool [n]."""
        oldest = self.manifest.oldest_trained
        if oldest is None:
            return np.zeros(int(self.policy_lengths[row]), bool)
        versions = self.versions(row)[self.policy_places(row)]
        return np.asarray(versions < oldest)

    def tokens_without_loss(self, row: int) -> np.ndarray:
        """Return which of the tokens that the policy sampled are spoilt or too old, bool [n]."""
        found: np.ndarray = self.spoilt_tokens(row) | self.too_old_tokens(row)
        return found

    def without_loss(self, rows: np.ndarray) -> np.ndarray | None:
        """Return `tokens_without_loss` of the rows (int64), one after another, bool [n of all];
        None where every token has a loss."""
        if not self.has_turns and self.manifest.oldest_trained is None:
            return None
        parts = [self.tokens_without_loss(row) for row in rows.tolist()]
        found = concatenate(parts, bool)
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
        """Return what a sequence shares with an earlier row of its episode; None for the first
        one."""
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
        """Reduce a column over rows to one over episodes. column: [N], equal in all rows of an
        episode; returns [M]."""
        found: np.ndarray = column[self.first_rows]
        return found

    def rows_of(self, episodes: np.ndarray) -> np.ndarray:
        """Return the rows of some episodes (int64 [their number]): int64 [their sequences],
        ascending."""
        return np.flatnonzero(np.isin(self.episode, episodes))

    def policy_places(self, row: int) -> np.ndarray:
        """Return where in a completion the tokens are that the policy sampled, int64 [n]."""
        num_tokens = int(self.completion_lengths[row])
        if self.policy_lengths[row] == num_tokens:
            return np.arange(num_tokens)
        return np.flatnonzero(policy_mask(self.turns(row), num_tokens))

    def policy_tokens(self, row: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the tokens that the policy sampled: ids int32 [n], and behaviour log-probs float32
        [n]."""
        token_ids, logprobs = self.completion(row)
        if self.policy_lengths[row] == len(token_ids):
            return token_ids, logprobs
        places = self.policy_places(row)
        return token_ids[places], logprobs[places]

    def kept(self, row: int) -> SamplingMask | None:
        """Return what truncated sampling kept at every completion token; None: everything."""
        columns, start, end = self._at(row, "completion_offsets")
        if "kept_ids" not in columns:
            return None
        offsets = np.asarray(columns["kept_offsets"][start : end + 1])
        return SamplingMask(columns["kept_ids"][offsets[0] : offsets[-1]], offsets - offsets[0])

    def all_policy_ids(self) -> np.ndarray:
        """Return policy tokens of all samples, flat, int64 [n]."""
        parts = []
        for row in range(len(self)):
            token_ids, _ = self.policy_tokens(row)
            parts.append(token_ids)
        return concatenate(parts, np.int64)

    def versions(self, row: int) -> np.ndarray:
        """Return the weight version of every completion token, int32 [T]; for a token of the
        environment, of the weights that read it."""
        columns, first, last = self._at(row, "span_offsets")
        lengths = columns["span_end"][first:last] - columns["span_start"][first:last]
        return np.repeat(columns["span_version"][first:last], lengths)

    @property
    def route_shapes(self) -> list[RouteShape]:
        """The route shapes of the shards that have routes; empty: nothing was recorded."""
        return [entry.routes for entry in self.manifest.shards if entry.routes is not None]

    def routes(
        self, row: int, layers: Sequence[int], shape: RouteShape
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return experts of a sample's tokens in some layers (numbers from 0) of a model of
        `shape`.

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


def _columns_of_rows(train: Mapping[str, np.ndarray], rows: np.ndarray) -> dict[str, np.ndarray]:
    """Return the columns of some rows, numbered anew. rows: int64 [their number], ascending.

    What teachers said is of tokens, and left out: samples with rewards have none."""
    found = {}
    for name, values in train.items():
        if not name.startswith(("step_", "taught/")):
            found[name] = np.array(values)[rows]
    of_step = np.array(train["step_row"])
    is_here = np.isin(of_step, rows)
    found["step_row"] = np.searchsorted(rows, of_step[is_here])
    for name in ("step_end", "step_reward"):
        found[name] = np.array(train[name])[is_here]
    return found


def _prompt_lengths(shard: Mapping[str, np.ndarray]) -> np.ndarray:
    """Return tokens of the prompt of every sample of a shard, int64."""
    of_groups = np.diff(shard["prompt_offsets"])
    lengths: np.ndarray = of_groups[shard["group"]]
    return lengths


def _completion_lengths(shard: Mapping[str, np.ndarray]) -> np.ndarray:
    """Return tokens of every completion of a shard, int64."""
    return np.diff(shard["completion_offsets"])


def _policy_lengths(shard: Mapping[str, np.ndarray]) -> np.ndarray:
    """Return tokens of every completion of a shard that the policy sampled, int64."""
    lengths = _completion_lengths(shard)
    if "turn_offsets" not in shard:
        return lengths
    num_turns = np.diff(shard["turn_offsets"])
    sample = np.repeat(np.arange(len(lengths)), num_turns)
    of_turns = np.asarray(shard["turn_end"]) - np.asarray(shard["turn_start"])
    in_turns = np.bincount(sample, of_turns, len(lengths)).astype(np.int64)
    return np.where(num_turns > 0, in_turns, lengths)


def _state_text(shard: Mapping[str, np.ndarray], number: int) -> str:
    """Return the state with a number; "" where it is not known."""
    if number == UNKNOWN_STATE:
        return ""
    start, end = shard["state_offsets"][number : number + 2]
    text: bytes = shard["state_texts"][start:end].tobytes()
    return text.decode("utf-8", "surrogatepass")


def _numbered_episodes(numbers: np.ndarray, directory: Path) -> np.ndarray:
    """Return the episodes as numbers without gaps, in the order of rows. Raises DataError where
    rows of an episode are apart."""
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
