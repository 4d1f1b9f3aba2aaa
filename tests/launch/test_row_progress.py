"""The check of a domain's rows says how far it is, where it takes long."""

from __future__ import annotations

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from grpo_megatron.config.run import DomainConfig
from grpo_megatron.launch.row_progress import checked_rows

ROWS = [{"question": f"{number} + 1?", "answer": str(number + 1)} for number in range(60)]


def lines_of(path, capsys, *, seconds_per_row: float, **fields) -> list[str]:
    """What is said while all rows are taken, if each takes so long."""
    now = 0.0

    def clock() -> float:
        return now

    rewards = ({"function": "grpo_megatron.rewards.functions:exact_match"},)
    domain = DomainConfig(name="sums", source="file", path=path, rewards=rewards, **fields)
    found = []
    for _, row in checked_rows(domain, path, clock=clock):
        found.append(row)
        now += seconds_per_row
    assert found == ROWS
    printed = capsys.readouterr()
    assert printed.out == ""
    return printed.err.splitlines()


@pytest.fixture
def parquet(tmp_path):
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.Table.from_pylist(ROWS), path)
    return path


def test_a_long_check_says_how_far_it_is(parquet, capsys):
    first, second, third = lines_of(parquet, capsys, seconds_per_row=0.5)
    assert first == f"checking the data of domain 'sums': 10 rows of 60 in 5 s ({parquet})"
    assert "30 rows of 60 in 15 s" in second and "50 rows of 60 in 25 s" in third


def test_a_short_check_says_nothing(parquet, capsys):
    assert lines_of(parquet, capsys, seconds_per_row=0.01) == []


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"num_problems": 40}, "10 rows of 40 in"),
        ({"num_problems": 400}, "10 rows of 60 in"),
        # of the rows of all domains
        ({"num_problems": 40, "arguments": {"domain_field": "question"}}, "10 rows of 60 in"),
    ],
)
def test_no_more_rows_are_promised_than_are_taken(parquet, capsys, fields, told):
    first, *_ = lines_of(parquet, capsys, seconds_per_row=0.5, **fields)
    assert told in first


def test_rows_of_text_files_are_guessed(tmp_path, capsys):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    first, *_ = lines_of(path, capsys, seconds_per_row=0.5)
    assert "10 rows of about 60 in 5 s" in first
    path = tmp_path / "rows.json"
    path.write_text(json.dumps(ROWS))
    first, *_ = lines_of(path, capsys, seconds_per_row=0.5)
    assert "10 rows in 5 s" in first
