"""Closed forms of time: numbers worked by hand, and what must hold for any input."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_megatron.config.lora import LoraConfig
from grpo_megatron.config.presets import load_preset
from grpo_megatron.config.trainer import TrainerConfig
from grpo_megatron.errors import ConfigError
from grpo_megatron.plan.timing.constants import shipped_constants
from grpo_megatron.plan.timing.generation import (
    EngineLoad,
    cache_bytes_per_token,
    decode_amounts,
    experts_met,
    generation_seconds,
)
from grpo_megatron.plan.timing.lengths import fixed, log_normal, num_microbatches, read_lengths
from grpo_megatron.plan.timing.trainer import (
    Machine,
    TrainerLoad,
    all_to_all_bytes,
    expert_imbalance,
    pipeline_seconds,
    trainer_seconds,
    trainer_work,
)
from grpo_megatron.plan.timing.work import (
    MicroBatchSize,
    adapter_elements,
    expert_elements,
    matrix_elements,
    model_flops,
    stage_work,
)
from grpo_megatron.plan.weights import Sizes, sizes_of

CONSTANTS = shipped_constants()
MACHINE = Machine(CONSTANTS, CONSTANTS.device("h100-80g"), 8)


def sizes(model: str, **layout) -> Sizes:
    hf = load_preset(model).hf
    return sizes_of(hf, hf["vocab_size"], TrainerConfig(**layout))


def test_operations_of_a_dense_model_with_grouped_queries():
    """Qwen3-8B: 36 layers, hidden 4096, 32 heads and 8 key-value heads of 128, MLP 12288."""
    layer = 4096 * 4096 + 4096 * (32 + 2 * 8) * 128 + 3 * 4096 * 12288
    whole = sizes("qwen3-8b")
    assert sum(matrix_elements(whole, is_moe=False)) == layer
    attention = 3 * 32 * (128 + 128) * 1000**2
    expected = 36 * (6 * layer * 1000 + attention) + 6 * 151936 * 4096 * 1000
    assert model_flops(whole, 1000, 1000**2) == expected


def test_operations_of_latent_attention_shared_experts_and_dense_first_layers():
    """DeepSeek-V3: 3 dense and 58 MoE layers, latents of 1536 and 512, rotary 64, 128 heads of
    128 + 64 and 128, 8 of 256 experts of 2048 and one shared."""
    whole = sizes("deepseek-v3")
    attention = 7168 * 1536 + 1536 * 128 * 192 + 7168 * 576 + 512 * 128 * 256 + 128 * 128 * 7168
    expert = 3 * 7168 * 2048
    assert expert_elements(whole) == expert
    assert sum(matrix_elements(whole, is_moe=False)) == attention + 3 * 7168 * 18432
    assert sum(matrix_elements(whole, is_moe=True)) == attention + 256 * 7168 + expert
    elements = 61 * attention + 3 * 3 * 7168 * 18432 + 58 * (256 * 7168 + 9 * expert)
    elements += 129280 * 7168
    of_attention = 61 * 3 * 128 * (192 + 128) * 500**2
    assert model_flops(whole, 500, 500**2) == 6 * elements * 500 + of_attention


def test_tensor_parallelism_halves_what_it_splits():
    batch = MicroBatchSize(tokens=1024, squares=1024**2, policy_tokens=1024)
    whole = stage_work(sizes("qwen3-8b"), 0, batch, 2.5)
    half = stage_work(sizes("qwen3-8b", num_ranks=2, tensor_parallel_size=2), 0, batch, 2.5)
    assert half.forward.matrix_flops == whole.forward.matrix_flops / 2
    assert half.forward.attention_flops == whole.forward.attention_flops / 2
    assert whole.backward.matrix_flops == 2 * whole.forward.matrix_flops
    assert whole.backward.attention_flops == 2.5 * whole.forward.attention_flops
    assert whole.forward.tensor_bytes == 0 < half.forward.tensor_bytes


def test_operations_of_adapters_beside_frozen_weights():
    """Qwen3-8B with rank 16: A and B of seven layers; no gradient of a weight that is frozen."""
    layer = 4096 * 4096 + 4096 * (32 + 2 * 8) * 128 + 3 * 4096 * 12288
    adapters = 16 * (2 * (4096 + 4096) + 2 * (4096 + 1024) + 3 * (4096 + 12288))
    output = 151936 * 4096
    hf = load_preset("qwen3-8b").hf
    s = sizes_of(hf, hf["vocab_size"], TrainerConfig(), LoraConfig(rank=16))
    assert adapter_elements(s, is_moe=False) == (adapters, 0)
    batch = MicroBatchSize(tokens=1024, squares=1024**2, policy_tokens=1024)
    work = stage_work(s, 0, batch, 2.5)
    assert work.forward.matrix_flops == 2 * 1024 * (36 * (layer + adapters) + output)
    assert work.backward.matrix_flops == 2 * 1024 * (36 * (layer + 2 * adapters) + output)
    assert work.backward.weight_bytes == 2 * (36 * (layer + 5 * adapters) + output)
    attention = 36 * 3 * 32 * (128 + 128) * 1024**2
    elements = 4 * (36 * layer + output) + 6 * 36 * adapters
    assert model_flops(s, 1024, 1024**2) == elements * 1024 + attention


def test_operations_of_adapters_of_experts():
    """Qwen3-30B-A3B with rank 8: 8 of 128 experts of 768, each with adapters of its own."""
    targets = ("experts.gate_proj", "experts.up_proj", "experts.down_proj")
    hf = load_preset("qwen3-30b-a3b").hf
    s = sizes_of(hf, hf["vocab_size"], TrainerConfig(), LoraConfig(rank=8, targets=targets))
    of_expert = 8 * 3 * (2048 + 768)
    assert adapter_elements(s, is_moe=True) == (0, of_expert)
    batch = MicroBatchSize(tokens=1000, squares=1000**2, policy_tokens=1000)
    work = stage_work(s, 0, batch, 2.5)
    expert = 3 * 2048 * 768
    assert work.forward.expert_flops == 48 * 2 * 8 * 1000 * (expert + of_expert)
    assert work.backward.expert_flops == 48 * 2 * 8 * 1000 * (expert + 2 * of_expert)


def test_full_recomputation_computes_the_layers_again():
    batch = MicroBatchSize(tokens=1024, squares=1024**2, policy_tokens=1024)
    plain = stage_work(sizes("qwen3-8b"), 0, batch, 2.5)
    again = stage_work(sizes("qwen3-8b", recompute="full"), 0, batch, 2.5)
    of_output = 2 * 151936 * 4096 * 1024
    extra = again.backward.matrix_flops - plain.backward.matrix_flops
    assert extra == plain.forward.matrix_flops - of_output


def test_bytes_to_experts_of_other_ranks():
    """Qwen3-30B-A3B with EP 8: 1024 tokens to 8 experts and back, 2048 x 2 bytes, 48 layers."""
    batch = MicroBatchSize(tokens=1024, squares=1024**2, policy_tokens=1024)
    s = sizes("qwen3-30b-a3b", num_ranks=8, expert_parallel_size=8, expert_tensor_parallel_size=1)
    sent = stage_work(s, 0, batch, 2.5).forward.expert_bytes
    probabilities = 48 * 1024 * 8 * 4
    assert sent == 48 * 2 * 1024 * 8 * 2048 * 2 + probabilities
    assert all_to_all_bytes(1600, 16, 8) == (700, 800)
    assert all_to_all_bytes(800, 8, 8) == (700, 0)
    assert all_to_all_bytes(100, 1, 8) == (0, 0)


@pytest.mark.parametrize(("chunks", "expected"), [(1, 8 + 3), (2, 8 + 1.5), (4, 8 + 0.75)])
def test_a_pipelines_bubble_with_virtual_stages(chunks, expected):
    """Eight micro-batches, four stages of a second each: (m + (PP - 1) / VPP) seconds."""
    assert pipeline_seconds([1.0] * 4, 8, chunks) == expected
    assert pipeline_seconds([1.0, 2.0, 1.0], 10, 1) == 22


def test_bytes_of_a_decoding_step():
    """Qwen3-8B with TP 2: weights once, of 8 key-value heads 4 on a rank."""
    s = sizes("qwen3-8b", num_ranks=2, tensor_parallel_size=2)
    layer = 4096 * 4096 + 4096 * (32 + 2 * 8) * 128 + 3 * 4096 * 12288
    found = decode_amounts(s, 10, 1000)
    assert found.weight_bytes == 2 * (36 * layer + 151936 * 4096) / 2
    assert found.cache_bytes == 10 * 1000 * 36 * 2 * 4 * 128 * 2
    latent = sizes("deepseek-v3", num_ranks=8, tensor_parallel_size=8)
    assert cache_bytes_per_token(latent) == 61 * (512 + 64) * 2  # whole on every rank
    repeated = sizes("qwen3-30b-a3b", num_ranks=8, tensor_parallel_size=8)
    assert cache_bytes_per_token(repeated) == 48 * 2 * 128 * 2  # four heads on eight ranks


def test_experts_that_a_batch_meets():
    assert experts_met(128, 8, 1) == pytest.approx(8)
    assert experts_met(4, 2, 2) == pytest.approx(3)
    assert experts_met(128, 8, 10_000) == pytest.approx(128)


def test_the_busiest_expert_rank():
    s = sizes("qwen3-30b-a3b", num_ranks=8, expert_parallel_size=8, expert_tensor_parallel_size=1)
    assert expert_imbalance(s, 0.5) == pytest.approx(1 + 0.5 / 4 * 2.0393, rel=1e-4)
    assert expert_imbalance(sizes("qwen3-30b-a3b"), 0.5) == 1


@given(mean=st.floats(10, 4000), sigma=st.floats(0.05, 1.5))
def test_log_normal_lengths_have_their_mean_and_are_cut(mean, sigma):
    found = log_normal(100, mean, 4096, sigma, "test")
    assert found.answer == pytest.approx(mean, rel=1e-6)
    assert found.answers[-1] <= found.longest_of(512) <= 4096
    assert list(found.answers) == sorted(found.answers)


@given(st.lists(st.integers(1, 100), min_size=1, max_size=60), st.integers(100, 400))
def test_micro_batches_hold_all_samples(lengths, capacity):
    found = num_microbatches(lengths, capacity)
    assert sum(lengths) <= found * capacity
    assert found <= len(lengths)


def _trainer_s(num_ranks: int, answer: float = 1000.0, **layout) -> float:
    load = TrainerLoad(256, 1, fixed(answer, "test"), 8192, 8192, 1)
    work = trainer_work(sizes("qwen3-8b", num_ranks=num_ranks, **layout), load, 2.5)
    found = trainer_seconds(work, MACHINE)
    return found.logprobs_s + found.forward_backward_s


@given(st.sampled_from([1, 2, 4, 8, 16, 32]))
def test_more_data_parallel_ranks_are_never_slower(num_ranks):
    assert _trainer_s(2 * num_ranks) <= _trainer_s(num_ranks)


@given(answer=st.integers(100, 3000), more=st.integers(1, 3000))
def test_longer_answers_are_never_faster(answer, more):
    def seconds(tokens: int) -> float:
        load = EngineLoad(64, 4, log_normal(100, tokens, 8192, 0.7, "test"), capacity=48)
        return generation_seconds(sizes("qwen3-8b"), load, MACHINE)

    assert seconds(answer + more) >= seconds(answer)
    assert _trainer_s(8, answer + more) >= _trainer_s(8, answer) * 0.999


def test_context_parallelism_splits_a_long_micro_batch():
    batch = MicroBatchSize(tokens=32768, squares=32768**2, policy_tokens=32768)
    whole = stage_work(sizes("qwen3-8b"), 0, batch, 2.5)
    s = sizes("qwen3-8b", num_ranks=4, context_parallel_size=4)
    part = stage_work(s, 0, batch, 2.5)
    assert part.forward.attention_flops == whole.forward.attention_flops / 4
    assert part.forward.matrix_flops == whole.forward.matrix_flops / 4
    assert part.forward.context_bytes > 0


def test_lengths_of_a_file(tmp_path):
    file = tmp_path / "lengths.txt"
    file.write_text("10 100\n30 300\n\n20, 5000\n")
    found = read_lengths(file, 1.0, 1000, 30)
    assert (found.prompt, found.answers) == (20, (100, 300, 1000))
    assert found.source == f"{file}; 1 of 3 answers cut at 1000"
    found = read_lengths(file, 1.0, 5000, 29)
    assert (found.prompt, found.answers) == (15, (100, 5000))
    assert found.source == f"{file}; 1 of 3 left out: prompts above 29"
    assert read_lengths(file, 1.0, 5000, 30).source == str(file)
    with pytest.raises(ConfigError, match="all prompts are longer than 9 tokens"):
        read_lengths(file, 1.0, 1000, 9)
    with pytest.raises(ConfigError, match="has the tokens of prompts, and 7 are given"):
        read_lengths(file, 1.0, 1000, 30, given_prompt=7)
    for text, where in (("", "lengths.txt"), ("100\nten\n", "lengths.txt:2"), ("1 2 3", ":1")):
        file.write_text(text)
        with pytest.raises(ConfigError) as caught:
            read_lengths(file, 1.0, 1000, 30)
        assert where in str(caught.value.where)
    with pytest.raises(ConfigError):
        read_lengths(tmp_path / "missing", 1.0, 1000, 30)
    file.write_text("100\n")
    assert read_lengths(file, 1.0, 1000, 30).prompt == 1
    assert read_lengths(file, 1.0, 1000, 30, given_prompt=7).prompt == 7
