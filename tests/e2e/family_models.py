"""Tiny random checkpoints of every family that a whole run can train, and what transformers says.

The shapes of `tests.trainer.families`, with sizes that vLLM's CPU build can compute."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np

from grpo_megatron.batching.store import SampleTable
from grpo_megatron.config.presets import load_preset
from grpo_megatron.data.tiny_model import write_tiny_model
from grpo_megatron.plan.fp8_weights import BLOCK
from grpo_megatron.plan.tensor_names import transformers_type
from grpo_megatron.weights.transformers_model import load_config, load_model, rename_tensors
from tests.trainer import families

_SIZES = {"vocab_size": 96, "hidden_size": 96, "intermediate_size": 96}
_EXPERT_SIZES = {"moe_intermediate_size": 32}
# half of it, for each of two tensor-parallel workers, still fills blocks of the CPU's kernels
_OWN_SIZES = {"qwen3_moe_all_sparse": {"hidden_size": 128}}
_BLOCKS = {  # halves of every width are whole blocks
    "hidden_size": 256,
    "intermediate_size": 256,
    "moe_intermediate_size": 256,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 32,
    "q_lora_rank": 128,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
}
_ORIGINAL_POSITIONS = 64  # by YaRN's factor of 4: max_position_embeddings
# What the shapes of `families` do not have.
_MORE = {
    "qwen2_tied": families.MODELS["qwen2"] | {"tie_word_embeddings": True},
    # the latent sizes for which vLLM's CPU build has a kernel
    "deepseek_v3_kernel": families.MODELS["deepseek_v3"]
    | {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 32, "v_head_dim": 32},
    # groups unlike DeepSeek-V3's 8 of which 4 are taken
    "deepseek_v3_groups": families.MODELS["deepseek_v3"]
    | {
        "n_routed_experts": 12,
        "n_group": 3,
        "topk_group": 1,
        "num_experts_per_tok": 3,
        "first_k_dense_replace": 2,
        "n_shared_experts": 2,
    },
    "qwen3_moe_all_sparse": families.MODELS["qwen3_moe"] | {"num_experts": 8},
}


def settings_of(name: str) -> dict:
    """config.json of a name in `tests.trainer.families.MODELS` or `_MORE`, with our sizes."""
    hf = (families.MODELS | _MORE)[name] | _SIZES | _OWN_SIZES.get(name, {})
    if "moe_intermediate_size" in hf:
        hf |= _EXPERT_SIZES
    if "head_dim" in hf:
        hf |= {"head_dim": 32}
    elif "kv_lora_rank" not in hf:
        hf |= {"hidden_size": 32 * hf["num_attention_heads"]}
    scaling = hf.get("rope_scaling") or {}
    if scaling.get("type") == "yarn":
        hf |= {"rope_scaling": scaling | {"original_max_position_embeddings": _ORIGINAL_POSITIONS}}
    return hf


def wide_settings_of(name: str) -> dict:
    """config.json of a name as for `settings_of`, of which two ranks have whole blocks of FP8."""
    hf = settings_of(name)
    for field, size in _BLOCKS.items():
        if hf.get(field) is not None:
            hf[field] = size
    has_kernel = hf.get("kv_lora_rank") == 512  # vLLM's CPU build has one for its sizes
    if "kv_lora_rank" in hf and not has_kernel:
        hf |= {"kv_lora_rank": BLOCK, "qk_rope_head_dim": 32}
    return hf


def write_checkpoint(
    directory: Path, name: str, *, config_of_transformers: bool, seed: int = 0, **changed: int
) -> None:
    """The family's model, written as `write_random_model` does. changed: fields of config.json."""
    hf = settings_of(name) | changed
    write_random_model(directory, hf, config_of_transformers=config_of_transformers, seed=seed)


def write_random_model(
    directory: Path, hf: dict, *, config_of_transformers: bool, seed: int = 0
) -> None:
    """Random weights, norms and selection biases, a tokenizer, and config.json: `hf`, or as
    transformers saves it."""
    import torch
    from transformers import AutoModelForCausalLM

    preset = replace(load_preset("tiny-qwen3-moe"), hf=hf)
    write_tiny_model(directory, preset)
    written = (directory / "config.json").read_text()
    config = _config(json.loads(written))
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        biases = [
            buffer for key, buffer in model.named_buffers() if "e_score_correction_bias" in key
        ]
        for weight in [*model.parameters(), *biases]:
            if weight.dim() == 1:
                weight.add_(torch.randn_like(weight) * 0.1)
    model.save_pretrained(directory)
    rename_tensors(directory, of=config.model_type, to=hf["model_type"])
    if config_of_transformers:
        saved = json.loads((directory / "config.json").read_text())
        written = json.dumps(saved | {"model_type": hf["model_type"]})
    (directory / "config.json").write_text(written)


def _config(hf: dict):
    from transformers import AutoConfig

    kind = transformers_type(hf["model_type"])
    return AutoConfig.for_model(kind, **{k: v for k, v in hf.items() if k != "model_type"})


def reference_model(checkpoint: Path):
    """transformers' model of a checkpoint, fp32."""
    import torch
    from transformers import AutoModelForCausalLM

    config = load_config(checkpoint)
    return load_model(AutoModelForCausalLM, checkpoint, config, torch.float32).eval()


def differences(checkpoint: Path, step: Path) -> np.ndarray:
    """|engine - transformers| of the log-prob of every token of a recorded step."""
    import torch

    model, table, found = reference_model(checkpoint), SampleTable(step), []
    for row in range(len(table)):
        prompt, (completion, logprobs) = table.prompt_ids(row), table.completion(row)
        ids = torch.from_numpy(np.concatenate([prompt, completion]).astype(np.int64))[None]
        with torch.no_grad():
            logits = model(ids).logits[0, len(prompt) - 1 : -1]
        expected = logits.log_softmax(-1).gather(-1, ids[0, len(prompt) :, None])[:, 0]
        found.append(np.abs(expected.numpy() - logprobs))
    return np.concatenate(found)
