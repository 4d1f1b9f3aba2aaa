"""What adapters in PEFT's format are refused for, before a process starts."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file

from grpo_megatron.config.lora import LoraConfig
from grpo_megatron.errors import CheckpointError, DataError
from grpo_megatron.plan.adapter_files import CONFIG, WEIGHTS, note_of, refuse_other_adapters
from grpo_megatron.plan.resolve import refuse_missing, resolve

LORA = LoraConfig(rank=3, alpha=5)
MODULE = "base_model.model.model.layers.0.self_attn.q_proj."
# what PEFT 0.21 writes of a plain LoraConfig
BY_PEFT = {
    "alora_invocation_tokens": None,
    "alpha_pattern": {},
    "arrow_config": None,
    "auto_mapping": None,
    "base_model_name_or_path": "Qwen/Qwen3-0.6B",
    "bias": "none",
    "corda_config": None,
    "ensure_weight_tying": False,
    "eva_config": None,
    "exclude_modules": None,
    "fan_in_fan_out": False,
    "inference_mode": True,
    "init_lora_weights": True,
    "kasa_config": None,
    "layer_replication": None,
    "layers_pattern": None,
    "layers_to_transform": None,
    "loftq_config": {},
    "lora_alpha": 5,
    "lora_bias": False,
    "lora_dropout": 0.05,
    "lora_ga_config": None,
    "megatron_config": None,
    "megatron_core": "megatron.core",
    "modules_to_save": None,
    "monteclora_config": None,
    "peft_type": "LORA",
    "peft_version": "0.21.2",
    "qalora_group_size": 16,
    "r": 3,
    "rank_pattern": {},
    "revision": None,
    "target_modules": ["q_proj"],
    "target_parameters": None,
    "task_type": "CAUSAL_LM",
    "trainable_token_indices": None,
    "use_bdlora": None,
    "use_dora": False,
    "use_qalora": False,
    "use_rslora": False,
    "velora_config": None,
}


@pytest.fixture
def adapters(tmp_path):
    (tmp_path / CONFIG).write_text(json.dumps(BY_PEFT))
    write_tensors(tmp_path, np.ones((3, 8), np.float32), np.zeros((4, 3), np.float32))
    return tmp_path


def write_tensors(directory, a, b):
    tensors = {MODULE + "lora_A.weight": a, MODULE + "lora_B.weight": b}
    save_file(tensors, directory / WEIGHTS, metadata={"format": "pt"})


def change(directory, **settings):
    (directory / CONFIG).write_text(json.dumps(BY_PEFT | settings))


def refused(directory, lora=LORA) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        refuse_other_adapters(lora, directory)
    assert caught.value.where == str(directory) and caught.value.remedy
    return caught.value


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"init_lora_weights": False},
        {"init_lora_weights": "gaussian"},
        {"init_lora_weights": "eva", "eva_config": {"rho": 2.0}},
        {"init_lora_weights": "orthogonal"},
        {"task_type": None},
        {"target_modules": "all-linear", "exclude_modules": ".*visual.*"},
        {"alpha_pattern": None, "rank_pattern": None, "loftq_config": None},
        {"key_of_a_later_release": False},
    ],
)
def test_adapters_that_are_what_lora_says(adapters, settings):
    change(adapters, **settings)
    refuse_other_adapters(LORA, adapters)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("init_lora_weights", "pissa"),
        ("init_lora_weights", "pissa_niter_16"),
        ("init_lora_weights", "olora"),
        ("init_lora_weights", "corda"),
        ("init_lora_weights", "loftq"),
        ("init_lora_weights", "lora_ga"),
        ("alora_invocation_tokens", [1, 2]),
        ("layer_replication", [[0, 1], [0, 2]]),
        ("use_qalora", True),
        ("lora_bias", True),
        ("arrow_config", {"top_k": 3}),
        ("target_parameters", ["mlp.experts.gate_up_proj"]),
        ("trainable_token_indices", [1, 2]),
        ("modules_to_save", ["lm_head"]),
        ("task_type", "SEQ_CLS"),
        ("key_of_a_later_release", 1),
    ],
)
def test_keys_by_which_equal_tensors_mean_something_else(adapters, key, value):
    change(adapters, **{key: value})
    assert f"{key} of {CONFIG} is {value!r}, with which" in refused(adapters).message


@given(
    key=st.text(min_size=1).filter(lambda text: text not in BY_PEFT),
    value=st.one_of(st.text(min_size=1), st.integers(1), st.lists(st.none(), min_size=1)),
)
def test_no_key_is_passed_over(tmp_path_factory, key, value):
    directory = tmp_path_factory.mktemp("adapter")
    change(directory, **{key: value})
    assert f"{key} of {CONFIG}" in refused(directory).message


@pytest.mark.parametrize(
    ("lora", "words"),
    [
        ({"rank": 8, "alpha": 5}, f"r of {CONFIG} is 3, and [lora] needs 8"),
        ({"rank": 3, "alpha": 6}, f"lora_alpha of {CONFIG} is 5"),
        ({"rank": 3, "alpha": 5, "dora": True}, f"use_dora of {CONFIG} is False"),
        ({"rank": 3, "alpha": 5, "rank_stabilised": True}, f"use_rslora of {CONFIG} is False"),
    ],
)
def test_adapters_of_another_rank_scale_or_kind(adapters, lora, words):
    assert words in refused(adapters, LoraConfig(**lora)).message


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[]", "has list, expected a table"),
        ("null", "has NoneType, expected a table"),
        ("", f"cannot read {CONFIG}"),
        ("{", f"cannot read {CONFIG}"),
    ],
)
def test_a_damaged_configuration(adapters, text, words):
    (adapters / CONFIG).write_text(text)
    assert words in refused(adapters).message


@pytest.mark.parametrize("name", [CONFIG, WEIGHTS])
def test_a_file_that_is_missing(adapters, name):
    (adapters / name).unlink()
    assert f"cannot read {name}: No such file" in refused(adapters).message


@given(data=st.data())
def test_tensors_that_are_cut(tmp_path_factory, data):
    directory = tmp_path_factory.mktemp("adapter")
    change(directory)
    write_tensors(directory, np.ones((3, 8), np.float32), np.zeros((4, 3), np.float32))
    whole = (directory / WEIGHTS).read_bytes()
    size = data.draw(st.integers(0, len(whole) - 1))
    (directory / WEIGHTS).write_bytes(whole[:size])
    assert f"cannot read {WEIGHTS}" in refused(directory).message


@pytest.mark.parametrize("header", [b"[]", b"null", b'{"a": 1}', b'{"a": {"dtype": "F32"}}'])
def test_a_header_of_something_else(adapters, header):
    (adapters / WEIGHTS).write_bytes(len(header).to_bytes(8, "little") + header)
    assert f"cannot read {WEIGHTS}" in refused(adapters).message


@pytest.mark.parametrize("dtype", [bool, np.int8, np.int64, np.complex64])
def test_tensors_that_are_no_floating_point_numbers(adapters, dtype):
    write_tensors(adapters, np.ones((3, 8), dtype), np.zeros((4, 3), dtype))
    assert "adapters are F64, F32, F16, BF16" in refused(adapters).message


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16])
def test_tensors_of_any_floating_point_type(adapters, dtype):
    write_tensors(adapters, np.ones((3, 8), dtype), np.zeros((4, 3), dtype))
    refuse_other_adapters(LORA, adapters)


@pytest.mark.parametrize(("a", "b"), [((2, 8), (4, 3)), ((3, 8), (4, 2))])
def test_tensors_of_another_rank_than_their_configuration(adapters, a, b):
    write_tensors(adapters, np.ones(a, np.float32), np.ones(b, np.float32))
    assert "has rank 2, and lora.rank is 3" in refused(adapters).message


def test_a_run_is_refused_before_it_starts(adapters):
    flags = ["lora.rank=8", "lora.alpha=5", f"lora.path={adapters}"]
    recipe = "demo/gspo-moe-cpu"
    config = resolve(recipe, [*flags, "cold_start=null"]).config
    with pytest.raises(CheckpointError, match="needs 8"):
        refuse_missing(config)
    refuse_missing(config, coming=True)  # another run may write them anew
    gone = resolve(recipe, [*flags, f"lora.path={adapters / 'gone'}", "cold_start=null"]).config
    with pytest.raises(DataError, match=r"lora\.path: no such file"):
        refuse_missing(gone)
    for begun in (config, gone):  # a checkpoint has the adapters of its run
        refuse_missing(begun, has_checkpoint=True)


@pytest.mark.parametrize(
    ("modules", "has_experts", "is_told"),
    [
        (["self_attn.q_proj", "self_attn.kv_b_proj"], True, False),
        (["self_attn.q_proj", "mlp.gate_proj"], False, False),
        (["self_attn.q_proj", "mlp.gate_proj"], True, True),
        (["mlp.shared_experts.down_proj"], True, True),
        (["mlp.experts.3.up_proj"], True, True),
    ],
)
def test_adapters_that_peft_misreads_are_told(modules, has_experts, is_told):
    """Layers of any MLP, in a model with experts (PEFT 0.21.2, transformers 5)."""
    note = note_of(modules, has_experts=has_experts)
    assert bool(note) == is_told
    assert not is_told or 'lora.targets = ["self_attn"]' in note
