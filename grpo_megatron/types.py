"""All records between a prompt and an optimizer step, with an example; here are those of a prompt.

    record        is                                     made by           defined in
    Prompt        a question in tokens                   load_splits       here
    RolloutGroup  all completions of a prompt            ChunkSampler      here
    ScoredGroup   a group with its rewards               RewardPool        here
    SampleTable   samples of a step, on disk             record_step       batching.store
    SampleBatch   samples of a step, for the objective   sample_batch      algorithms.batch
    Advantages    what multiplies their gradients        advantages_of     algorithms.batch
    LossConstants advantages and weights of an update    loss_constants    algorithms.batch
    UpdateBatch   micro-batches of an update, by rank    prepare           trainer.steps.microbatch
    MicroBatch    packed tokens, as the model sees them  build_microbatch  trainer.steps.microbatch
    LossBatch     policy tokens, as the loss sees them   LossConstants     algorithms.batch
    ClipInputs    ratios, as a clip sees them            policy_loss       algorithms.batch
    Stats         metrics of the loss, to be added up    policy_loss       algorithms.stats

Rollout workers make groups of completions and write them down; the controller has these groups as
`StoredCompletion`s, scores them and lists them in the table; every trainer rank reads the table and
makes the rest. A step has one optimizer step ("update") or several, and the gradients of all
micro-batches and ranks add up to those of the update.

One prompt with two completions (G = 2), trained on policy with the preset `grpo`. "85" is right,
"7" is wrong; token 1 ends an answer. The prompt has T_p = 6 tokens, the completions T = 3 and 2.
As a step, these are N = 2 samples; as a micro-batch S = 2 samples with n = 5 policy tokens:

    Prompt.text                    "37+48="
    Prompt.token_ids               [5, 9, 12, 6, 10, 13]                   # [T_p]
    Completion.text                ["85", "7"]
    Completion.token_ids           [[10, 7, 1], [9, 1]]                    # [T] each
    Completion.logprobs            [[-0.1, -0.2, -0.3], [-0.4, -0.5]]      # [T] each
    ScoredGroup.rewards            [1.0, 0.0]                              # [G]

    SampleTable.group              [0, 0]                                  # [N]
    SampleTable.update             [0, 0]                                  # [N]
    SampleTable.reward             [1.0, 0.0]                              # [N]
    SampleTable.prompt_lengths     [6, 6]                                  # [N]
    SampleTable.completion_lengths [3, 2]                                  # [N]

    SampleBatch.rewards            [1.0, 0.0]                              # [N]
    SampleBatch.group_ids          [0, 0]                                  # [N]
    SampleBatch.token_counts       [3, 2]                                  # [N], sums to n
    Advantages.values              [0.707, -0.707]                         # [N], (R - mean) / std
    LossConstants.weights          [0.167, 0.25]                           # [N], 1 / (N T)

    MicroBatch.lengths             [9, 8]                                  # [S], T_p + T
    MicroBatch.tokens              [5, 9, 12, 6, 10, 13, 10, 7, 1, 9, 1]   # [T], the prompt once
    MicroBatch.predicting          [5, 6, 7, 5, 9]                         # [n], before the target
    MicroBatch.targets             [10, 7, 1, 9, 1]                        # [n], policy tokens
    MicroBatch.sample              [0, 0, 0, 1, 1]                         # [n]
    MicroBatch.rollout_logprobs    [-0.1, -0.2, -0.3, -0.4, -0.5]          # [n], of the engine

    LossBatch.logprobs             [-0.1, -0.2, -0.3, -0.4, -0.5]          # [n], of the model
    LossBatch.advantages           [0.707, 0.707, 0.707, -0.707, -0.707]   # [n]
    LossBatch.weights              [0.167, 0.167, 0.167, 0.25, 0.25]       # [n]
    ClipInputs.log_ratio           [0.0, 0.0, 0.0, 0.0, 0.0]               # [n], on policy
    ClipInputs.low                 0.2
    ClipInputs.high                0.2

    loss.value                     0.0                                     # sum of weight * -A * r
    loss.gradient                  [-0.118, -0.118, -0.118, 0.177, 0.177]  # [n], by the log-probs

`tests/test_worked_example.py` computes every line of it. Further shapes: K experts per token, Q
groups, D domains."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import numpy as np

from grpo_megatron.errors import EngineError
from grpo_megatron.file_part import FilePart


@dataclass(frozen=True, slots=True)
class Problem:
    """Before templates and tokens: `Problem("What is 37 + 48?", "85", {"a": "37 + 48"})`."""

    question: str
    answer: str
    metadata: Mapping[str, Any] = field(default_factory=dict)  # what else the source knows
    where: str = ""  # file and row, for messages
    untold: tuple[str, ...] = ()
    """Of an answer that is a message: its fields that say something beside the text."""


@dataclass(frozen=True, slots=True)
class PromptImage:
    """An image in a prompt: `rows` x `columns` tokens in the place of the text's one."""

    digest: str
    """Of the bytes of its file, by which they are found (`batching.image_folder`)."""
    start: int
    """Place of its first token in the prompt."""
    rows: int
    columns: int

    @property
    def num_tokens(self) -> int:
        """How many tokens of the prompt it takes."""
        return self.rows * self.columns


@dataclass(frozen=True, slots=True)
class Prompt:
    """`Prompt("add-17", "addition", "37+48=", (5, 9, 12, 6, 10, 13), "85", {})`."""

    prompt_id: str
    domain: str
    text: str
    token_ids: tuple[int, ...]
    answer: str
    metadata: Mapping[str, Any] = field(default_factory=dict)
    question: str = ""
    """As its source has it, before any template; of a conversation, what the user says last."""
    images: tuple[PromptImage, ...] = ()
    """In the order of their places."""

    @property
    def content(self) -> str:
        """Equal for prompts of the same text and images only."""
        return content_of(self.text, self.images)


def content_of(text: str, images: Sequence[PromptImage]) -> str:
    """Return what is equal for prompts of the same text and images only."""
    return "\0".join([text, *(image.digest for image in images)])


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """Completion tokens `[start, end)` were sampled with weight version `version`."""

    version: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Turn:
    """The policy sampled tokens `[start, end)` of a response at once: one answer of an episode."""

    start: int
    end: int
    reward: float = math.nan
    """What the environment gave for it; NaN: nothing."""
    state: str = ""
    """The environment's state that it answers; equal texts are the same state, "" is unknown."""
    spoilt: bool = False
    """A tool failed in it: it is in the statistics and in the text, but not in the loss."""


def policy_mask(turns: Sequence[Turn], num_tokens: int) -> np.ndarray:
    """Say which tokens of a response the policy sampled, bool [T]; without turns all of them."""
    if not turns:
        return np.ones(num_tokens, bool)
    mask = np.zeros(num_tokens, bool)
    for turn in turns:
        mask[turn.start : turn.end] = True
    return mask


def count_policy_tokens(turns: Sequence[Turn], num_tokens: int) -> int:
    """Count the tokens of a response, of T = `num_tokens`, that the policy sampled."""
    if not turns:
        return num_tokens
    return sum(turn.end - turn.start for turn in turns)


def answer_start(turns: Sequence[Turn]) -> int:
    """Return the token at which the last turn of a response begins; without turns the first."""
    if not turns:
        return 0
    return turns[-1].start


def policy_tokens_by_version(
    versions: Sequence[VersionSpan], turns: Sequence[Turn], num_tokens: int
) -> dict[int, int]:
    """Count the policy's tokens of a response by the version that sampled them; none without."""
    mask = policy_mask(turns, num_tokens)
    found: dict[int, int] = {}
    for span in versions:
        count = int(mask[span.start : span.end].sum())
        if count:
            found[span.version] = found.get(span.version, 0) + count
    return found


@dataclass(frozen=True, slots=True)
class SamplingMask:
    """Token ids that top-k, top-p and min-p left, for each of T tokens; none: not known."""

    ids: np.ndarray  # int32, set after set
    offsets: np.ndarray  # int64 [T+1]

    @property
    def sizes(self) -> np.ndarray:
        """How many ids are left for each token, int64 [T]; 0: not known."""
        return np.diff(self.offsets)

    def of(self, places: np.ndarray) -> "SamplingMask":
        """Return the sets of some tokens, int64, ascending."""
        sizes = self.sizes
        if len(places) == len(sizes):
            return self
        is_chosen = np.zeros(len(sizes), bool)
        is_chosen[places] = True
        ids = self.ids[np.repeat(is_chosen, sizes)]
        return SamplingMask(ids, np.concatenate([[0], np.cumsum(sizes[places])]))


@dataclass(frozen=True, slots=True)
class Completion:
    """One answer of the policy to a prompt, as the engine sampled it; or an episode: several
    answers, with what an environment said between them (docs/agents.md)."""

    token_ids: np.ndarray  # int32 [T]
    logprobs: np.ndarray
    """float32 [T], processed (after temperature); NaN exactly at tokens of the environment."""
    versions: tuple[VersionSpan, ...]
    """Cover [0, T) without gaps; tokens of the environment have the weights that read them."""
    finish_reason: str  # "stop" or "length"; "abort" only of a segment, see rollout.segments
    text: str
    """What rewards judge; of an episode that of the last turn alone."""
    routes: np.ndarray | None = None
    """uint8/uint16 [T_p + T - 1, all layers, K]; None: not recorded. Row p is the forward of
    position p, which sampled token p + 1; the last token has none."""
    route_versions: tuple[VersionSpan, ...] = ()
    """Rows `[start, end)` of `routes` are of weight version `version`; others have no route."""
    kept: SamplingMask | None = None
    """What truncated sampling could have chosen at every token; None: anything."""

    answered_ids: tuple[int, ...] | None = None
    """Token ids that it answers, never trained, where they are not those of the group's prompt: of
    a guided retry with the attempt and the cue, of a seeded prompt with its exemplars, of an
    episode with the history as a chat template has rewritten it."""
    turns: tuple[Turn, ...] = ()
    """The policy's tokens among the T, in order; others are the environment's. Empty: one turn of
    all tokens."""
    earlier: tuple["Completion", ...] = ()
    """Sequences of the episode before this last one, in order; they have no earlier ones."""
    outcome: float = math.nan
    """The environment's reward for the whole episode; NaN: none."""
    outcome_metrics: Mapping[str, float] = field(default_factory=dict)
    """What else the environment counted in it, such as calls of tools."""

    @property
    def num_tokens(self) -> int:
        """T, of this sequence."""
        return len(self.token_ids)

    @property
    def policy_mask(self) -> np.ndarray:
        """Which tokens of this sequence the policy sampled, bool [T]."""
        return policy_mask(self.turns, self.num_tokens)

    @property
    def num_policy_tokens(self) -> int:
        """n: what the policy sampled in the whole episode."""
        return sum(count_policy_tokens(one.turns, one.num_tokens) for one in self.sequences)

    @property
    def answer_start(self) -> int:
        """Token at which the last turn begins, whose text is `text`."""
        return answer_start(self.turns)

    @property
    def sequences(self) -> tuple["Completion", ...]:
        """All sequences of the episode, in order; this one is the last."""
        return (*self.earlier, self)

    def prompt_ids(self, prompt: "Prompt") -> tuple[int, ...]:
        """Return the token ids before this sequence, as an answer to the group's `prompt`."""
        if self.answered_ids is not None:
            return self.answered_ids
        return prompt.token_ids

    def prompt_length(self, prompt: "Prompt") -> int:
        """T_p: how many tokens are before this sequence, as an answer to the group's `prompt`."""
        return len(self.prompt_ids(prompt))

    @property
    def truncated(self) -> bool:
        """Whether it ended because no more tokens were allowed."""
        return self.finish_reason == "length"

    @property
    def kept_counts(self) -> "KeptCounts | None":
        """How many ids truncated sampling left at policy tokens of this sequence; None: it was not
        truncated."""
        if self.kept is None:
            return None
        sizes = self.kept.sizes[self.policy_mask]
        num_known = int((sizes > 0).sum())
        return KeptCounts(int(sizes.sum()), num_known, len(sizes) - num_known)


class KeptCounts(NamedTuple):
    """What truncated sampling left of a completion's candidates, in numbers."""

    num_ids: int  # over all policy tokens
    num_known: int  # tokens of which the ids are known
    num_missing: int  # tokens of which they are not


class Shard(Protocol):
    """A file in which completions lie, a `batching.spool.StoredShard`. It stays on the disk for as
    long as one of its completions is known."""

    @property
    def path(self) -> Path:
        """Where it is."""
        ...


@dataclass(frozen=True, slots=True)
class StoredCompletion:
    """A completion that lies in a shard: what the controller knows about it. Its log-probs, routes
    and kept ids stay in the shard. Token ids and text are read from its files each time they are
    asked for."""

    shard: Shard
    """Whose sample number `index` it is."""
    index: int
    num_tokens: int
    versions: tuple[VersionSpan, ...]  # cover [0, num_tokens) without gaps
    finish_reason: str  # "stop" or "length"
    stored_token_ids: FilePart
    stored_text: FilePart
    kept_counts: KeptCounts | None = None
    answered_ids: tuple[int, ...] | None = None
    """As of `Completion`, where the controller had it answer more than the group's prompt."""
    turns: tuple[Turn, ...] = ()  # as of `Completion`, and so are those below
    earlier: tuple["StoredCompletion", ...] = ()
    outcome: float = math.nan
    outcome_metrics: Mapping[str, float] = field(default_factory=dict)
    stored_prompt_ids: FilePart | None = None
    """Token ids before this sequence, where a chat template has rewritten the episode's history."""

    @property
    def token_ids(self) -> np.ndarray:
        """int32 [T], read now."""
        return np.frombuffer(self.stored_token_ids.read(), np.int32)

    @property
    def policy_mask(self) -> np.ndarray:
        """Which tokens of this sequence the policy sampled, bool [T]."""
        return policy_mask(self.turns, self.num_tokens)

    @property
    def num_policy_tokens(self) -> int:
        """n: what the policy sampled in the whole episode."""
        return sum(count_policy_tokens(one.turns, one.num_tokens) for one in self.sequences)

    @property
    def answer_start(self) -> int:
        """Token at which the last turn begins, whose text is `text`."""
        return answer_start(self.turns)

    @property
    def stored_answer_ids(self) -> FilePart:
        """Where the token ids of the last turn are: it ends the sequence."""
        whole = self.stored_token_ids
        skipped = 4 * self.answer_start
        return FilePart(whole.path, whole.start + skipped, whole.size - skipped)

    @property
    def sequences(self) -> tuple["StoredCompletion", ...]:
        """All sequences of the episode, in order; this one is the last."""
        return (*self.earlier, self)

    def prompt_length(self, prompt: "Prompt") -> int:
        """T_p: how many tokens are before this sequence, as an answer to the group's `prompt`."""
        if self.stored_prompt_ids is not None:
            return self.stored_prompt_ids.size // 4
        if self.answered_ids is not None:
            return len(self.answered_ids)
        return len(prompt.token_ids)

    def prompt_ids(self, prompt: "Prompt") -> tuple[int, ...]:
        """Return the token ids before this sequence, as an answer to the group's `prompt`."""
        if self.stored_prompt_ids is not None:
            ids = np.frombuffer(self.stored_prompt_ids.read(), np.int32)
            return tuple(ids.tolist())
        if self.answered_ids is not None:
            return self.answered_ids
        return prompt.token_ids

    @property
    def text(self) -> str:
        """Read now."""
        return self.stored_text.text()

    @property
    def truncated(self) -> bool:
        """Whether it ended because no more tokens were allowed."""
        return self.finish_reason == "length"


Answer = TypeVar("Answer", Completion, StoredCompletion)


@dataclass(frozen=True, slots=True)
class RolloutGroup(Generic[Answer]):
    """All G completions of one prompt, with the engine that sampled them: with their arrays beside
    the engine (`Completion`), as records in the controller (`StoredCompletion`)."""

    prompt: Prompt
    completions: tuple[Answer, ...]
    replica: int

    def as_answers_to(self, prompt: Prompt) -> "RolloutGroup[Answer]":
        """Return the completions as those of `prompt`, which rewards look at; each names the tokens
        that it answers, where they are others."""
        if self.prompt.token_ids == prompt.token_ids:
            return replace(self, prompt=prompt)
        completions = []
        for completion in self.completions:
            completions.append(replace(completion, answered_ids=self.prompt.token_ids))
        return RolloutGroup(prompt, tuple(completions), self.replica)


@dataclass(frozen=True, slots=True)
class ScoredGroup:
    """A group with its rewards. `components[name][g]` is NaN where a component was skipped."""

    group: RolloutGroup[StoredCompletion]
    components: Mapping[str, np.ndarray]  # name -> float64 [G]
    rewards: np.ndarray  # float64 [G]; NaN: unscorable
    steps: tuple[tuple[tuple[int, float], ...], ...] = ()
    """Per sample, weighted step rewards: (end of the step in the completion's text, reward)."""


def require_sound(completion: Completion, prompt_id: str) -> None:
    """Raise EngineError where the record of an episode contradicts itself: turns that overlap, are
    empty, not in order or outside of the T tokens; log-probs that are NaN elsewhere than at tokens
    of the environment, or are not there; earlier sequences that have earlier ones."""
    for number, sequence in enumerate(completion.sequences):
        where = f"sample of {prompt_id}"
        if completion.earlier:
            where += f", sequence {number}"
        if number < len(completion.earlier) and sequence.earlier:
            raise EngineError(
                "an earlier sequence of an episode has earlier sequences itself",
                where=where,
                remedy="give all of them to the last one, in order",
            )
        _require_turns_in_order(sequence, where)
        _require_logprobs_of_policy(sequence, where)


def _require_turns_in_order(sequence: Completion, where: str) -> None:
    before = 0
    for number, turn in enumerate(sequence.turns):
        if before <= turn.start < turn.end <= sequence.num_tokens:
            before = turn.end
            continue
        raise EngineError(
            f"turn {number} has the tokens [{turn.start}, {turn.end}) of a response of "
            f"{sequence.num_tokens} in which the turn before it ends at {before}",
            where=where,
            remedy="give turns in order, apart, each with a token and inside of the response",
        )


def _require_logprobs_of_policy(sequence: Completion, where: str) -> None:
    if len(sequence.logprobs) != sequence.num_tokens:
        raise EngineError(
            f"{len(sequence.logprobs)} log-probs for {sequence.num_tokens} tokens", where=where
        )
    is_unknown = np.isnan(sequence.logprobs)
    differs = np.flatnonzero(is_unknown == sequence.policy_mask)
    if not len(differs):
        return
    token = int(differs[0])
    if is_unknown[token]:
        problem = f"token {token} was sampled by the policy and has no log-prob"
    else:
        problem = f"token {token} is the environment's and has a log-prob"
    raise EngineError(
        problem, where=where, remedy="log-probs are NaN exactly at tokens outside of all turns"
    )
