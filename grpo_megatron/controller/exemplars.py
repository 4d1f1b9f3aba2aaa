"""Questions with an answer of the policy that was verified: which are remembered, and which of them
are like another question."""

import base64
import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Exemplar:
    """A solved question."""

    prompt_id: str
    question: str
    answer: str

    @cached_property
    def trigrams(self) -> frozenset[str]:
        """The trigrams of the question."""
        return trigrams(self.question)


class ExemplarStore:
    """The newest `size` exemplars of every domain, one of each prompt."""

    def __init__(self, size: int):
        self._size = size
        self._of_domains: dict[str, dict[str, Exemplar]] = {}  # by prompt id, the oldest first

    def __len__(self) -> int:
        return sum(len(of_domain) for of_domain in self._of_domains.values())

    def remember(self, domain: str, exemplar: Exemplar) -> None:
        """Take an exemplar in, in the place of an older one of its prompt; the oldest goes where
        there are too many."""
        known = self._of_domains.setdefault(domain, {})
        known.pop(exemplar.prompt_id, None)
        known[exemplar.prompt_id] = exemplar
        if len(known) > self._size:
            oldest = next(iter(known))
            del known[oldest]

    def similar(self, domain: str, prompt_id: str, question: str, count: int) -> list[Exemplar]:
        """Return the `count` exemplars of the domain with the most similar questions, the most
        similar first and among equals the newest; never that of the prompt itself."""
        own = trigrams(question)
        others = []
        for exemplar in reversed(self._of_domains.get(domain, {}).values()):
            if exemplar.prompt_id != prompt_id:
                others.append(exemplar)
        others.sort(key=lambda exemplar: -similarity(own, exemplar.trigrams))
        return others[:count]

    def state_dict(self) -> str:
        """Return all exemplars in their order, compressed."""
        rows = {}
        for domain, known in self._of_domains.items():
            rows[domain] = [[e.prompt_id, e.question, e.answer] for e in known.values()]
        return base64.b64encode(zlib.compress(json.dumps(rows).encode())).decode()

    def load_state_dict(self, state: str) -> None:
        """Continue from what `state_dict` returned; the newest are kept where this store is
        smaller."""
        rows: Mapping[str, list[list[str]]] = json.loads(zlib.decompress(base64.b64decode(state)))
        self._of_domains = {}
        for domain, of_domain in rows.items():
            for prompt_id, question, answer in of_domain:
                self.remember(domain, Exemplar(prompt_id, question, answer))


def trigrams(text: str) -> frozenset[str]:
    """Return all runs of three characters of a text, in lower case."""
    lowered = text.lower()
    if len(lowered) < 3:
        return frozenset([lowered])
    return frozenset(lowered[place : place + 3] for place in range(len(lowered) - 2))


def similarity(first: frozenset[str], second: frozenset[str]) -> float:
    """Share of what either has that both have, from 0 to 1 (Jaccard)."""
    return len(first & second) / len(first | second)
