"""Whether a recipe's data can have prompts left for training, told before anything starts."""

import itertools
from collections.abc import Iterable
from contextlib import suppress

from grpo_megatron.config.run import DomainConfig, RunConfig
from grpo_megatron.data.preferences import read_preferences
from grpo_megatron.data.sources import iterate_problems
from grpo_megatron.errors import DataError


def refuse_too_few_rows(config: RunConfig) -> None:
    """DataError where the rows of files are too few for held-out, validation and training prompts,
    however many of them are equal or too long.

    Of each file no more rows are read than settle this. Files that are not there (yet) and rows
    that cannot be read are left to the controller, as are data sets that are made."""
    num_heldout = config.data.num_heldout
    num_validation = config.data.num_validation
    num_kept = num_heldout + num_validation
    sizes: dict[str, int] = {}
    for domain in config.domains:
        size = _size_up_to(config, domain, num_kept + 1)
        if size is not None:
            sizes[domain.name] = size
    total = sum(sizes.values())
    if len(sizes) == len(config.domains) and total <= num_kept:
        what = f"the domains have {total}"
        if len(sizes) == 1:
            what = f"domain {config.domains[0].name!r} has {total}"
        raise _too_few(what, num_heldout, num_validation)
    least_heldout = _least_share(num_heldout, len(config.domains))
    least_validation = _least_share(num_validation, len(config.domains))
    for name, size in sizes.items():
        if size <= least_heldout + least_validation:
            raise _too_few(f"domain {name!r} has {size}", least_heldout, least_validation)


def _least_share(total: int, num_domains: int) -> int:
    """Return how many of `total` prompts every domain gives at least, see `data.prompts.share`."""
    return int(total >= num_domains)


def _size_up_to(config: RunConfig, domain: DomainConfig, most: int) -> int | None:
    """Count the rows of a domain's file, and no more than `most`; None: it cannot be known."""
    if domain.source != "file" or domain.path is None or not domain.path.exists():
        return None
    rows: Iterable[object] = iterate_problems(domain, config.seed)
    if config.trains_preferences:
        rows = read_preferences(domain, config.preferences)
    with suppress(DataError):
        return sum(1 for _ in itertools.islice(rows, most))
    return None


def _too_few(what: str, num_heldout: int, num_validation: int) -> DataError:
    return DataError(
        f"{what} row(s), and {num_heldout} held-out and {num_validation} validation prompts leave "
        "none for training",
        where="[data] num_heldout, num_validation",
        remedy="add rows, or lower num_heldout or num_validation",
    )
