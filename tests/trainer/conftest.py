"""One process group per world size, and tiny models, for all trainer tests."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from grpo_megatron.batching.store import SampleRow, ShardWriter, begin_step, finish_step
from grpo_megatron.types import Completion, Prompt, RolloutGroup, VersionSpan
from tests.trainer.worker_group import WorkerGroup

VOCAB = 93  # not divisible by 2: tensor ranks pad it

MOE = {
    "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "vocab_size": VOCAB,
    "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32,
    "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True, "decoder_sparse_step": 1,
    "mlp_only_layers": [], "max_position_embeddings": 256, "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0, "tie_word_embeddings": False, "initializer_range": 0.1,
}
DENSE = {k: v for k, v in MOE.items() if "expert" not in k and "moe" not in k
         and k not in ("decoder_sparse_step", "mlp_only_layers", "norm_topk_prob")} | {
    "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}


def _write_model(directory: Path, hf: dict, seed: int) -> str:
    from grpo_megatron.data.tiny_model import init_weights
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(hf))
    init_weights(directory, seed)
    return str(directory)


@pytest.fixture(scope="session")
def moe_model(tmp_path_factory) -> str:
    return _write_model(tmp_path_factory.mktemp("models") / "moe", MOE, 1)


@pytest.fixture(scope="session")
def dense_model(tmp_path_factory) -> str:
    return _write_model(tmp_path_factory.mktemp("models") / "dense", DENSE, 2)


@pytest.fixture(scope="session")
def tied_model(tmp_path_factory) -> str:
    hf = DENSE | {"tie_word_embeddings": True}
    return _write_model(tmp_path_factory.mktemp("models") / "tied", hf, 3)


@pytest.fixture(scope="session")
def samples(tmp_path_factory) -> str:
    """24 ragged samples in groups of 4, with advantages and plausible behaviour log-probs."""
    directory = tmp_path_factory.mktemp("store") / "step_000001"
    rng, working = np.random.default_rng(0), begin_step(directory)
    writer = ShardWriter(working / "rollout-0.safetensors")
    for group in range(6):
        completions = []
        for _ in range(4):
            n = int(rng.integers(1, 20))
            ids = rng.integers(0, VOCAB, n).astype(np.int32)
            logprobs = -rng.exponential(3.0, n).astype(np.float32)
            completions.append(Completion(ids, logprobs, (VersionSpan(0, 0, n),), "stop", ""))
        prompt = Prompt(str(group), "d", "", tuple(rng.integers(0, VOCAB, 5).tolist()), "")
        writer.append(RolloutGroup(prompt, tuple(completions), 0))
    rows = [SampleRow(0, i, i // 4, 0, 0.0, float(rng.normal())) for i in range(24)]
    finish_step(directory, [writer.close()], rows, {"stale": False})
    return str(directory)


def _group(world_size: int):
    group = WorkerGroup(world_size)
    yield group
    group.close()


@pytest.fixture(scope="session")
def world1():
    yield from _group(1)


@pytest.fixture(scope="session")
def world2():
    yield from _group(2)


@pytest.fixture(scope="session")
def world4():
    yield from _group(4)
