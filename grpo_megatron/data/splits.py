"""Held-out, validation and training prompts, split by a hash of the prompt text.

The hash depends on nothing but the text, so neither the seed nor the order of the source moves a
prompt between splits, and equal prompts cannot be on both sides."""

import hashlib
from collections.abc import Iterable, Mapping
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
    """Drop duplicates (first wins), then take exactly so many held-out and validation prompts by
    hash, shared out over domains by their number of distinct prompts."""
    prompts = list(prompts)
    if not prompts:
        raise DataError("no prompts", remedy="check [[domains]]")
    distinct: dict[str, Prompt] = {}
    for prompt in prompts:
        distinct.setdefault(prompt.text, prompt)
    train: dict[str, list[Prompt]] = {prompt.domain: [] for prompt in prompts}
    for prompt in sorted(distinct.values(), key=lambda prompt: text_hash(prompt.text)):
        train[prompt.domain].append(prompt)
    sizes = {name: len(members) for name, members in train.items()}
    num_duplicates = len(prompts) - len(distinct)
    shares = share(num_heldout, sizes), share(num_validation, sizes)
    heldout, validation, kept = [], [], {}
    for name, members in train.items():
        first, second = (each[name] for each in shares)
        heldout += members[:first]
        validation += members[first:first + second]
        kept[name] = tuple(members[first + second:])
        if not kept[name]:
            others = [other for other in sizes if other != name]
            scope = f" (its share beside {', '.join(others)})" if others else ""
            raise DataError(
                f"domain {name!r} has {sizes[name]} distinct prompts, but {first} held-out and "
                f"{second} validation prompts{scope} leave none for training; {num_duplicates} "
                "duplicates were dropped", where="[data] num_heldout, num_validation",
                remedy="raise num_problems of the domain, or lower num_heldout or num_validation")
    return Splits(kept, tuple(validation), tuple(heldout), num_duplicates)


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
