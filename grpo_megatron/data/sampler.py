"""Which prompts a step trains on: weighted domains, an own shuffled epoch per domain, resumable.

Shuffles sort by a hash of (seed, domain, epoch, prompt id) instead of drawing random numbers: the
order then depends on no library's generator and not on the order of the data.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from grpo_megatron.config.sampling import CurriculumConfig
from grpo_megatron.data.curriculum import Curriculum
from grpo_megatron.errors import DataError
from grpo_megatron.types import Prompt, PromptBatch


class PromptSampler:
    """Yields batches; `state_dict` is a few numbers per domain, ready for JSON.

    Domains take turns so that after N prompts a domain of weight w has had N·w/Σw of them, within
    one. Within an epoch of a domain no prompt repeats; within a batch none does either.

    Args:
        train: Training prompts by domain.
        weights: Weight by domain, greater than 0.
        seed: Seed of the shuffles.
        curriculum: Draw by success rate instead of epoch by epoch.

    Raises:
        DataError: A domain without prompts, or with two prompts of the same id.
    """

    def __init__(self, train: Mapping[str, Sequence[Prompt]], weights: Mapping[str, float],
                 seed: int, curriculum: CurriculumConfig | None = None):
        if not train:
            raise DataError("no training prompts", remedy="check [[domains]]")
        self.seed = seed
        self.acceptance = 1.0  # kept fraction of the last step's groups: sizes the next draw
        self._weights = {name: float(weights[name]) for name in train}
        self._domains = {name: _Domain(name, prompts, seed, curriculum)
                         for name, prompts in train.items()}

    def next_batch(self, step: int, n: int,
                   exclude: Collection[str] | None = None) -> PromptBatch:
        """The next `n` prompts; `step` only labels the batch.

        Args:
            exclude: Ids that this step has already. If given, a domain short of others gives
                fewer prompts.

        Raises:
            DataError: Without `exclude`: a domain has fewer prompts than its part of the batch.
        """
        counts = dict.fromkeys(self._domains, 0)
        turns = []
        for _ in range(n):
            name = self._next_domain(counts)
            counts[name] += 1
            turns.append(name)
        drawn = {name: iter(self._domains[name].draw(count, exclude))
                 for name, count in counts.items()}
        found = (next(drawn[name], None) for name in turns)
        return PromptBatch(step, tuple(prompt for prompt in found if prompt is not None))

    def observe(self, prompt: Prompt, success: float) -> None:
        """Take the fraction of correct completions of a prompt that was sampled."""
        if (curriculum := self._domains[prompt.domain].curriculum) is not None:
            curriculum.observe(prompt.prompt_id, success)

    def metrics(self) -> dict[str, int]:
        """`curriculum/<bucket>`: prompts by bucket; empty without curriculum."""
        counts: Counter[str] = Counter()
        for name, domain in self._domains.items():
            for bucket, number in domain.curriculum.buckets().items() if domain.curriculum else ():
                counts[f"curriculum/{bucket}"] += number
                if len(self._domains) > 1:
                    counts[f"curriculum/{bucket}@{name}"] = number
        return counts

    def state_dict(self) -> dict[str, Any]:
        """Where sampling stands; `load_state_dict` continues as if never interrupted."""
        return {"of": self._identity(), "acceptance": self.acceptance, "domains": {
            name: domain.state_dict() for name, domain in self._domains.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`.

        Raises:
            DataError: The state is of another seed, of other domains or of other prompts.
        """
        saved = state["of"]
        for what, current in self._identity().items():
            if saved.get(what, "none") != current:
                raise DataError(
                    f"the checkpoint's sampler does not fit this run: {what}: checkpoint has "
                    f"{saved.get(what, 'none')}, this run has {current}", where="resume",
                    remedy="resume with the recipe and data of the checkpoint, or start a new run")
        for name, domain in self._domains.items():
            domain.load_state_dict(state["domains"][name])
        self.acceptance = state["acceptance"]

    def _identity(self) -> dict[str, Any]:
        """What must be equal for a state to fit, in words."""
        return {"seed": self.seed, "domains": ", ".join(self._domains), **{
            f"{what} of domain {name!r}": value for name, domain in self._domains.items()
            for what, value in (("weight", self._weights[name]), ("prompts", domain.prompts_told),
                                ("curriculum", domain.curriculum is not None))}}

    def _next_domain(self, counts: Mapping[str, int]) -> str:
        had = {name: domain.num_drawn + counts[name] for name, domain in self._domains.items()}
        turn, weight_sum = sum(had.values()) + 1, sum(self._weights.values())
        return max(had, key=lambda name: self._weights[name] * turn / weight_sum - had[name])


class _Domain:
    """The epochs of one domain, or its curriculum."""

    def __init__(self, name: str, prompts: Sequence[Prompt], seed: int,
                 curriculum: CurriculumConfig | None):
        if not prompts:
            raise DataError(f"domain {name!r} has no training prompts", remedy="add problems")
        self._name, self._seed = name, seed
        self._prompts = {prompt.prompt_id: prompt for prompt in prompts}
        if len(self._prompts) < len(prompts):
            raise DataError(f"domain {name!r} has prompts with equal ids",
                            remedy="remove duplicates before sampling")
        self.prompts_told = f"{len(prompts)} prompts (fingerprint {_fingerprint(self._prompts)})"
        self._epoch, self._position = 0, 0
        self.num_drawn = 0
        self._deferred: list[str] = []  # moved to the end of this epoch's order
        self._order = self._shuffled()
        self.curriculum = curriculum and Curriculum(self._prompts, f"{seed}\0{name}", curriculum)

    def draw(self, count: int, exclude: Collection[str] | None) -> list[Prompt]:
        """The next `count` distinct prompts, over an epoch's end if need be."""
        if exclude is None and count > len(self._prompts):
            raise DataError(
                f"domain {self._name!r} has {len(self._prompts)} training prompts, but one batch "
                f"asks for {count} of them", where="[batch] num_prompts",
                remedy="lower num_prompts or the domain's weight, or add problems")
        had = {prompt_id for prompt_id in exclude or () if prompt_id in self._prompts}
        if self.curriculum is not None:
            ids = self.curriculum.draw(count, had, self.num_drawn)
        else:
            count = min(count, len(self._prompts) - len(had))
            ids = self._take(count, had)
            if len(ids) < count:
                # A prompt must not occur twice in a batch: what this batch already has goes to
                # the end of the new epoch.
                self._epoch, self._position = self._epoch + 1, 0
                self._deferred = [*ids, *sorted(had)]
                self._order = self._shuffled()
                ids += self._take(count - len(ids), had)
        self.num_drawn += len(ids)
        return [self._prompts[prompt_id] for prompt_id in ids]

    def state_dict(self) -> dict[str, Any]:
        return {"num_drawn": self.num_drawn, "epoch": self._epoch, "position": self._position,
                "deferred": list(self._deferred),
                **({"curriculum": self.curriculum.state_dict()} if self.curriculum else {})}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.num_drawn, self._epoch = state["num_drawn"], state["epoch"]
        self._position, self._deferred = state["position"], list(state["deferred"])
        self._order = self._shuffled()
        if self.curriculum is not None:
            self.curriculum.load_state_dict(state["curriculum"])

    def _take(self, count: int, had: Collection[str]) -> list[str]:
        ids: list[str] = []
        while len(ids) < count and self._position < len(self._order):
            if (prompt_id := self._order[self._position]) not in had:
                ids.append(prompt_id)
            self._position += 1
        return ids

    def _shuffled(self) -> list[str]:
        prefix = f"{self._seed}\0{self._name}\0{self._epoch}\0"
        deferred = set(self._deferred)

        def key(prompt_id: str) -> tuple[bool, bytes]:
            digest = hashlib.blake2b((prefix + prompt_id).encode(), digest_size=16).digest()
            return prompt_id in deferred, digest

        return sorted(self._prompts, key=key)


def _fingerprint(prompts: Mapping[str, Prompt]) -> str:
    digest = hashlib.sha256()
    for prompt_id in sorted(prompts):
        prompt = prompts[prompt_id]
        # repr delimits: no two different triples give the same bytes
        digest.update(repr((prompt_id, prompt.text, prompt.answer)).encode())
    return digest.hexdigest()[:16]
