"""ConfigOverlay, `extends`, look-up of recipes, unreadable files."""

from __future__ import annotations

from pathlib import Path

import pytest

from grpo_megatron import assets
from grpo_megatron.config.loader import load_recipe
from grpo_megatron.config.toml_file import read_recipe_chain
from grpo_megatron.errors import ConfigError
from tests.config.conftest import DEMO, MINIMAL


def test_recipe_by_name_and_by_path_are_the_same():
    by_name = load_recipe(DEMO)
    assert load_recipe(f"{DEMO}.toml") == by_name
    assert load_recipe(assets.root() / "recipes" / f"{DEMO}.toml") == by_name
    assert by_name.config.trainer.expert_parallel_size == 2


def test_layers_override_each_other(write_recipe, tmp_path, monkeypatch):
    models = tmp_path / "models"
    for folder in ("models", "recipes", "slurm"):
        (tmp_path / folder).mkdir()
    tiny = (assets.root() / "models" / "tiny-qwen3-moe.toml").read_text()
    (models / "tiny-qwen3-moe.toml").write_text(
        tiny + "\n[defaults.optimizer]\nlr = 1.0\nbeta1 = 0.1\nbeta2 = 0.2\neps = 0.3\n"
    )
    monkeypatch.setattr(assets, "root", lambda: tmp_path)
    write_recipe("[optimizer]\nbeta1 = 0.5\nbeta2 = 0.6\neps = 0.7\n", file="base.toml")
    recipe = write_recipe(
        "[optimizer]\nbeta2 = 0.8\neps = 0.9\n", text='extends = "base.toml"\nname = "child"\n'
    )
    resolved = load_recipe(recipe, ["optimizer.eps=0.25"])
    optimizer = resolved.config.optimizer
    assert (optimizer.lr, optimizer.beta1, optimizer.beta2, optimizer.eps) == (1.0, 0.5, 0.8, 0.25)
    kinds = [
        resolved.provenance[f"optimizer.{key}"].kind
        for key in ("lr", "beta1", "beta2", "eps", "clip_grad")
    ]
    assert kinds == ["model", "recipe", "recipe", "flag", "default"]
    places = [
        str(resolved.provenance[f"optimizer.{key}"]).rsplit("/")[-1]
        for key in ("lr", "beta1", "beta2")
    ]
    defaults_line = tiny.count("\n") + 2
    assert places == [f"tiny-qwen3-moe.toml:{defaults_line + 1}", "base.toml:14", "recipe.toml:4"]
    assert resolved.config.name == "child"


def test_lists_replace_tables_merge(write_recipe):
    write_recipe(file="base.toml")
    child = write_recipe(
        text='extends = "base.toml"\n[[domains]]\nname = "other"\n'
        'source = "file"\npath = "x.jsonl"\nrewards = [{function = "a:b"}]\n'
    )
    config = load_recipe(child).config
    assert [domain.name for domain in config.domains] == ["other"]
    assert config.rollout.dtype == "float32"
    assert config.domains[0].path == Path.cwd() / "x.jsonl"


def test_extends_takes_the_name_of_a_shipped_recipe(write_recipe):
    chain = read_recipe_chain(write_recipe(text='extends = "demo/gspo-moe-cpu"\nname = "mine"\n'))
    assert [file.path.name for file in chain] == ["gspo-moe-cpu.toml", "recipe.toml"]
    with pytest.raises(ConfigError, match="shipped recipes: demo/gspo-moe-cpu"):
        read_recipe_chain(write_recipe(text='extends = "demo/gspo-mo-cpu"\nname = "mine"\n'))


@pytest.mark.parametrize("name", ["graphs/tiny-r1", "graphs/deepseek_v4"])
def test_a_graph_is_no_recipe(name):
    with pytest.raises(ConfigError, match="this is a graph of stages") as told:
        load_recipe(name)
    path = assets.root() / "recipes" / f"{name}.toml"
    assert f"stages run {path}, or grpo-megatron rehearse {path}" in told.value.remedy


def test_extends_chain_resolves_relative_to_each_file(write_recipe):
    write_recipe(file="a/base.toml")
    write_recipe(text='extends = "a/base.toml"\nseed = 1\n', file="middle.toml")
    top = write_recipe(text='extends = "../middle.toml"\nname = "top"\n', file="b/top.toml")
    config = load_recipe(top).config
    assert (config.name, config.seed) == ("top", 1)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ('name = "x"\nextends = "recipe.toml"\n', ["extends itself", "recipe.toml:2"]),
        (
            'extends = "basee.toml"\n',
            ["does not exist", "recipe.toml:1", "did you mean 'base.toml'"],
        ),
        ('extends = ["base.toml"]\n', ["one recipe", "recipe.toml:1"]),
        ('name = "x"\nseed = = 1\n', ["recipe.toml:2", "not valid TOML"]),
        ('name = "x"\nname = "y"\n', ["recipe.toml:2", "not valid TOML"]),
        ('name = "x\n', ["recipe.toml:1", "not valid TOML"]),
    ],
)
def test_bad_files_name_file_and_line(write_recipe, text, wanted):
    write_recipe(file="base.toml")
    with pytest.raises(ConfigError) as caught:
        load_recipe(write_recipe(text=text))
    assert all(part in str(caught.value) for part in wanted)


def test_not_utf8(tmp_path):
    path = tmp_path / "latin.toml"
    path.write_bytes('name = "é"'.encode("latin-1"))
    with pytest.raises(ConfigError, match=r"not UTF-8[\s\S]*latin\.toml"):
        load_recipe(path)


@pytest.mark.parametrize(
    "wrong", ["gspo-moe-cpu", "recipes/demo/gspo-moe.toml", "demo/gspo_moe_cpu", "demo"]
)
def test_missing_recipe_lists_near_ones(wrong):
    with pytest.raises(ConfigError) as caught:
        load_recipe(wrong)
    assert DEMO in str(caught.value)


def test_minimal_recipe_loads(write_recipe):
    assert load_recipe(write_recipe()).config.num_steps == 100
    assert MINIMAL.count("[trainer]") == 1
