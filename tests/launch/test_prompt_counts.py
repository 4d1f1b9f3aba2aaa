"""Enough rows of files are different prompts, told before anything starts."""

from __future__ import annotations

import json

import pytest

from grpo_megatron.errors import DataError
from grpo_megatron.launch.prompt_counts import refuse_too_few_rows
from grpo_megatron.plan.resolve import resolve
from tests.data.preference_files import recipe as preference_recipe
from tests.data.preference_files import write
from tests.launch.test_row_checks import FROM_FILE, PAIRS, RECIPE, write_rows
from tests.trainer.vision import png

VISION = "demo/vision-count-cpu"


def config_of(*settings: str, recipe: str = RECIPE):
    return resolve(recipe, [*FROM_FILE, *settings]).config


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (("batch.num_prompts=99",), "has 98 training prompts at most, but one batch asks for 99"),
        (("data.num_heldout=99",), "has 100 row(s), and 99 held-out and 1 validation"),
    ],
)
def test_nothing_starts_with_too_few_prompts(tmp_path, monkeypatch, settings, words):
    """Equal rows are one prompt, and those that are too long are none."""
    monkeypatch.chdir(tmp_path)
    long = json.dumps({"question": "1 " * 1000, "answer": "2"})
    again = json.dumps({"question": "0 + 1?", "answer": "1"})
    write_rows(tmp_path / "rows.jsonl", long, again, again)
    with pytest.raises(DataError, match=r"2 equal to earlier ones") as caught:
        refuse_too_few_rows(config_of(*settings))
    assert words in caught.value.message
    assert "1 empty or longer than max_model_len" in caught.value.message


def test_as_many_prompts_as_a_run_needs_are_enough(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_rows(tmp_path / "rows.jsonl")
    refuse_too_few_rows(config_of("batch.num_prompts=98"))
    refuse_too_few_rows(config_of("batch.num_prompts=99", "sampling.dynamic=true"))
    refuse_too_few_rows(config_of("batch.num_prompts=99", "num_steps=0"))


def test_a_cold_start_needs_a_batch_too(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_rows(tmp_path / "rows.jsonl")
    settings = [one for one in FROM_FILE if one != "cold_start=null"]
    config = resolve(RECIPE, [*settings, "cold_start.batch_size=99"]).config
    with pytest.raises(DataError, match="one batch asks for 99") as caught:
        refuse_too_few_rows(config)
    assert caught.value.where == "cold_start.batch_size"


def test_images_that_cannot_be_seen_leave_no_prompts(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "small.png").write_bytes(png(60, 30, 0))
    row = {"question": "How many?", "answer": "1"}
    bad = [json.dumps(row | {"images": [f"no-{number}.png"]}) for number in range(70)]
    (tmp_path / "rows.jsonl").write_text("\n".join(bad))
    config = config_of(recipe=VISION)
    with pytest.raises(DataError, match=r"no image at .*no-0\.png") as caught:
        refuse_too_few_rows(config)
    assert str(caught.value.where).endswith("rows.jsonl:1")
    good = [json.dumps(row | {"question": f"{n}?", "images": ["small.png"]}) for n in range(5)]
    (tmp_path / "rows.jsonl").write_text("\n".join([*bad, *good]))
    with pytest.raises(DataError, match="70 with images that cannot be seen"):
        refuse_too_few_rows(config)
    refuse_too_few_rows(config_of("batch.num_prompts=2", recipe=VISION))


def test_a_pair_is_two_labelled_answers(tmp_path):
    """KTO trains each of them: five pairs are ten preferences."""
    path = write(tmp_path, PAIRS[:5])
    settings = {"preferences": {"loss": "kto"}, "data": {"num_validation": 0, "num_heldout": 0}}
    refuse_too_few_rows(preference_recipe(path, **settings, batch={"num_prompts": 10}))
    with pytest.raises(DataError, match="has 10 training prompts at most"):
        refuse_too_few_rows(preference_recipe(path, **settings, batch={"num_prompts": 11}))
