"""Rows of JSONL, Parquet, JSON and CSV files, alone or as the shards of a folder."""

import csv
import itertools
import json
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from grpo_megatron.errors import DataError, raised_as
from grpo_megatron.files import files_below

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

Rows = Iterator[tuple[str, Mapping[str, Any]]]
"""(file:line or file:row, both from 1; fields)"""

_SPLITS = ("train", "validation", "valid", "val", "dev", "test")
_SHARD = re.compile(r"(.+)-(\d{5})-of-(\d{5})(-[0-9a-f]{16})?")
_NUMBER = re.compile(r"[-_.]?(part|shard|chunk)?[-_.]?\d+\Z", re.IGNORECASE)
"""Behind the name of a split in several files."""
_LONGEST_CSV_FIELD = 1 << 28
_WRONG_SEPARATORS = {";": "semicolons", "\t": "tabs"}
_JSON_KINDS = {
    type(None): "null",
    bool: "true or false",
    int: "a number",
    float: "a number",
    str: "a text",
    list: "a list",
}
_NOT_JSON = (ValueError, RecursionError)
"""What `json.loads` raises; the second where lists lie too deep within one another."""
_NEWLINE = b"\n"
_PARQUET = ".parquet"
_JSON = ".json"
_ROWS_AT_ONCE = 1024
"""Of a Parquet file that are made Python's together: images of more rows fill the memory."""
_COUNTED_BYTES = 1 << 20
"""Of a text file whose lines are counted, to guess how many it has."""
_ABSENT = "it must be where the controller runs, also in a container"


def read_rows(path: Path, split: str | None = None, *, without: str = "") -> Rows:
    """Return every row of a file, or of a folder's files, in order of their names. Raises DataError
    with file and line for what cannot be read.

    split: for a folder with several, for example "train"; without: a field that need not be read:
    rows of Parquet lack it where it has bytes, such as those of images."""
    for file in data_files(path, split):
        if file.suffix == _PARQUET:
            yield from _parquet_rows(file, without)
        else:
            yield from _READERS[file.suffix](file)


class ExpectedRows(NamedTuple):
    """How many rows files have, before they are read."""

    num_rows: int
    is_exact: bool


def expected_rows(path: Path, split: str | None = None) -> ExpectedRows | None:
    """Return how many rows `read_rows` gives: as Parquet says, else guessed by the first lines of
    the first file; None where nothing tells. Raises as `data_files`."""
    files = data_files(path, split)
    suffix = files[0].suffix
    if suffix == _PARQUET:
        return ExpectedRows(sum(map(_num_parquet_rows, files)), True)
    with files[0].open("rb") as file:
        beginning = file.read(_COUNTED_BYTES)
    num_lines = beginning.count(_NEWLINE)
    if suffix not in (".jsonl", ".csv") or num_lines == 0:
        return None
    num_bytes = sum(file.stat().st_size for file in files)
    return ExpectedRows(round(num_bytes * num_lines / len(beginning)), False)


def data_files(path: Path, split: str | None = None) -> list[Path]:
    """Return the files that are read for `path`: of a folder, and all below it, Parquet, JSONL and
    CSV; JSON where it has none of them, for JSON beside them mostly describes the data set. Raises
    DataError where there is none, where several splits or kinds of files would be mixed, a shard is
    missing, or a split of a single file is asked for."""
    if split is not None and path.is_file():
        raise DataError(
            f"the split {split!r} chooses files of a folder, and this is one file",
            where=str(path),
            remedy="set path to the folder, or leave arguments.split out",
        )
    if not path.is_dir():
        if path.suffix not in _READERS:
            raise DataError(
                f"unknown file type {path.suffix!r}",
                where=str(path),
                remedy="convert it to .jsonl (one JSON object a line) or .parquet",
            )
        return [path]
    return _of_split(path, _files_with_rows(path), split)


def _files_with_rows(folder: Path) -> list[Path]:
    found = []
    with raised_as(DataError, "unreadable", OSError, where=folder, remedy=_ABSENT):
        files = list(files_below(folder))
    for file in files:
        is_hidden = "/." in f"/{file.relative_to(folder).as_posix()}"
        if file.suffix in _READERS and not is_hidden:
            found.append(file)
    if not found:
        raise DataError(
            "the folder has no data files",
            where=str(folder),
            remedy=f"files that are read end with {', '.join(_READERS)}",
        )
    are_rows = [file for file in found if file.suffix != _JSON]
    return are_rows or found


def _refuse_several_kinds(folder: Path, files: Sequence[Path]) -> None:
    """Raise DataError where files are of several kinds: the same rows twice, or parts of them that
    nobody meant to be one data set."""
    one_of_kind: dict[str, Path] = {}
    for file in files:
        one_of_kind.setdefault(file.suffix, file)
    if len(one_of_kind) > 1:
        told = ", ".join(str(file.relative_to(folder)) for file in one_of_kind.values())
        raise DataError(
            f"the folder has rows in files of several kinds: {told}",
            where=str(folder),
            remedy="set path to one of the files, or to a folder with those of one kind",
        )


class _Origin(NamedTuple):
    """Where a file of a folder is from, as far as its name or a folder above it says."""

    split: str
    """As the data set calls it, for example "train_sft"."""
    kind: str | None
    """Of `_SPLITS`; None: it is none of them."""
    data_set: Path
    """Equal for files that may be read together."""


def _of_split(folder: Path, files: Sequence[Path], split: str | None) -> list[Path]:
    origins = {file: _origin_of(file.relative_to(folder)) for file in files}
    names = sorted({origin.split for origin in origins.values() if origin is not None})
    chosen = list(files)
    if split is not None:
        chosen = [file for file, origin in origins.items() if origin and origin.split == split]
        if not chosen:
            chosen = [file for file, origin in origins.items() if origin and origin.kind == split]
        if not chosen:
            raise DataError(
                f"the folder has no files of the split {split!r}",
                where=str(folder),
                remedy=f"splits there: {', '.join(names) or 'none'}",
            )
    elif len({_kind_of(origin) for origin in origins.values()}) > 1:
        told = ", ".join(names)
        if None in origins.values():
            told += ", and files that name none"
        raise DataError(
            f"the folder has several splits ({told}), which must not be mixed",
            where=str(folder),
            remedy=f"choose one, for example arguments = {{ split = {_example_of(names)} }}",
        )
    _refuse_several_kinds(folder, chosen)
    _refuse_missing_shards(folder, chosen)
    _refuse_shards_beside_files(chosen)
    _refuse_several(folder, [origins[file] for file in chosen])
    return chosen


def _origin_of(path: Path) -> _Origin | None:
    """Return what a file's name says of its split, else what the nearest folder does that says
    something; None: neither does."""
    shard = _SHARD.fullmatch(path.stem)
    if shard is not None:
        data_set = path.with_name(shard[1])
        named = _named_folder(path) or data_set
        if _kind_in(data_set.name) is not None:
            named = data_set
        return _Origin(named.name, _kind_in(named.name), data_set)
    stem = _NUMBER.sub("", path.stem)
    kind = _kind_in(stem)
    if kind is not None:
        return _Origin(stem, kind, path.with_name(stem))
    named_folder = _named_folder(path)
    if named_folder is None:
        return None
    return _Origin(named_folder.name, _kind_in(named_folder.name), named_folder)


def _named_folder(path: Path) -> Path | None:
    """Return the nearest folder above a file whose name is that of a split."""
    for above in path.parents:
        if _kind_in(above.name) is not None:
            return above
    return None


def _kind_of(origin: _Origin | None) -> str | None:
    if origin is None:
        return None
    return origin.kind


def _kind_in(name: str) -> str | None:
    """Return the split of `_SPLITS` with whose name another begins."""
    word = re.split(r"[-_.]", name.lower())[0]
    if word in _SPLITS:
        return word
    return None


def _example_of(names: Sequence[str]) -> str:
    """Return a split to choose, in quotes: one for training, if there is any."""
    for name in names:
        if _kind_in(name) == "train":
            return f'"{name}"'
    return f'"{names[0]}"'


def _refuse_missing_shards(folder: Path, files: Sequence[Path]) -> None:
    """Raise DataError where `train-00000-of-00003` is there and its second part is not, or is there
    twice, with other digests in their names."""
    numbers: dict[tuple[Path, str, int], Counter[int]] = defaultdict(Counter)
    for file in files:
        shard = _SHARD.fullmatch(file.stem)
        if shard is not None:
            numbers[file.parent, shard[1], int(shard[3])][int(shard[2])] += 1
    for (parent, stem, count), found in numbers.items():
        number, times = found.most_common(1)[0]
        if times > 1:
            raise DataError(
                f"shard {number} of the {count} of {stem!r} is there {times} times",
                where=str(parent),
                remedy="remove the older export",
            )
        missing = sorted(set(range(count)) - set(found))
        if missing:
            raise DataError(
                f"shard {missing[0]} of the {count} of {stem!r} is not there",
                where=str(folder),
                remedy="download the rest of the data set",
            )
    counts = Counter((parent, stem) for parent, stem, _ in numbers)
    for (parent, stem), count in counts.items():
        if count > 1:
            raise DataError(
                f"the folder has {count} exports of {stem!r}, in different numbers of shards",
                where=str(folder / parent),
                remedy="remove all but one of them",
            )


def _refuse_shards_beside_files(files: Sequence[Path]) -> None:
    """Raise DataError where `train.jsonl` lies beside `train-00000-of-00001.jsonl`."""
    of_shards: dict[Path, Path] = {}
    of_files: dict[Path, Path] = {}
    for file in files:
        shard = _SHARD.fullmatch(file.stem)
        if shard is not None:
            of_shards[file.parent / shard[1]] = file
        else:
            of_files[file.parent / _NUMBER.sub("", file.stem)] = file
    for data_set, shard_file in of_shards.items():
        if data_set in of_files:
            raise DataError(
                f"the folder has {data_set.name!r} in shards and as a file: {shard_file.name}, "
                f"{of_files[data_set].name}",
                where=str(shard_file.parent),
                remedy="remove one of both",
            )


def _refuse_several(folder: Path, origins: Sequence[_Origin | None]) -> None:
    """Raise DataError where files of several data sets would be mixed: shards of other names, or a
    split of several folders."""
    found = sorted({origin.data_set for origin in origins if origin is not None})
    if len(found) < 2:
        return
    remedy = "set path to the folder of one of them"
    if len({data_set.parent for data_set in found}) == 1:
        example = _example_of([data_set.name for data_set in found])
        remedy = f"choose one, for example arguments = {{ split = {example} }}"
    raise DataError(
        f"the folder has several data sets: {', '.join(map(str, found))}",
        where=str(folder),
        remedy=remedy,
    )


def _jsonl_rows(path: Path) -> Rows:
    with (
        raised_as(DataError, "unreadable", OSError, where=path, remedy=_ABSENT),
        path.open("rb") as lines,
    ):
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            where = f"{path}:{number}"
            remedy = "one JSON object a line, UTF-8"
            tables = _Tables()
            fields = _json_of(line.rstrip(), tables, path, number, "not a JSON object", remedy)
            if not isinstance(fields, dict):
                raise DataError(
                    f"not a JSON object: found {_JSON_KINDS[type(fields)]}",
                    where=where,
                    remedy=remedy,
                )
            tables.refuse_repeated_names(where, fields)
            yield where, fields


def _num_parquet_rows(path: Path) -> int:
    import pyarrow.parquet as pq

    with _sound_parquet("unreadable Parquet file", path):
        return int(pq.read_metadata(path).num_rows)


def _parquet_rows(path: Path, without: str = "") -> Rows:
    import pyarrow.parquet as pq

    with _sound_parquet("unreadable Parquet file", path):
        file = pq.ParquetFile(path, page_checksum_verification=True)
    with file:
        schema = file.schema_arrow
        _refuse_repeated_columns(str(path), schema.names)
        columns = None
        if without in schema.names and _holds_bytes(schema.field(without).type):
            columns = [name for name in schema.names if name != without]
        batches = file.iter_batches(batch_size=_ROWS_AT_ONCE, columns=columns)
        number = 0
        while True:
            with _sound_parquet("unreadable Parquet file", path):
                batch = next(batches, None)
            if batch is None:
                break
            for fields in _rows_of(batch, path, number):
                number += 1
                yield f"{path}:row {number}", fields
        _require_all_rows(path, file.metadata, number)


def _holds_bytes(kind: "pa.DataType") -> bool:
    """Whether values of a column, or parts of them, are bytes."""
    import pyarrow as pa

    is_bytes = (pa.types.is_binary, pa.types.is_large_binary, pa.types.is_fixed_size_binary)
    if any(is_of(kind) for is_of in is_bytes):
        return True
    return any(_holds_bytes(kind.field(number).type) for number in range(kind.num_fields))


def _require_all_rows(path: Path, metadata: "pq.FileMetaData", number: int) -> None:
    """Raise DataError unless `number` rows, those that were read, are what the file says it has,
    in both places where it does."""
    in_groups = 0
    for group in range(metadata.num_row_groups):
        in_groups += metadata.row_group(group).num_rows
    if not number == metadata.num_rows == in_groups:
        raise DataError(
            f"the file is damaged: it says that it has {metadata.num_rows} rows, its row groups "
            f"{in_groups}, and {number} were read",
            where=str(path),
            remedy="copy or download the file again",
        )


def _rows_of(batch: "pa.RecordBatch", path: Path, num_before: int) -> list[dict[str, Any]]:
    """Return the rows of a batch. Raises DataError with the row and the column of a value that
    Python cannot hold: text that is not UTF-8, a time with nanoseconds.

    num_before: rows of the file before the batch."""
    try:
        with _sound_parquet("unreadable rows", path):
            rows: list[dict[str, Any]] = batch.to_pylist()
            return rows
    except DataError:
        for name, column in zip(batch.schema.names, batch.columns, strict=True):
            for number, value in enumerate(column, start=num_before + 1):
                with _sound_parquet(
                    f"field {name!r} cannot be read",
                    f"{path}:row {number}",
                    "convert the column, or remove it where nothing reads it",
                ):
                    value.as_py()
        raise


def _sound_parquet(
    what: str, where: object, remedy: str | None = None
) -> AbstractContextManager[None]:
    """Raise DataError where the block reads what is no Parquet, or no value of Python."""
    import pyarrow as pa

    causes = (pa.ArrowException, OSError, ValueError, OverflowError)
    return raised_as(DataError, what, causes, where=where, remedy=remedy)


def _json_rows(path: Path) -> Rows:
    """One object, or a list of them."""
    remedy = "an object, or a list of objects, UTF-8"
    with raised_as(DataError, "unreadable", OSError, where=path, remedy=_ABSENT):
        content = path.read_bytes()
    tables = _Tables()
    rows = _json_of(content, tables, path, None, "not JSON", remedy)
    if isinstance(rows, dict):
        rows = [rows]
    if not isinstance(rows, list):
        raise DataError(f"found {_JSON_KINDS[type(rows)]}", where=str(path), remedy=remedy)
    for number, fields in enumerate(rows, start=1):
        where = f"{path}:row {number}"
        if not isinstance(fields, dict):
            raise DataError(f"found {_JSON_KINDS[type(fields)]}", where=where, remedy=remedy)
        tables.refuse_repeated_names(where, fields)
        yield where, fields


def _json_of(
    content: bytes, tables: "_Tables", path: Path, line: int | None, what: str, remedy: str
) -> Any:
    """Return the value of JSON text. Raises DataError where it is none, with line and column if
    these are known.

    line: of the file, whose content it is; None: it is all of the file. what: to say of it."""
    first_line = line or 1
    where = str(path)
    if line is not None:
        where = f"{path}:{line}"
    try:
        return json.loads(content, object_pairs_hook=tables.read)
    except json.JSONDecodeError as error:
        reason = error.msg
        where = f"{path}:{first_line + error.lineno - 1}, column {error.colno}"
    except UnicodeDecodeError as error:
        before = content[: error.start]
        reason = f"{error.reason} of {error.encoding}"
        where = (
            f"{path}:{first_line + before.count(_NEWLINE)}, "
            f"byte {error.start - before.rfind(_NEWLINE)} of the line"
        )
    except _NOT_JSON as error:
        reason = str(error)
    raise DataError(f"{what}: {reason}", where=where, remedy=remedy)


class _Tables:
    """Reads tables of JSON, and knows which have a name twice: a table keeps the last value."""

    def __init__(self) -> None:
        self._repeated: list[tuple[dict[str, Any], str]] = []

    def read(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        """Return the table of the names and values that JSON has for it."""
        table = dict(pairs)
        if len(table) < len(pairs):
            counts = Counter(name for name, _ in pairs)
            self._repeated.append((table, counts.most_common(1)[0][0]))
        return table

    def refuse_repeated_names(self, where: str, fields: Mapping[str, Any]) -> None:
        """Raise DataError where a row has a field twice; tables in its fields are its own."""
        for table, name in self._repeated:
            if table is fields:
                raise DataError(
                    f"the row has the field {name!r} several times",
                    where=where,
                    remedy="rename or remove all but one of them",
                )


def _csv_rows(path: Path) -> Rows:
    """The first line has the names of the fields, once each, with commas between them."""
    csv.field_size_limit(_LONGEST_CSV_FIELD)
    with (
        raised_as(DataError, "unreadable", OSError, where=path, remedy=_ABSENT),
        raised_as(DataError, "not a CSV file", UnicodeDecodeError, where=path),
        path.open(encoding="utf-8-sig", newline="") as file,
    ):
        reader = csv.DictReader(file, strict=True)  # else an open quote ends with the file
        with _sound_csv(f"{path}:1"):
            names = list(reader.fieldnames or ())
        _refuse_bad_columns(path, names)
        for number in itertools.count(1):
            where = f"{path}:row {number}"
            with _sound_csv(where):
                fields = next(reader, None)
            if fields is None:
                return
            if None in fields or None in fields.values():
                raise DataError("the row has other columns than the first line", where=where)
            yield where, fields


def _sound_csv(where: str) -> AbstractContextManager[None]:
    """Raise DataError for a row that the block cannot read. where: in which it begins."""
    return raised_as(
        DataError,
        "not a CSV file",
        csv.Error,
        where=where,
        remedy="a field that begins with a quote ends with one, and a quote in it is doubled",
    )


def _refuse_bad_columns(path: Path, names: Sequence[str]) -> None:
    """Raise DataError for a column that would hide another, or a line that was not taken apart."""
    where = f"{path}:1"
    _refuse_repeated_columns(where, [name for name in names if name.strip()])
    if len(names) != 1:
        return
    for mark, words in _WRONG_SEPARATORS.items():
        if mark in names[0]:
            raise DataError(
                f"the first line is one column, {names[0]!r}, with {words} in it",
                where=where,
                remedy="the separator must be a comma: convert the file, or use .jsonl",
            )


def _refuse_repeated_columns(where: str, names: Sequence[str]) -> None:
    """Raise DataError where a row would keep only the last of several columns."""
    repeated = [name for name, count in Counter(names).items() if count > 1]
    if repeated:
        raise DataError(
            f"the file has the column {repeated[0]!r} several times",
            where=where,
            remedy="rename or remove all but one of them",
        )


_READERS: dict[str, Callable[[Path], Rows]] = {
    _PARQUET: _parquet_rows,
    ".jsonl": _jsonl_rows,
    _JSON: _json_rows,
    ".csv": _csv_rows,
}
