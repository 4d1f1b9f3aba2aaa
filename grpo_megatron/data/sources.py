"""Problems of JSONL and Parquet files, and procedural ones of reasoning-gym
(https://github.com/open-thought/reasoning-gym)."""

import dataclasses
import itertools
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from grpo_megatron.config.run import DomainConfig
from grpo_megatron.config.suggest import did_you_mean
from grpo_megatron.errors import DataError, raised_as
from grpo_megatron.types import Problem

_FILE_ARGUMENTS = ("answer_after", "domain_field")
_Rows = Iterator[tuple[str, Mapping[str, Any]]]  # (file:line or file:row, both from 1; fields)


def load_problems(domain: DomainConfig, seed: int) -> list[Problem]:
    """The problems of one domain in the source's order; `seed` is for procedural sources."""
    return list(_iterate(domain, seed))


def first_problem(domain: DomainConfig, seed: int) -> Problem:
    """The problem with which `load_problems` begins; nothing after it is read."""
    return next(_iterate(domain, seed))


def _iterate(domain: DomainConfig, seed: int) -> Iterator[Problem]:
    where = f"[[domains]] {domain.name}"
    if domain.source == "file":
        return _of_file(domain, where)
    return _of_gym(domain, seed, where)


def _of_file(domain: DomainConfig, where: str) -> Iterator[Problem]:
    """At most `domain.num_problems` problems of a `.jsonl` or `.parquet` file, at least one.

    Of `domain.arguments`, `domain_field` keeps only the rows whose field of this name equals the
    domain's name; the answer is what follows the last `answer_after` (`"####"` for GSM8K). Other
    fields become metadata. DataError with the line for what is not as it should be."""
    path = domain.path
    arguments = domain.arguments
    assert path is not None  # rule domain_source
    unknown = [key for key in arguments if key not in _FILE_ARGUMENTS]
    if unknown:
        raise DataError(
            f"a file domain has no argument {unknown[0]!r}",
            where=where,
            remedy=f"known: {', '.join(_FILE_ARGUMENTS)}",
        )
    read = {".jsonl": _jsonl_rows, ".parquet": _parquet_rows}.get(path.suffix)
    if read is None:
        raise DataError(
            f"unknown file type {path.suffix!r}",
            where=str(path),
            remedy="convert it to .jsonl (one JSON object a line) or .parquet",
        )
    is_empty = True
    for problem in itertools.islice(_problems(domain, read(path)), domain.num_problems):
        is_empty = False
        yield problem
    if is_empty:
        remedy = "the file is empty"
        if "domain_field" in arguments:
            remedy = f"no row has {arguments['domain_field']!r} equal to {domain.name!r}"
        raise DataError(f"no problems for domain {domain.name!r}", where=str(path), remedy=remedy)


def _jsonl_rows(path: Path) -> _Rows:
    with (
        raised_as(
            DataError,
            "unreadable",
            OSError,
            where=path,
            remedy="it must be where the controller runs, also in a container",
        ),
        path.open("rb") as lines,
    ):
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            where = f"{path}:{number}"
            with raised_as(
                DataError,
                "not a JSON object",
                ValueError,
                where=where,
                remedy="one JSON object a line, UTF-8",
            ):
                fields = json.loads(line)
                if not isinstance(fields, dict):
                    raise ValueError(f"found {type(fields).__name__}")
            yield where, fields


def _parquet_rows(path: Path) -> _Rows:
    import pyarrow as pa
    import pyarrow.parquet as pq

    with (
        raised_as(DataError, "unreadable Parquet file", (pa.ArrowInvalid, OSError), where=path),
        pq.ParquetFile(path) as file,
    ):
        number = 0
        for batch in file.iter_batches():
            for fields in batch.to_pylist():
                number += 1
                yield f"{path}:row {number}", fields


def _problems(domain: DomainConfig, rows: _Rows) -> Iterator[Problem]:
    domain_field = domain.arguments.get("domain_field")
    marker = domain.arguments.get("answer_after")
    for where, fields in rows:
        if domain_field is not None and _text(where, fields, domain_field) != domain.name:
            continue
        question = _text(where, fields, domain.prompt_field)
        answer = _text(where, fields, domain.answer_field)
        if marker is not None:
            _, found, after = answer.rpartition(marker)
            answer = after.strip()
            if not found or not answer:
                raise DataError(
                    f"field {domain.answer_field!r} has nothing after {marker!r}",
                    where=where,
                    remedy="correct the line, or `answer_after`",
                )
        if not question.strip():
            raise DataError(f"field {domain.prompt_field!r} is empty", where=where)
        metadata = dict(fields)
        del metadata[domain.answer_field]
        yield Problem(question, answer, metadata)


def _text(where: str, fields: Mapping[str, Any], name: str) -> str:
    if name not in fields:
        raise DataError(f"no field {name!r}", where=where, remedy=did_you_mean(name, fields))
    value = fields[name]
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise DataError(
            f"field {name!r} is {type(value).__name__}, expected text or a number", where=where
        )
    return str(value)


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
