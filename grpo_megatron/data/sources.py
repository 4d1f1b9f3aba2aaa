"""Problems of data files, and procedural ones: of reasoning-gym
(https://github.com/open-thought/reasoning-gym), and pictures of shapes."""

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from grpo_megatron.config.run import DomainConfig
from grpo_megatron.config.suggest import did_you_mean
from grpo_megatron.data.row_files import Rows, read_rows
from grpo_megatron.data.row_formats import problem_of, text_of
from grpo_megatron.data.shapes import shape_problems
from grpo_megatron.errors import DataError, raised_as
from grpo_megatron.types import Problem

_FILE_ARGUMENTS = ("answer_after", "domain_field", "split")


def load_problems(domain: DomainConfig, seed: int) -> list[Problem]:
    """Return the problems of one domain in the source's order; `seed` is for procedural sources."""
    return list(iterate_problems(domain, seed))


def iterate_problems(
    domain: DomainConfig, seed: int, rows: Rows | None = None
) -> Iterator[Problem]:
    """Yield the problems of one domain, one after the other: nothing is read ahead.

    rows: of its file, where that has one and somebody else reads it."""
    where = f"[[domains]] {domain.name}"
    if domain.source == "file":
        return _of_file(domain, rows)
    if domain.source == "shapes":
        return shape_problems(domain, seed)
    return _of_gym(domain, seed, where)


def known_arguments(domain: DomainConfig, known: Sequence[str]) -> Mapping[str, Any]:
    """Return the arguments of a file domain. Raises DataError for one that is not `known`, or is no
    text."""
    unknown = [key for key in domain.arguments if key not in known]
    if unknown:
        raise DataError(
            f"a file domain has no argument {unknown[0]!r}",
            where=f"[[domains]] {domain.name}",
            remedy=f"known: {', '.join(known)}",
        )
    for key, value in domain.arguments.items():
        if not isinstance(value, str) or not value:
            raise DataError(
                f"the argument is {value!r}, expected a text that is not empty",
                where=f"[[domains]] {domain.name}, arguments.{key}",
                remedy="correct it, or leave it out",
            )
    return domain.arguments


def _of_file(domain: DomainConfig, rows: Rows | None) -> Iterator[Problem]:
    """Yield the problems of a file or a folder of shards, at least one and at most
    `domain.num_problems`.

    Of `domain.arguments`, `split` chooses files of a folder; `domain_field` keeps only the rows
    whose field of this name equals the domain's name; the answer is what follows the last
    `answer_after` (`"####"` for GSM8K). Other fields become metadata. Raises DataError, with the
    line, for what is not as it should be."""
    path = domain.path
    assert path is not None  # rule domain_source
    arguments = known_arguments(domain, _FILE_ARGUMENTS)
    if rows is None:
        rows = read_rows(path, arguments.get("split"))
    is_empty = True
    for problem in itertools.islice(_problems(domain, rows), domain.num_problems):
        is_empty = False
        yield problem
    if is_empty:
        remedy = "the file is empty"
        if "domain_field" in arguments:
            remedy = f"no row has {arguments['domain_field']!r} equal to {domain.name!r}"
        raise DataError(f"no problems for domain {domain.name!r}", where=str(path), remedy=remedy)


def _problems(domain: DomainConfig, rows: Rows) -> Iterator[Problem]:
    for where, fields in rows:
        if is_of_domain(domain, where, fields):
            problem = replace(problem_of(where, fields, domain), where=where)
            yield _with_marked_answer(domain, where, problem)


def is_of_domain(domain: DomainConfig, where: str, fields: Mapping[str, Any]) -> bool:
    """Whether a row of a file for several domains is of this one (`arguments.domain_field`)."""
    name = domain.arguments.get("domain_field")
    if name is None:
        return True
    return text_of(where, fields, name, "arguments.domain_field") == domain.name


def _with_marked_answer(domain: DomainConfig, where: str, problem: Problem) -> Problem:
    marker = domain.arguments.get("answer_after")
    if marker is None:
        return problem
    _, found, after = problem.answer.rpartition(marker)
    if not found or not after.strip():
        raise DataError(
            f"field {domain.answer_field!r} has nothing after {marker!r}",
            where=where,
            remedy="correct the line, or `answer_after`",
        )
    return replace(problem, answer=after.strip())


def _of_gym(domain: DomainConfig, seed: int, where: str) -> Iterator[Problem]:
    """`domain.num_problems` problems, or as many as the data set draws by itself.
    `arguments.seed` wins over `seed`, so that a recipe can pin its problems."""
    from reasoning_gym.factory import DATASETS, create_dataset

    assert domain.dataset is not None  # rule domain_source
    if domain.dataset not in DATASETS:
        raise DataError(
            f"reasoning-gym has no data set {domain.dataset!r}",
            where=where,
            remedy=did_you_mean(domain.dataset, sorted(DATASETS)),
        )
    what = f"reasoning-gym data set {domain.dataset!r}"
    known = {f.name for f in dataclasses.fields(DATASETS[domain.dataset][1])} - {"size"}
    unknown = [key for key in domain.arguments if key not in known]
    if unknown:
        remedy = did_you_mean(unknown[0], sorted(known))
        if unknown[0] == "size":
            remedy = "use num_problems"
        raise DataError(f"{what} has no argument {unknown[0]!r}", where=where, remedy=remedy)
    arguments = {"seed": seed, **domain.arguments}
    if domain.num_problems is not None:
        arguments["size"] = domain.num_problems
    refusals = AssertionError, TypeError, ValueError
    with raised_as(
        DataError,
        f"{what} refuses its arguments",
        refusals,
        where=where,
        remedy=f"arguments given: {dict(domain.arguments)}",
    ):
        dataset = create_dataset(domain.dataset, **arguments)
    for item in dataset:
        if domain.prompt_field not in item:
            raise DataError(
                f"reasoning-gym items have no field {domain.prompt_field!r}",
                where=where,
                remedy=f"fields: {', '.join(item)}",
            )
        # Data sets with many right answers have none of their own; their scorer decides.
        answer = item.get(domain.answer_field)
        if answer is None:
            answer = ""
        metadata = {**item.get("metadata", {}), "question": item["question"]}  # for the scorers
        yield Problem(str(item[domain.prompt_field]), str(answer), metadata)
