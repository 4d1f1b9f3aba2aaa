"""A family whose code transformers carries under another name, with other names of tensors."""

from __future__ import annotations

import shutil

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from grpo_megatron.errors import ConfigError
from grpo_megatron.plan import family
from grpo_megatron.plan.family import family_of
from grpo_megatron.plan.tensor_names import renamer, transformers_type
from grpo_megatron.rehearsal.tiny_family import tiny_config, write_tiny_checkpoint
from grpo_megatron.weights.parameters import resolve, rules_for
from grpo_megatron.weights.transformers_model import load_config, load_model
from tests.trainer.families import MODELS

OTHER_NAMES = """
extends = ["qwen3_moe"]
same_code_as = "qwen3_moe"

[model]
"output_layer.weight" = "head.weight"

[layer]
"mlp.router.weight" = "moe.gate.weight"
"mlp.experts.local_experts.{expert}.linear_fc1.weight" = [
    "moe.experts.{expert}.w1.weight", "moe.experts.{expert}.w3.weight"]
"mlp.experts.local_experts.{expert}.linear_fc2.weight" = "moe.experts.{expert}.w2.weight"
"""


@pytest.fixture
def add_family(tmp_path, monkeypatch):
    """Write the table of a family beside those of the package. Names are used once: tables are
    kept in memory."""
    folder = tmp_path / "families"
    shutil.copytree(family._FOLDER, folder)
    monkeypatch.setattr(family, "_FOLDER", folder)
    return lambda name, text: (folder / f"{name}.toml").write_text(text)


def test_transformers_computes_with_other_names_of_tensors(add_family, tmp_path):
    add_family("other_names", OTHER_NAMES)
    shape = tiny_config(MODELS["qwen3_moe"], 2)
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    write_tiny_checkpoint(ours, {**shape, "model_type": "other_names"}, (), 3)
    write_tiny_checkpoint(theirs, shape, (), 3)
    renamed = {}
    for name, tensor in load_file(theirs / "model.safetensors").items():
        renamed[renamer("qwen3_moe", "other_names")(name)] = tensor
    written = load_file(ours / "model.safetensors")
    assert "head.weight" in written and "model.layers.1.moe.experts.3.w3.weight" in written
    assert written.keys() == renamed.keys()
    assert all(torch.equal(written[name], renamed[name]) for name in written)
    ids = torch.arange(12)[None]
    logits = []
    for directory in (ours, theirs):
        config = load_config(directory)
        assert config.model_type == "qwen3_moe"
        model = load_model(AutoModelForCausalLM, directory, config, torch.float32).eval()
        logits.append(model(ids).logits)
    assert torch.equal(*logits)


def test_names_of_tensors_come_back():
    there, back = renamer("qwen3_moe", "mixtral"), renamer("mixtral", "qwen3_moe")
    name = "model.layers.11.mlp.experts.3.up_proj.weight"
    assert there(name) == "model.layers.11.block_sparse_moe.experts.3.w3.weight"
    assert back(there(name)) == name
    assert there("model.layers.11.no.parameter") == "model.layers.11.no.parameter"


def test_families_are_known_by_their_own_name_but_for_those_that_say_so():
    assert transformers_type("kimi_k2") == "deepseek_v3"
    assert transformers_type("deepseek_v3") == "deepseek_v3"


def test_the_same_code_is_that_of_a_family(add_family):
    add_family("like_none", 'extends = ["qwen3_moe"]\nsame_code_as = "qwen3_mo"\n')
    with pytest.raises(ConfigError, match="which is no other family") as caught:
        family_of("like_none")
    assert "did you mean 'qwen3_moe'" in str(caught.value) and "like_none.toml" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "row", "words"),
    [
        (
            "two_routers",
            '"mlp.router.weight" = ["moe.gate.weight", "moe.more.weight"]',
            ["made of 1 Hugging Face tensor(s), the table names 2", "name the one tensor"],
        ),
        (
            "gate_alone",
            '"mlp.linear_fc1.weight" = ["mlp.gate_proj.weight"]',
            ["made of 2 Hugging Face tensor(s), the table names 1", "gate, then up"],
        ),
        (
            "numbers",
            '"mlp.experts.local_experts.{expert}.linear_fc2.weight" = "moe.{exprt}.w2.weight"',
            ["has {exprt}", "did you mean 'expert'"],
        ),
    ],
)
def test_a_mistake_in_a_row_of_a_table_is_told(add_family, name, row, words):
    add_family(name, f'extends = ["qwen3_moe"]\n[layer]\n{row}\n')
    with pytest.raises(ConfigError) as caught:
        rules_for(name)
    told = str(caught.value)
    assert all(word in told for word in [*words, f"{name}.toml"]), told


def test_a_parameter_without_a_row_is_told_with_the_nearest_row(add_family):
    add_family("no_router", 'extends = ["base"]\n[layer]\n"mlp.ruter.weight" = "gate.weight"\n')
    with pytest.raises(ConfigError) as caught:
        resolve(rules_for("no_router"), "decoder.layers.3.mlp.router.weight")
    told = str(caught.value)
    for word in ("'decoder.layers.3.mlp.router.weight'", "no_router.toml", "'mlp.ruter.weight'"):
        assert word in told, told
