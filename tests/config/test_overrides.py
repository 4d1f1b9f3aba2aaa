"""`key=value` on top of the demo recipe."""

from __future__ import annotations

from pathlib import Path

import pytest

from grpo_megatron.config.keys import value_at
from grpo_megatron.config.loader import load_recipe
from grpo_megatron.config.problems import InvalidConfigError
from tests.config.conftest import DEMO


@pytest.mark.parametrize(
    ("text", "key", "value"),
    [
        ("seed=3", "seed", 3),
        ("optimizer.lr=1e-5", "optimizer.lr", 1e-5),
        ("optimizer.lr=1", "optimizer.lr", 1.0),
        ("optimizer.lr = 0.5", "optimizer.lr", 0.5),
        ("name=007", "name", "007"),
        ("domains.0.reference=007", "domains.0.reference", Path.cwd() / "007"),
        ("name=a=b", "name", None),
        ('name="quoted"', "name", "quoted"),
        ("telemetry.wandb=offline", "telemetry.wandb", "offline"),
        ("telemetry.wandb_project=true", "telemetry.wandb_project", "true"),
        ("rollout.deterministic=true", "rollout.deterministic", True),
        ("domains.0.weight=2", "domains.0.weight", 2.0),
        ("domains.0.rewards.0.weight=0.5", "domains.0.rewards.0.weight", 0.5),
        ("domains.0.arguments.max_digits=3", "domains.0.arguments.max_digits", 3),
        ('domains.0.arguments={a = [1, "x"]}', "domains.0.arguments", {"a": [1, "x"]}),
        ('rollout.engine_arguments=["--a", "--b"]', "rollout.engine_arguments", ("--a", "--b")),
        ("cold_start=null", "cold_start", None),
        ("cold_start.optimizer.eps=0.1", "cold_start.optimizer.eps", 0.1),
        ("rollout.num_threads=null", "rollout.num_threads", None),
        ("domains.0.template={question} =", "domains.0.template", "{question} ="),
        ("objective.advantage_std=none", "objective.advantage_std", "none"),
        ("trainer.recompute=none", "trainer.recompute", "none"),
    ],
)
def test_values(text, key, value):
    if value is None and key == "name":
        with pytest.raises(InvalidConfigError, match="must match"):
            load_recipe(DEMO, [text])
        return
    resolved = load_recipe(DEMO, [text])
    assert value_at(resolved.config, key) == value
    leaf = key if key in resolved.provenance else f"{key}.a"
    assert str(resolved.provenance[leaf]) == f"flag {text}"


def test_the_last_flag_wins():
    resolved = load_recipe(DEMO, ["seed=1", "seed=2"])
    assert resolved.config.seed == 2
    assert resolved.provenance["seed"].where == "seed=2"


def test_a_table_that_the_recipe_lacks(write_recipe):
    resolved = load_recipe(write_recipe(), ["cold_start.max_steps=7"])
    assert resolved.config.cold_start.max_steps == 7
    assert resolved.provenance["cold_start.batch_size"].kind == "default"


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("seed", "not a key=value override"),
        ("=3", "not a key=value override"),
        ("a..b=3", "not a key=value override"),
        ("domains.1.weight=2", "domains has 1 element"),
        ("domains.x.weight=2", "nearest:       domains.0.weight"),
        ("name.x=2", "name is a single value"),
        ("seed=three", "must be a whole number"),
        ("seed=2.0", "set seed=2"),
        ("seed=true", "must be a whole number"),
        ('seed="4"', "set seed=4"),
        ("optimizer.lr=nan", "must be a finite number"),
        ("rollout.deterministic=yes", "must be true or false"),
        ("domains=3", "must be a list"),
        ("trainer=3", "must be a table"),
        ("rollout.engine_arguments=--a", "must be a list"),
        ("rollout.engine_arguments=--a", 'set rollout.engine_arguments=["--a"]'),
        ("rollout.engine_arguments=[--a]", "is not valid TOML"),
        ("domains.0.arguments.x={a:1}", "is not valid TOML"),
        ("domains.0.arguments=3", "must be a table"),
        ("trainer.precision=fp32", "must be one of: float32, bfloat16"),
    ],
)
def test_wrong_overrides_are_named(text, wanted):
    with pytest.raises(InvalidConfigError) as caught:
        load_recipe(DEMO, [text])
    assert wanted in str(caught.value)
    assert f"flag {text}" in str(caught.value)
    assert len(caught.value.problems) == 1


def test_a_value_cannot_smuggle_in_another_key():
    with pytest.raises(InvalidConfigError):
        load_recipe(DEMO, ["seed=1\nname = 'x'"])
