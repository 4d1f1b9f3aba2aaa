"""Problems from JSONL and Parquet files."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_megatron.config.data import DomainConfig
from grpo_megatron.config.suggest import did_you_mean
from grpo_megatron.data.sources import Problem
from grpo_megatron.errors import DataError

_KNOWN_ARGUMENTS = ("answer_after", "domain_field")


@dataclass(frozen=True, slots=True)
class _Row:
    where: str  # file:line (JSONL) or file:row (Parquet), both from 1
    fields: Mapping[str, Any]


def load_file(domain: DomainConfig) -> list[Problem]:
    """Read at most `domain.num_problems` problems of a `.jsonl` or `.parquet` file.

    Two arguments in `domain.arguments`:
        domain_field: Keep only the rows whose field of this name equals the domain's name, so
            that one file can feed several domains.
        answer_after: The answer is what follows the last occurrence of this marker, for example
            `"####"` for GSM8K.

    Fields other than question and answer become metadata.

    Raises:
        DataError: Missing file, unreadable line, missing field, wrong type, no rows.
    """
    path = _checked_path(domain)
    rows = _jsonl_rows(path) if path.suffix == ".jsonl" else _parquet_rows(path)
    result = list(itertools.islice(_problems(domain, rows), domain.num_problems))
    if not result:
        raise DataError(f"no problems for domain {domain.name!r}", where=str(path),
                        remedy=f"no row has {domain.arguments['domain_field']!r} equal to "
                        f"{domain.name!r}" if "domain_field" in domain.arguments else
                        "the file is empty")
    return result


def _checked_path(domain: DomainConfig) -> Path:
    where = f"[[domains]] {domain.name}"
    for key in domain.arguments:
        if key not in _KNOWN_ARGUMENTS:
            raise DataError(f"a file domain has no argument {key!r}", where=where,
                            remedy=f"known: {', '.join(_KNOWN_ARGUMENTS)}")
    path = domain.path
    if path.suffix not in (".jsonl", ".parquet"):
        raise DataError(f"unknown file type {path.suffix!r}", where=str(path),
                        remedy="convert it to .jsonl (one JSON object a line) or .parquet")
    if not path.is_file():
        raise DataError("no such file", where=str(path),
                        remedy="paths are relative to the directory the command runs in")
    return path


def _jsonl_rows(path: Path) -> Iterator[_Row]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            where = f"{path}:{number}"
            try:
                fields = json.loads(line)
            except ValueError as error:  # also UnicodeDecodeError
                raise DataError(f"not JSON: {error}", where=where,
                                remedy="one JSON object a line, UTF-8") from error
            if not isinstance(fields, dict):
                raise DataError(f"expected a JSON object, found {type(fields).__name__}",
                                where=where, remedy="one JSON object a line")
            yield _Row(where, fields)


def _parquet_rows(path: Path) -> Iterator[_Row]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            number = 0
            for batch in file.iter_batches():
                for fields in batch.to_pylist():
                    number += 1
                    yield _Row(f"{path}:row {number}", fields)
    except (pa.ArrowInvalid, OSError) as error:
        raise DataError(f"not a readable Parquet file: {error}", where=str(path)) from error


def _problems(domain: DomainConfig, rows: Iterator[_Row]) -> Iterator[Problem]:
    domain_field = domain.arguments.get("domain_field")
    answer_after = domain.arguments.get("answer_after")
    for row in rows:
        if domain_field is not None and _text(row, domain_field) != domain.name:
            continue
        question, answer = _text(row, domain.prompt_field), _text(row, domain.answer_field)
        if answer_after is not None:
            answer = _after(row, domain.answer_field, answer, answer_after)
        if not question.strip():
            raise DataError(f"field {domain.prompt_field!r} is empty", where=row.where)
        metadata = {key: value for key, value in row.fields.items()
                    if key != domain.answer_field}
        yield Problem(domain.name, question, answer, metadata)


def _text(row: _Row, name: str) -> str:
    if name not in row.fields:
        raise DataError(f"no field {name!r}", where=row.where,
                        remedy=did_you_mean(name, row.fields))
    value = row.fields[name]
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise DataError(f"field {name!r} is {type(value).__name__}, expected text or a number",
                        where=row.where)
    return str(value)


def _after(row: _Row, name: str, answer: str, marker: str) -> str:
    _, found, tail = answer.rpartition(marker)
    if not found or not tail.strip():
        raise DataError(f"field {name!r} has nothing after {marker!r}", where=row.where,
                        remedy="correct the line or the argument `answer_after`")
    return tail.strip()
