"""All problems at once, each with key, value, place, nearest and fix."""

from __future__ import annotations

import pickle

import pytest

from grpo_megatron.config.loader import load_recipe
from grpo_megatron.config.problems import ConfigProblem, InvalidConfigError
from tests.config.conftest import DEMO


def problems_of(recipe, *overrides: str):
    with pytest.raises(InvalidConfigError) as caught:
        load_recipe(recipe, overrides)
    return {problem.key: problem for problem in caught.value.problems}, caught.value


def test_everything_is_told_at_once(write_recipe):
    recipe = write_recipe("tensor_paralel_size = 2\nnum_ranks = 0\n[bacth]\nnum_prompts = 4\n")
    problems, error = problems_of(
        recipe, "rollout.dtype=bf16", "seed=x", "rollout.max_new_tokens=5000", "nonsense"
    )
    assert set(problems) == {
        "trainer.tensor_paralel_size",
        "trainer.num_ranks",
        "bacth.num_prompts",
        "rollout.dtype",
        "seed",
        "rollout.max_new_tokens",
        "nonsense",
    }
    unknown = problems["trainer.tensor_paralel_size"]
    assert unknown.where.endswith("recipe.toml:13") and unknown.value == "2"
    assert unknown.nearest[0] == "trainer.tensor_parallel_size"
    assert problems["trainer.num_ranks"].nearest == ("1",)
    assert problems["bacth.num_prompts"].nearest[0] == "batch.num_prompts"
    assert problems["bacth.num_prompts"].where.endswith("recipe.toml:16")
    assert problems["rollout.dtype"].nearest == ("bfloat16",)
    assert problems["rollout.max_new_tokens"].nearest == ("2047",)
    assert "7 problems" in str(error)
    assert all(str(number) in str(error) for number in range(1, 8))


def test_missing_keys_say_where_they_belong(write_recipe):
    recipe = write_recipe("[[domains]]\nname = 'second'\nrewards = []\npath = 'x'\n")
    problems, _ = problems_of(recipe)
    assert problems["domains.1.source"].where.endswith("recipe.toml:13")
    assert problems["domains.1.source"].meaning


@pytest.mark.parametrize("others", [[], ["distillation={teachers=[]}"]])
def test_an_element_of_a_list_that_is_not_there_is_one_problem(others):
    overrides = ["cold_start=null", "kind=distil", *others, "distillation.teachers.0.path=x"]
    problems, _ = problems_of(DEMO, *overrides)
    assert set(problems) == {"distillation.teachers.0.path"}
    told = problems["distillation.teachers.0.path"]
    assert told.message == "distillation.teachers has no elements"
    assert told.remedy == "set the whole list before: distillation.teachers=[…]"


def test_a_list_that_is_missing_for_itself_is_told():
    problems, _ = problems_of(DEMO, "cold_start=null", "kind=distil", "distillation={}", "x.y=1")
    assert "distillation.teachers" in problems


def test_rules_about_misspelt_keys_are_not_guessed():
    problems, _ = problems_of(DEMO, "rollout.max_model_length=128", "rollout.max_new_tokens=100")
    assert set(problems) == {"rollout.max_model_length"}


def test_other_rules_still_apply_beside_a_misspelt_key():
    problems, _ = problems_of(DEMO, "sead=1", "trainer.max_tokens_per_microbatch=63")
    assert set(problems) == {"sead", "trainer.max_tokens_per_microbatch"}
    [related] = problems["trainer.max_tokens_per_microbatch"].related
    assert related.startswith("rollout.max_model_len = 64 (recipes/demo/gspo-moe-cpu.toml:")


def test_unknown_preset_suggests():
    problems, _ = problems_of(DEMO, "model.preset=tiny-qwen-moe")
    assert problems["model.preset"].nearest[0] == "tiny-qwen3-moe"


def test_errors_in_preset_defaults_name_the_preset(tmp_path, monkeypatch, write_recipe):
    from grpo_megatron import assets

    for folder in ("models", "recipes", "slurm"):
        (tmp_path / folder).mkdir()
    tiny = (assets.root() / "models" / "tiny-qwen3-moe.toml").read_text()
    (tmp_path / "models/tiny-qwen3-moe.toml").write_text(tiny + "[defaults]\nsead = 1\n")
    monkeypatch.setattr(assets, "root", lambda: tmp_path)
    problems, _ = problems_of(write_recipe())
    assert problems["sead"].where == f"models/tiny-qwen3-moe.toml:{tiny.count(chr(10)) + 2}"


def test_the_error_survives_a_process_boundary():
    _, error = problems_of(DEMO, "sead=1")
    copy = pickle.loads(pickle.dumps(error))
    assert str(copy) == str(error) and copy.exit_code == 2


@pytest.mark.parametrize(
    ("override", "key", "nearest"),
    [
        ("trianer.num_ranks=2", "trianer.num_ranks", ("trainer.num_ranks",)),
        ("trainer.foo.bar=1", "trainer.foo.bar", ()),
        ("rollout.engine_argumens.x=1", "rollout.engine_argumens.x", ()),  # a list of words
        (
            "domains.0.argumens.split=x",
            "domains.0.argumens.split",
            ("domains.0.arguments.split", "domains.0.template_arguments.split"),
        ),
        ("trainer.parallel.tp=2", "trainer.parallel.tp", ()),
        ("domains.0.name=null", "domains.0.name", ()),
    ],
)
def test_what_is_suggested_exists(override, key, nearest):
    problems, _ = problems_of(DEMO, override)
    assert problems[key].nearest == nearest


def test_further_lines_of_a_fix_stand_under_its_first():
    problem = ConfigProblem("a.b", "too large", "default", remedy="use less\nor more")
    assert str(problem).splitlines()[-2:] == [
        "     fix:           use less",
        "                    or more",
    ]
