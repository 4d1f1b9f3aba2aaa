"""Which prompts a step trains on: weighted domains, an own order per domain, resumable.

Shuffles sort by a hash of (seed, domain, epoch, prompt id): no generator, no order of the data."""

import hashlib
import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from grpo_megatron.config.run import CurriculumConfig
from grpo_megatron.data.curriculum import Curriculum
from grpo_megatron.errors import DataError
from grpo_megatron.types import Prompt


class PromptSampler:
    """Draws prompts; `state_dict` is a few numbers per domain, ready for JSON.

    Domains take turns by smooth weighted round-robin: each turn is that of the domain that is
    furthest behind its share, N·w/Σw of N turns. Of k domains none is ever a whole prompt ahead of
    its share, or more than 1/2 + 1/3 + … + 1/k prompts behind it. A domain that runs out in a draw
    with excluded prompts does not make up for the turns that it missed. One of weight 0 has no
    turns, also where all others have run out.

    Within an epoch of a domain no prompt repeats; within a batch none does either. With
    `curriculum` they are drawn by success rate instead of epoch by epoch. `size_setting` says how
    many are drawn at a time, for the message where a domain has fewer."""

    def __init__(
        self,
        train: Mapping[str, Sequence[Prompt]],
        weights: Mapping[str, float],
        seed: int,
        curriculum: CurriculumConfig | None = None,
        *,
        size_setting: str = "batch.num_prompts",
    ):
        self.acceptance = 1.0  # kept fraction of the last step's groups: sizes the next draw
        self._size_setting = size_setting
        self._weights = {name: float(weights[name]) for name in train}
        self._num_drawn = dict.fromkeys(train, 0)
        self._num_passed = dict.fromkeys(train, 0)  # turns that count as had, without a prompt
        self._prompts: dict[str, dict[str, Prompt]] = {}
        self._orders: dict[str, Curriculum | Epochs] = {}
        for name, prompts in train.items():
            by_id = {prompt.prompt_id: prompt for prompt in prompts}
            key = f"{seed}\0{name}"
            self._prompts[name] = by_id
            if curriculum is not None:
                self._orders[name] = Curriculum(by_id, key, curriculum)
            else:
                self._orders[name] = Epochs(by_id, key)

        self._identity: dict[str, Any] = {"seed": seed, "domains": ", ".join(train)}
        """What must be equal for a state to fit, by what it is called in messages."""
        for name, by_id in self._prompts.items():
            identity = f"{len(by_id)} prompts (fingerprint {_fingerprint(by_id)})"
            self._identity[f"weight of domain {name!r}"] = self._weights[name]
            self._identity[f"curriculum of domain {name!r}"] = curriculum is not None
            self._identity[f"prompts of domain {name!r}"] = identity

    def draw(self, n: int, exclude: Collection[str] | None = None) -> list[Prompt]:
        """Return the next `n` distinct prompts, none with an id in `exclude`.

        Where `exclude` is given, a domain that has no others left is out of the turns from the
        first one that it cannot take; there are fewer than `n` only where no domain with a weight
        has any.
        Without it, too few prompts of a domain are a DataError."""
        turns = self._turns(n, exclude)
        waiting: dict[str, Iterator[Prompt]] = {}
        for name, count in Counter(turns).items():
            waiting[name] = iter(self._draw(name, count, exclude))
        return [next(waiting[name]) for name in turns]

    def observe(self, prompt: Prompt, success: float) -> None:
        """Take in the fraction of a prompt's samples that were correct, for the curriculum."""
        self._orders[prompt.domain].observe(prompt.prompt_id, success)

    def metrics(self) -> dict[str, int]:
        """`curriculum/<bucket>`: prompts by bucket; empty without curriculum."""
        counts: Counter[str] = Counter()
        for name, order in self._orders.items():
            for bucket, number in order.buckets().items():
                counts[f"curriculum/{bucket}"] += number
                if len(self._orders) > 1:
                    counts[f"curriculum/{bucket}@{name}"] += number
        return counts

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps: where every domain's order is, and of which prompts."""
        return {
            "of": self._identity,
            "acceptance": self.acceptance,
            "num_drawn": dict(self._num_drawn),
            "num_passed": dict(self._num_passed),
            "orders": {name: order.state_dict() for name, order in self._orders.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`; DataError if it is of another seed, domains or prompts."""
        for what, current in self._identity.items():
            saved = state["of"].get(what, "none")
            if saved != current:
                raise DataError(
                    f"the checkpoint's sampler does not fit this run: {what}: checkpoint has "
                    f"{saved}, this run has {current}",
                    where="resume",
                    remedy="resume with the recipe and data of the checkpoint, or start a new run",
                )
        for name, order in self._orders.items():
            order.load_state_dict(state["orders"][name])
        self.acceptance = state["acceptance"]
        self._num_drawn = dict(state["num_drawn"])
        # states of older versions have none: a domain that ran out made up for it later
        self._num_passed = dict.fromkeys(self._num_drawn, 0) | state.get("num_passed", {})

    def _turns(self, n: int, exclude: Collection[str] | None) -> list[str]:
        """Return whose prompts the next `n` are. exclude: as of `draw`."""
        may_run_out = exclude is not None
        left = {}
        for name, prompts in self._prompts.items():
            left[name] = len(prompts) - len(prompts.keys() & (exclude or ()))
        had = self._had()
        taking_turns = [name for name in had if self._weights[name] > 0]
        used_up: list[str] = []
        turns: list[str] = []
        while len(turns) < n and taking_turns:
            name = _next_domain(self._weights, had, taking_turns)
            if may_run_out and left[name] == 0:
                taking_turns.remove(name)
                used_up.append(name)
                continue
            had[name] += 1
            left[name] -= 1
            turns.append(name)
        if used_up:
            # level with those that went on, or with the one that went on longest
            self._pass(used_up, had, taking_turns or used_up[-1:])
        return turns

    def _pass(self, used_up: Iterable[str], had: Mapping[str, int], others: Sequence[str]) -> None:
        """Give up the turns that the domains `used_up` have missed beside `others`: they would make
        up for them in later steps, in which they run out again. had: by domain."""
        had_of_others = sum(had[name] for name in others)
        weight_of_others = sum(self._weights[name] for name in others)
        for name in used_up:
            due = math.floor(self._weights[name] * had_of_others / weight_of_others)
            self._num_passed[name] += max(0, due - had[name])

    def _had(self) -> dict[str, int]:
        """Return the turns that each domain has had, with those that it passed."""
        return {name: self._num_drawn[name] + self._num_passed[name] for name in self._num_drawn}

    def _draw(self, name: str, count: int, exclude: Collection[str] | None) -> list[Prompt]:
        prompts = self._prompts[name]
        if exclude is None and count > len(prompts):
            raise DataError(
                f"domain {name!r} has {len(prompts)} training prompts, but one batch "
                f"asks for {count} of them",
                where=self._size_setting,
                remedy="lower it or the domain's weight, or add problems",
            )
        had = prompts.keys() & (exclude or ())
        ids = self._orders[name].draw(count, had, self._num_drawn[name])
        self._num_drawn[name] += len(ids)
        return [prompts[prompt_id] for prompt_id in ids]


def turns_of_first_draw(weights: Mapping[str, float], n: int) -> Counter[str]:
    """Return how many of the first `n` prompts of a sampler are of each domain, if none runs
    out. weights: by domain, in its order."""
    had = dict.fromkeys(weights, 0)
    taking_turns = [name for name in weights if weights[name] > 0]
    for _ in range(n):
        had[_next_domain(weights, had, taking_turns)] += 1
    return Counter(had)


def _next_domain(
    weights: Mapping[str, float], had: Mapping[str, int], among: Collection[str]
) -> str:
    """Return the domain that is furthest behind its share of the turns, `among` some domains.
    weights, had: by domain."""
    turn = sum(had[name] for name in among) + 1
    weight_sum = sum(weights[name] for name in among)

    def behind(name: str) -> float:
        return weights[name] * turn / weight_sum - had[name]

    return max(among, key=behind)


class Epochs:
    """Every prompt of a domain once, in shuffled order; then in another. Like `Curriculum`."""

    def __init__(self, prompt_ids: Iterable[str], key: str):
        self._ids = list(prompt_ids)
        self._key = key
        self.load_state_dict({"epoch": 0, "position": 0, "deferred": []})

    def draw(self, count: int, exclude: Collection[str], num_drawn: int) -> list[str]:
        """See `Curriculum.draw`; what was drawn before does not matter."""
        count = min(count, len(self._ids) - len(exclude))
        ids = self._take(count, exclude)
        if len(ids) < count:
            # No prompt twice in a batch: what this one already has ends the new epoch.
            self.load_state_dict(
                {"epoch": self._epoch + 1, "position": 0, "deferred": [*ids, *sorted(exclude)]}
            )
            ids += self._take(count - len(ids), exclude)
        return ids

    def observe(self, prompt_id: str, success: float) -> None:
        """Do nothing: success does not matter here."""

    def buckets(self) -> dict[str, int]:
        """Return nothing: there are no buckets without success rates."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Return the epoch, the position in its order and the prompts that were moved to its
        end."""
        return {"epoch": self._epoch, "position": self._position, "deferred": self._deferred}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`; the epoch's order is made again from its number."""
        self._epoch = state["epoch"]
        self._position = state["position"]
        self._deferred = list(state["deferred"])  # moved to the end of this epoch's order
        late = set(self._deferred)
        prefix = f"{self._key}\0{self._epoch}\0"
        self._order = sorted(
            self._ids,
            key=lambda prompt_id: (
                prompt_id in late,
                hashlib.blake2b((prefix + prompt_id).encode(), digest_size=16).digest(),
            ),
        )

    def _take(self, count: int, exclude: Collection[str]) -> list[str]:
        ids: list[str] = []
        while len(ids) < count and self._position < len(self._order):
            prompt_id = self._order[self._position]
            if prompt_id not in exclude:
                ids.append(prompt_id)
            self._position += 1
        return ids


def _fingerprint(prompts: Mapping[str, Prompt]) -> str:
    digest = hashlib.sha256()
    for prompt_id, prompt in sorted(prompts.items()):
        # repr delimits: no two different triples give the same bytes
        digest.update(repr((prompt_id, prompt.text, prompt.answer)).encode())
    return digest.hexdigest()[:16]
