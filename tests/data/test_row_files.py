"""Files and folders as data sets are published: shards, splits, Parquet's lists and tables."""

from __future__ import annotations

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from grpo_megatron.config.run import DomainConfig
from grpo_megatron.data import row_files
from grpo_megatron.data.row_files import data_files, expected_rows, read_rows
from grpo_megatron.data.sources import load_problems
from grpo_megatron.errors import DataError

REWARDS = ({"function": "grpo_megatron.rewards.functions:exact_match"},)
ROWS = [
    {"question": "1+1", "answer": "2"},
    {"question": "2*3", "answer": "6"},
    {"question": "9-1", "answer": "8"},
]


def write_parquet(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), path)


def questions(path, **fields):
    domain = DomainConfig(name="sums", source="file", path=path, rewards=REWARDS, **fields)
    return [problem.question for problem in load_problems(domain, 0)]


@pytest.fixture
def export(tmp_path):
    """A repository of Hugging Face: shards of two splits, and files beside them."""
    for number, row in enumerate(ROWS):
        write_parquet(tmp_path / "data" / f"train-{number:05d}-of-00003.parquet", [row])
    write_parquet(tmp_path / "data" / "test-00000-of-00001.parquet", ROWS[:1])
    (tmp_path / "README.md").write_text("about")
    (tmp_path / "dataset_infos.json").write_text("{}")
    (tmp_path / ".cache").mkdir()
    write_parquet(tmp_path / ".cache" / "train-00000-of-00001.parquet", ROWS)
    return tmp_path


def test_shards_of_a_split_are_one_data_set(export):
    assert questions(export, arguments={"split": "train"}) == ["1+1", "2*3", "9-1"]
    assert questions(export, arguments={"split": "test"}) == ["1+1"]
    assert questions(export, arguments={"split": "train"}, num_problems=2) == ["1+1", "2*3"]


def test_rows_name_their_shard(export):
    where = [where for where, _ in read_rows(export, "train")]
    assert where[1] == f"{export}/data/train-00001-of-00003.parquet:row 1"


@pytest.mark.parametrize(
    ("split", "words"),
    [
        (None, ["several splits (test, train)", 'split = "train"']),
        ("validation", ["no files of the split 'validation'", "test, train"]),
    ],
)
def test_splits_are_not_mixed(export, split, words):
    with pytest.raises(DataError) as caught:
        data_files(export, split)
    for word in words:
        assert word in str(caught.value)


def test_files_of_several_kinds_are_not_one_data_set(export):
    line = json.dumps(ROWS[1])
    (export / "data" / "train.jsonl").write_text(f"{line}\n")
    with pytest.raises(DataError, match="several kinds") as caught:
        questions(export, arguments={"split": "train"})
    assert "data/train-00000-of-00003.parquet, data/train.jsonl" in str(caught.value)
    assert "set path to one of the files" in str(caught.value)
    assert questions(export, arguments={"split": "test"}) == ["1+1"]
    assert questions(export / "data" / "train.jsonl") == ["2*3"]


def test_a_missing_shard_is_refused(export):
    (export / "data" / "train-00001-of-00003.parquet").unlink()
    with pytest.raises(DataError, match="shard 1 of the 3 of 'train' is not there"):
        data_files(export, "train")


def test_a_missing_shard_with_a_hash_in_its_name_is_refused(tmp_path):
    """As older exports name them."""
    for number in (0, 2):
        name = f"train-{number:05d}-of-00003-0123456789abcdef.parquet"
        write_parquet(tmp_path / name, ROWS[:1])
    with pytest.raises(DataError, match="shard 1 of the 3 of 'train' is not there"):
        data_files(tmp_path)
    write_parquet(tmp_path / "train-00001-of-00003-fedcba9876543210.parquet", ROWS[:1])
    assert len(data_files(tmp_path)) == 3


@pytest.mark.parametrize("other", ["-fedcba9876543210", ""])
def test_two_exports_of_as_many_shards_are_not_mixed(tmp_path, other):
    for name in ("-0123456789abcdef", other):
        write_parquet(tmp_path / f"train-00000-of-00001{name}.parquet", ROWS)
    with pytest.raises(DataError, match="shard 0 of the 1 of 'train' is there 2 times"):
        data_files(tmp_path)


@pytest.mark.parametrize("name", ["train", "train_0"])
def test_shards_beside_the_file_of_which_they_may_be_made_are_refused(tmp_path, name):
    for shard in ("train-00000-of-00002", "train-00001-of-00002", name):
        write_parquet(tmp_path / f"{shard}.parquet", ROWS)
    with pytest.raises(DataError, match="'train' in shards and as a file") as caught:
        data_files(tmp_path, "train")
    assert f"{name}.parquet" in caught.value.message


def test_files_of_one_kind_of_split_are_told_apart(tmp_path):
    for name in ("train_sft", "train_prefs"):
        write_parquet(tmp_path / f"{name}.parquet", ROWS)
    for split in (None, "train"):
        with pytest.raises(DataError, match="several data sets: train_prefs, train_sft") as caught:
            data_files(tmp_path, split)
        assert 'split = "train_prefs"' in caught.value.remedy
    [file] = data_files(tmp_path, "train_sft")
    assert file.name == "train_sft.parquet"


def test_folders_behind_links_are_read(tmp_path):
    write_parquet(tmp_path / "elsewhere" / "more.parquet", ROWS)
    write_parquet(tmp_path / "rows" / "some.parquet", ROWS[:1])
    (tmp_path / "rows" / "linked").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere" / "back").symlink_to(tmp_path / "rows")
    names = [file.name for file in data_files(tmp_path / "rows")]
    assert names == ["more.parquet", "some.parquet"]


def test_several_data_sets_are_not_mixed(tmp_path):
    for name in ("main", "socratic"):
        write_parquet(tmp_path / name / "train-00000-of-00001.parquet", ROWS)
    with pytest.raises(DataError, match="several data sets: main/train, socratic/train"):
        data_files(tmp_path)
    assert len(questions(tmp_path / "main")) == 3


@pytest.mark.parametrize("split", [None, "train"])
@pytest.mark.parametrize("name", ["train.parquet", "train/0000.parquet", "train/part-1.parquet"])
def test_a_split_of_several_folders_is_not_mixed(tmp_path, name, split):
    for folder in ("main", "socratic"):
        write_parquet(tmp_path / folder / name, ROWS)
    with pytest.raises(DataError, match="several data sets: main/train, socratic/train") as caught:
        data_files(tmp_path, split)
    assert caught.value.remedy == "set path to the folder of one of them"
    assert len(data_files(tmp_path / "main", split)) == 1


@pytest.fixture
def several(tmp_path):
    """As UltraChat is published."""
    for name in ("train_sft", "train_gen", "test_sft"):
        write_parquet(tmp_path / "data" / f"{name}-00000-of-00001.parquet", ROWS)
    return tmp_path


def test_a_split_has_the_whole_name_before_its_shards(several):
    [file] = data_files(several, "train_sft")
    assert file.name == "train_sft-00000-of-00001.parquet"
    [file] = data_files(several, "test")
    assert file.name == "test_sft-00000-of-00001.parquet"


@pytest.mark.parametrize(
    ("split", "words"),
    [
        (None, ["several splits (test_sft, train_gen, train_sft)", 'split = "train_gen"']),
        ("train", ["data sets: data/train_gen, data/train_sft", 'split = "train_gen"']),
        ("dev", ["no files of the split 'dev'", "test_sft, train_gen, train_sft"]),
    ],
)
def test_splits_of_one_kind_are_told_apart(several, split, words):
    with pytest.raises(DataError) as caught:
        data_files(several, split)
    for word in words:
        assert word in str(caught.value)


def test_folders_of_one_kind_are_told_apart(tmp_path):
    for name in ("train_sft", "train_gen"):
        write_parquet(tmp_path / name / "0000.parquet", ROWS)
    with pytest.raises(DataError, match="several data sets: train_gen, train_sft") as caught:
        data_files(tmp_path)
    assert 'split = "train_gen"' in caught.value.remedy
    [file] = data_files(tmp_path, "train_sft")
    assert file.parent.name == "train_sft"


def test_shards_of_any_name_are_a_split(tmp_path):
    for name in ("train", "holdout"):
        write_parquet(tmp_path / f"{name}-00000-of-00001.parquet", ROWS)
    [file] = data_files(tmp_path, "holdout")
    assert file.name == "holdout-00000-of-00001.parquet"
    with pytest.raises(DataError, match=r"several splits \(holdout, train\)"):
        data_files(tmp_path)


def test_a_file_beside_a_split_that_names_none_is_told(tmp_path):
    for name in ("train", "other"):
        write_parquet(tmp_path / f"{name}.parquet", ROWS)
    with pytest.raises(DataError, match=r"splits \(train, and files that name none\)"):
        data_files(tmp_path)


def test_a_split_may_have_files_without_the_form_of_shards(tmp_path):
    names = ("train_0.parquet", "train_1.parquet", "train/part-2.parquet", "train/a/b.parquet")
    for name in names:
        write_parquet(tmp_path / name, ROWS)
    assert len(data_files(tmp_path)) == len(data_files(tmp_path, "train")) == len(names)


def test_a_folder_without_data_is_refused(tmp_path):
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(DataError, match="no data files") as caught:
        data_files(tmp_path)
    assert ".jsonl" in caught.value.remedy


def test_files_of_single_objects_are_rows(tmp_path):
    """As MATH is published."""
    for number, row in enumerate(ROWS):
        folder = tmp_path / "train" / ("algebra", "geometry")[number % 2]
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{number}.json").write_text(json.dumps(row))
    assert questions(tmp_path) == ["1+1", "9-1", "2*3"]


def test_a_list_of_objects_is_rows(tmp_path):
    (tmp_path / "rows.json").write_text(json.dumps(ROWS))
    assert questions(tmp_path / "rows.json") == ["1+1", "2*3", "9-1"]
    (tmp_path / "rows.json").write_text('[{"question": "q", "answer": "a"}, 3]')
    with pytest.raises(DataError, match=r"(?s)found a number.*rows.json:row 2"):
        questions(tmp_path / "rows.json")


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json"])
def test_a_field_that_json_has_twice_is_refused(tmp_path, name):
    """In tables of a row it is the row's own."""
    file = tmp_path / name
    file.write_text('{"question": "1+1", "answer": "2", "more": {"a": 1, "a": 2}}')
    assert questions(file) == ["1+1"]
    file.write_text('{"question": "1+1", "answer": "2", "answer": "3"}')
    with pytest.raises(DataError, match="the row has the field 'answer' several times") as caught:
        questions(file)
    assert str(file) in caught.value.where


@pytest.mark.parametrize(
    ("content", "found"),
    [
        ("5", "a number"),
        ("1.5", "a number"),
        ("null", "null"),
        ('"abc"', "a text"),
        ("true", "true or false"),
    ],
)
def test_a_json_file_of_something_else_is_refused(tmp_path, content, found):
    (tmp_path / "rows.json").write_text(content)
    with pytest.raises(DataError, match=f"found {found}") as caught:
        questions(tmp_path / "rows.json")
    assert caught.value.where == str(tmp_path / "rows.json")
    assert "a list of objects" in caught.value.remedy


@pytest.mark.parametrize(
    ("name", "content", "reason", "place"),
    [
        ("a.jsonl", b'{"a": 1}\n\n{"a": 1, }\n', "double quotes", ":3, column 10"),
        ("a.jsonl", b'{"a": 1}\n{"a": \n', "Expecting value", ":2, column 6"),
        ("a.jsonl", b'{"a": 1}\n{"a": "\xff"}\n', "invalid start byte", ":2, byte 8 of the line"),
        ("a.json", b'[{"a": 1},\n {"a" 1}]', "Expecting ':'", ":2, column 7"),
        ("a.json", b'[{"a": 1},\n {"\xff": 1}]', "invalid start byte", ":2, byte 4 of the line"),
    ],
)
def test_bad_json_is_told_with_its_place_in_the_file(tmp_path, name, content, reason, place):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=reason) as caught:
        list(read_rows(tmp_path / name))
    assert caught.value.where == f"{tmp_path / name}{place}"
    assert "line 1" not in caught.value.message


@pytest.mark.parametrize(("name", "words"), [("a.jsonl", "a.jsonl:1"), ("a.json", "a.json")])
def test_lists_too_deep_for_python_are_refused(tmp_path, name, words):
    deep = "[" * 100_000 + "]" * 100_000
    (tmp_path / name).write_text(f'{{"question": "1+1", "answer": {deep}}}')
    with pytest.raises(DataError, match=r"not .*JSON.*depth") as caught:
        questions(tmp_path / name)
    assert caught.value.where == str(tmp_path / words)


def test_csv_has_quoted_fields_and_a_header(tmp_path):
    file = tmp_path / "rows.csv"
    file.write_text('\ufeffquestion,answer\n"What is\n1, plus 1?",2\n2*3,6\n', encoding="utf-8")
    assert questions(file) == ["What is\n1, plus 1?", "2*3"]
    file.write_text("question,answer\n2*3\n")
    with pytest.raises(DataError, match=r"(?s)other columns.*rows.csv:row 1"):
        questions(file)


@pytest.mark.parametrize(
    ("header", "words"),
    [
        ("question,answer,answer", ["'answer' several times", "rename"]),
        ("question;answer", ["'question;answer'", "semicolons", "must be a comma"]),
        ("question\tanswer", ["tabs", "must be a comma"]),
    ],
)
def test_bad_headers_of_csv_are_refused(tmp_path, header, words):
    file = tmp_path / "rows.csv"
    file.write_text(f"{header}\n2*3,6,7\n")
    with pytest.raises(DataError) as caught:
        questions(file)
    assert caught.value.where == f"{file}:1"
    for word in words:
        assert word in str(caught.value)


def test_a_quote_that_is_never_closed_does_not_take_the_rest_of_the_file(tmp_path):
    file = tmp_path / "rows.csv"
    file.write_text('question,answer\n1+1,2\n2+2,"4\n3+3,6\n4+4,8\n')
    with pytest.raises(DataError, match="not a CSV file: unexpected end") as caught:
        questions(file)
    assert caught.value.where == f"{file}:row 2"
    assert "quote" in caught.value.remedy
    file.write_text('question,answer\n"say ""a, b""",2\na 5" disk,6\n')
    assert questions(file) == ['say "a, b"', 'a 5" disk']


def test_text_behind_a_closing_quote_is_refused(tmp_path):
    file = tmp_path / "rows.csv"
    file.write_text('question,answer\n1+1,"2"3\n')
    with pytest.raises(DataError, match=r"(?s)not a CSV file.*rows.csv:row 1"):
        questions(file)


def test_csv_that_is_not_utf8_is_refused(tmp_path):
    file = tmp_path / "rows.csv"
    file.write_bytes("question,answer\nü,1\n".encode("latin-1"))
    with pytest.raises(DataError, match=r"(?s)not a CSV file.*utf-8.*rows.csv"):
        questions(file)


def not_utf8() -> pa.Array:
    places = pa.py_buffer(np.array([0, 2, 4], np.int32).tobytes())
    return pa.Array.from_buffers(pa.string(), 2, [None, places, pa.py_buffer(b"ok\xff\xfe")])


@pytest.mark.parametrize(
    "column",
    [not_utf8(), pa.array([0, 1 << 60], pa.timestamp("ms"))],
    ids=["text that is not UTF-8", "a time beyond the year 9999"],
)
def test_values_of_parquet_that_python_cannot_hold_are_told_with_their_row(tmp_path, column):
    file = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"question": ["1+1", "2*3"], "answer": ["2", "6"], "x": column}), file)
    with pytest.raises(DataError, match="field 'x' cannot be read") as caught:
        questions(file)
    assert caught.value.where == f"{file}:row 2"
    assert "convert the column" in caught.value.remedy


def test_a_column_that_parquet_has_twice_is_refused(tmp_path):
    file = tmp_path / "rows.parquet"
    columns = [pa.array(["1+1"]), pa.array(["2"]), pa.array(["3"])]
    pq.write_table(pa.Table.from_arrays(columns, ["question", "answer", "answer"]), file)
    with pytest.raises(DataError, match="the column 'answer' several times") as caught:
        questions(file)
    assert caught.value.where == str(file)


def test_a_damaged_parquet_file_is_refused_or_read_whole(tmp_path):
    """Of every byte one bit is flipped."""
    file = tmp_path / "rows.parquet"
    write_parquet(file, ROWS)
    sound = file.read_bytes()
    num_refused = 0
    for place in range(len(sound)):
        damaged = bytearray(sound)
        damaged[place] ^= 1 << place % 8
        file.write_bytes(damaged)
        try:
            found = list(read_rows(file))
        except DataError:
            num_refused += 1
            continue
        assert len(found) == len(ROWS), place
    assert num_refused > 100


def test_a_parquet_file_with_fewer_rows_than_it_says_is_refused(tmp_path):
    """Wherever it says so, of the whole or of its group of rows; the rest of it is sound."""
    file = tmp_path / "rows.parquet"
    write_parquet(file, ROWS)
    sound = file.read_bytes()
    count = 2 * len(ROWS)  # as the format writes an integer
    refusals = []
    for place, byte in enumerate(sound):
        if byte != count:
            continue
        damaged = bytearray(sound)
        damaged[place] = count - 2
        file.write_bytes(damaged)
        try:
            list(read_rows(file))
        except DataError as error:
            refusals.append(error.message)
    assert any("its row groups 2, and 2 were read" in message for message in refusals)
    assert any("it says that it has 2 rows" in message for message in refusals)


def test_a_split_of_a_single_file_is_refused(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text('{"question": "1+1", "answer": "2"}\n')
    with pytest.raises(DataError, match="this is one file") as caught:
        questions(file, arguments={"split": "train"})
    assert "arguments.split" in caught.value.remedy


def test_lists_and_tables_of_parquet_are_conversations(tmp_path):
    file = tmp_path / "chat.parquet"
    user = {"role": "user", "content": "1+1", "tool_calls": None}
    other = {"role": "assistant", "content": "2", "tool_calls": [{"name": "sum"}]}
    write_parquet(file, [{"messages": [user, other], "answer": "2"}])
    domain = DomainConfig(name="s", source="file", path=file, rewards=REWARDS, template="chat")
    [problem] = load_problems(domain, 0)
    assert problem.metadata["messages"] == [{"role": "user", "content": "1+1"}]
    assert problem.question == "1+1"


def test_few_rows_of_parquet_are_in_memory_at_once(tmp_path, monkeypatch):
    """Those of a file with images may have gigabytes."""
    file = tmp_path / "rows.parquet"
    write_parquet(file, [{"question": str(number), "answer": "2"} for number in range(5000)])
    sizes = []
    rows_of = row_files._rows_of

    def counted(batch, path, num_before):
        sizes.append(batch.num_rows)
        return rows_of(batch, path, num_before)

    monkeypatch.setattr(row_files, "_rows_of", counted)
    rows = read_rows(file)
    assert next(rows)[1]["question"] == "0" and sum(sizes) <= 1024
    assert [fields["question"] for _, fields in rows] == [str(n) for n in range(1, 5000)]


IMAGE = {"bytes": b"\x89PNG", "path": None}


@pytest.mark.parametrize("images", [b"\x89PNG", IMAGE, [IMAGE, IMAGE], [[b"\x89PNG"]]])
def test_bytes_that_need_not_be_read_are_left_out(tmp_path, images):
    row = {"question": "what?", "images": images, "answer": "2"}
    write_parquet(tmp_path / "rows.parquet", [row, row])
    without = [fields for _, fields in read_rows(tmp_path / "rows.parquet", without="images")]
    assert without == 2 * [{"question": "what?", "answer": "2"}]
    for other in ("", "pictures", "answer"):
        rows = read_rows(tmp_path / "rows.parquet", without=other)
        assert [fields for _, fields in rows] == [row, row]


def test_texts_are_read_whatever_they_are_called(tmp_path):
    """Paths of images are short, and a question has its field's name from the recipe."""
    row = {"question": "what?", "images": ["a.png"]}
    write_parquet(tmp_path / "rows.parquet", [row])
    for name in row:
        assert [fields for _, fields in read_rows(tmp_path / "rows.parquet", without=name)] == [row]


def test_how_many_rows_are_expected(tmp_path):
    for number in range(2):
        write_parquet(tmp_path / "p" / f"train-{number:05d}-of-00002.parquet", ROWS)
    assert expected_rows(tmp_path / "p", "train") == (6, True)
    lines = "".join(json.dumps(row) + "\n" for row in ROWS)
    (tmp_path / "rows.jsonl").write_text(lines)
    assert expected_rows(tmp_path / "rows.jsonl") == (3, False)
    (tmp_path / "j").mkdir()
    for name in ("train-1.jsonl", "train-2.jsonl"):
        (tmp_path / "j" / name).write_text(lines * 20_000)  # more than is looked at
    assert expected_rows(tmp_path / "j").num_rows == pytest.approx(120_000, rel=1e-3)
    (tmp_path / "rows.json").write_text(json.dumps(ROWS, indent=1))
    (tmp_path / "empty.jsonl").write_text("")
    for name in ("rows.json", "empty.jsonl"):
        assert expected_rows(tmp_path / name) is None
