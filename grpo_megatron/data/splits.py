"""Held-out, validation and training prompts, split by a hash of the prompt text.

The hash depends on nothing but the text, so neither the seed nor the order of the source moves a
prompt between splits, and equal prompts cannot be on both sides.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from grpo_megatron.errors import DataError
from grpo_megatron.types import Prompt


@dataclass(frozen=True, slots=True)
class Splits:
    """Disjoint by prompt text; every split is in hash order within a domain."""

    train: Mapping[str, tuple[Prompt, ...]]  # by domain
    validation: tuple[Prompt, ...]
    heldout: tuple[Prompt, ...]
    num_duplicates: int  # prompts dropped because an earlier one has the same text


def text_hash(text: str) -> str:
    """The sort key of splits and the stem of prompt ids: sha256, hex."""
    return hashlib.sha256(text.encode("utf-8", errors="surrogatepass")).hexdigest()


def make_splits(prompts: Iterable[Prompt], *, num_heldout: int, num_validation: int) -> Splits:
    """Drop duplicates (first wins), then take held-out and validation prompts by hash.

    Held-out and validation prompts are shared out over domains by their number of distinct
    prompts (largest remainder, at least one each where the number allows it).

    Args:
        prompts: All prompts of all domains.
        num_heldout: Exact number of held-out prompts over all domains.
        num_validation: Exact number of validation prompts over all domains.

    Raises:
        DataError: A domain would keep no training prompt.
    """
    domains, num_duplicates = _distinct_by_domain(prompts)
    sizes = {name: len(members) for name, members in domains.items()}
    heldout_of = share(num_heldout, sizes)
    validation_of = share(num_validation, sizes)
    train: dict[str, tuple[Prompt, ...]] = {}
    validation: list[Prompt] = []
    heldout: list[Prompt] = []
    for name, members in domains.items():
        _check_size(name, sizes, heldout_of[name], validation_of[name], num_duplicates)
        members.sort(key=lambda prompt: text_hash(prompt.text))
        end_heldout, end = heldout_of[name], heldout_of[name] + validation_of[name]
        heldout += members[:end_heldout]
        validation += members[end_heldout:end]
        train[name] = tuple(members[end:])
    return Splits(train, tuple(validation), tuple(heldout), num_duplicates)


def share(total: int, sizes: Mapping[str, int]) -> dict[str, int]:
    """Split `total` over names in proportion to `sizes`: largest remainder, at least one each
    where `total` is large enough. The parts sum to `total`."""
    floor = 1 if total >= len(sizes) else 0
    rest, size = total - floor * len(sizes), max(1, sum(sizes.values()))
    parts = {name: floor + rest * count // size for name, count in sizes.items()}
    by_remainder = sorted(sizes, key=lambda name: (-(rest * sizes[name] % size), name))
    for name in by_remainder[: total - sum(parts.values())]:
        parts[name] += 1
    return parts


def _distinct_by_domain(prompts: Iterable[Prompt]) -> tuple[dict[str, list[Prompt]], int]:
    seen: set[str] = set()
    domains: dict[str, list[Prompt]] = {}
    num_duplicates = 0
    for prompt in prompts:
        members = domains.setdefault(prompt.domain, [])
        if prompt.text in seen:
            num_duplicates += 1
        else:
            seen.add(prompt.text)
            members.append(prompt)
    if not domains:
        raise DataError("no prompts", remedy="check [[domains]]")
    return domains, num_duplicates


def _check_size(name: str, sizes: Mapping[str, int], heldout: int, validation: int,
                num_duplicates: int) -> None:
    if sizes[name] > heldout + validation:
        return
    others: Sequence[str] = [other for other in sizes if other != name]
    scope = f" (its share beside {', '.join(others)})" if others else ""
    raise DataError(
        f"domain {name!r} has {sizes[name]} distinct prompts, but {heldout} held-out and "
        f"{validation} validation prompts{scope} leave none for training; "
        f"{num_duplicates} duplicates were dropped",
        where="[data] num_heldout, num_validation",
        remedy="raise num_problems of the domain, or lower num_heldout or num_validation")
