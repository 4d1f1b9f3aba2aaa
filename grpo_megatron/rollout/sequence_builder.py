"""One sequence of an episode while it grows: turns of the policy, tokens of the environment."""

from collections.abc import Sequence

import numpy as np

from grpo_megatron.types import Completion, SamplingMask, Turn, VersionSpan


class SequenceBuilder:
    """Puts turns and the environment's tokens behind a prompt, in the order in which they come.

    The next turn answers `token_ids`; its routes begin at row `routes_from`, so that rows of the
    environment's tokens are those of the prefill that saw them."""

    def __init__(self, prompt_ids: Sequence[int]):
        self.prompt_ids = tuple(prompt_ids)
        self.turns: list[Turn] = []
        self._response: list[int] = []
        self._logprobs: list[np.ndarray] = []
        self._versions: list[VersionSpan] = []
        self._unread = 0
        """Tokens of the environment at the end, which no weights have read yet."""
        self._routes: list[np.ndarray | None] = []
        self._num_rows: list[int] = []
        self._route_versions: list[VersionSpan] = []
        self._kept_ids: list[np.ndarray] = []
        self._kept_sizes: list[np.ndarray] = []
        self._is_truncated_sampling = False

    @property
    def num_tokens(self) -> int:
        """T, of the response so far."""
        return len(self._response)

    @property
    def token_ids(self) -> list[int]:
        """Prompt and response so far."""
        return [*self.prompt_ids, *self._response]

    @property
    def routes_from(self) -> int:
        """First row whose routes are not known: all rows before the one that samples a turn's last
        token are."""
        return sum(self._num_rows)

    def add_turn(self, sampled: Completion, state: str) -> None:
        """Take what the policy sampled behind `token_ids`, in the environment's `state`; its routes
        begin at `routes_from`."""
        start = self.num_tokens
        first = start - self._unread
        num_rows = len(self.prompt_ids) + start + sampled.num_tokens - 1 - self.routes_from
        self._add_versions(sampled, start, first)
        self._unread = 0
        self._response += sampled.token_ids.tolist()
        self._logprobs.append(sampled.logprobs)
        self._add_kept(sampled)
        self._routes.append(sampled.routes)
        self._num_rows.append(num_rows)
        self._route_versions += sampled.route_versions
        self.turns.append(Turn(start, self.num_tokens, state=state))

    def add_environment(self, token_ids: Sequence[int]) -> None:
        """Take tokens that the policy has not sampled: the environment's, and the template's."""
        self._response += token_ids
        self._unread += len(token_ids)
        self._logprobs.append(np.full(len(token_ids), np.nan, np.float32))
        self._kept_ids.append(np.empty(0, np.int32))
        self._kept_sizes.append(np.zeros(len(token_ids), np.int64))

    def judge_turn(self, reward: float, *, spoilt: bool) -> None:
        """Say what the environment gave for the last turn, and whether a tool failed in it."""
        last = self.turns[-1]
        self.turns[-1] = Turn(last.start, last.end, reward, last.state, spoilt)

    def completion(self, finish_reason: str) -> Completion:
        """Return the sequence as a record, without text; it ends with a turn."""
        return Completion(
            np.array(self._response, np.int32),
            np.concatenate(self._logprobs).astype(np.float32),
            tuple(self._versions),
            finish_reason,
            text="",
            routes=self._all_routes(),
            route_versions=tuple(self._route_versions),
            kept=self._all_kept(),
            turns=tuple(self.turns),
        )

    def _add_versions(self, sampled: Completion, start: int, first: int) -> None:
        """Count tokens of the environment from `first` on as of the weights that read them."""
        for number, span in enumerate(sampled.versions):
            span_start = start + span.start
            if number == 0:
                span_start = first
            found = VersionSpan(span.version, span_start, start + span.end)
            last = None
            if self._versions:
                last = self._versions[-1]
            if last is not None and last.version == found.version:
                self._versions[-1] = VersionSpan(last.version, last.start, found.end)
            else:
                self._versions.append(found)

    def _add_kept(self, sampled: Completion) -> None:
        if sampled.kept is None:
            self._kept_ids.append(np.empty(0, np.int32))
            self._kept_sizes.append(np.zeros(sampled.num_tokens, np.int64))
            return
        self._is_truncated_sampling = True
        self._kept_ids.append(sampled.kept.ids)
        self._kept_sizes.append(sampled.kept.sizes)

    def _all_kept(self) -> SamplingMask | None:
        if not self._is_truncated_sampling:
            return None
        sizes = np.concatenate(self._kept_sizes)
        offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)])
        return SamplingMask(np.concatenate(self._kept_ids), offsets)

    def _all_routes(self) -> np.ndarray | None:
        """Return rows of all turns [T_p + T - 1, L, K], zeros where one has none; None where all
        have."""
        known = [routes for routes in self._routes if routes is not None]
        if not known:
            return None
        rows = []
        for routes, num_rows in zip(self._routes, self._num_rows, strict=True):
            if routes is None:
                routes = np.zeros((num_rows, *known[0].shape[1:]), known[0].dtype)
            rows.append(routes)
        joined: np.ndarray = np.concatenate(rows)
        return joined
