"""In which settings two configurations differ, also those of different releases."""

import copy

import pytest

from grpo_megatron.config.changed_settings import changed_settings, read_values, values_of
from grpo_megatron.config.loader import write_resolved
from grpo_megatron.errors import ConfigError
from grpo_megatron.plan.resolve import resolve


@pytest.fixture(scope="module")
def shipped() -> dict:
    return values_of(resolve("demo/gspo-moe-cpu"))


def keys(then: dict, now: dict) -> tuple[list[str], list[str]]:
    found = changed_settings(then, now, left_out=("runs_dir", "gates"))
    return list(found.chosen), list(found.defaults)


@pytest.mark.parametrize(
    ("overrides", "chosen"),
    [
        (["seed=7"], ["seed"]),
        (["runs_dir=elsewhere", 'gates=["steps >= 1"]'], []),
        (["seed=0"], []),
    ],
)
def test_what_a_flag_sets_is_chosen(shipped, overrides, chosen):
    now = values_of(resolve("demo/gspo-moe-cpu", overrides))
    assert keys(shipped, now) == (chosen, [])
    assert keys(now, shipped) == (chosen, [])


def test_a_table_that_is_there_on_one_side_is_chosen(shipped):
    now = values_of(resolve("demo/gspo-moe-cpu", ["lora.rank=4"]))
    assert "lora.rank" in keys(shipped, now)[0]
    assert "lora.rank" in keys(now, shipped)[0]
    of_defaults = copy.deepcopy(now)
    for key in list(of_defaults["provenance"]):
        if key.startswith("lora."):
            del of_defaults["provenance"][key]
    assert "lora.rank" in keys(shipped, of_defaults)[0]


def test_settings_that_one_release_lacks_count_where_they_were_chosen(shipped):
    other = copy.deepcopy(shipped)
    other["config"]["watch"]["patience_s"] = 3
    assert keys(shipped, other) == ([], ["watch.patience_s"])
    assert keys(other, shipped) == ([], ["watch.patience_s"])
    other["provenance"]["watch.patience_s"] = {"kind": "recipe", "where": "mine.toml:3"}
    assert keys(shipped, other) == (["watch.patience_s"], [])
    assert keys(other, shipped) == (["watch.patience_s"], [])


def test_another_default_is_the_library_s(shipped):
    other = copy.deepcopy(shipped)
    other["config"]["watch"]["silent_s"] += 1
    assert keys(shipped, other) == ([], ["watch.silent_s"])
    other["provenance"]["watch.silent_s"] = {"kind": "flag", "where": "watch.silent_s"}
    assert keys(shipped, other) == (["watch.silent_s"], [])


def test_what_was_written_is_read_again(shipped, tmp_path):
    file = tmp_path / "config.json"
    write_resolved(file, resolve("demo/gspo-moe-cpu"))
    assert read_values(file) == shipped


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"config": {}}', '{"config": 1, "provenance": {}}']
)
def test_what_no_run_writes_is_damaged(tmp_path, text):
    file = tmp_path / "config.json"
    file.write_text(text)
    with pytest.raises(ConfigError, match="damaged"):
        read_values(file)
