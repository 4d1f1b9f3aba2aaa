"""Each run-time fix of vLLM: the defect is there without it, and gone with it.

A failing `test_upstream_…` means that this vLLM no longer needs the fix: remove its module.
"""

from __future__ import annotations

import importlib.metadata
import inspect
import itertools
import math
import os
from types import SimpleNamespace

import pytest
import torch

from grpo_megatron.errors import MismatchError, SetupError
from grpo_megatron.plan.engine_rules import is_cpu_engine
from grpo_megatron.rollout.plugin import (
    adapter_slot,
    cpu_adapters,
    cpu_eager_layers,
    cpu_fork_start,
    cpu_fp8_blocks,
    cpu_latent_attention,
    cpu_latent_norm,
    cpu_moe_beside_adapters,
    cpu_moe_update,
    cpu_rotary_embedding,
    cpu_routed_experts,
    engine_orphans,
    require_supported_vllm,
    whole_sequences,
)
from grpo_megatron.weights.fp8_blocks import dequantise, quantise
from grpo_megatron.weights.tensor_entry import TensorEntry

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(not is_cpu_engine(), reason="fixes of vLLM's CPU build"),
]


def test_other_versions_are_refused(monkeypatch):
    require_supported_vllm()
    monkeypatch.setattr("vllm.version.__version__", "0.33.0")
    with pytest.raises(SetupError, match=r"0.33.0 was not tested.*(\n.*)*0.32.x"):
        require_supported_vllm()


def test_upstream_vllm_serve_looks_for_another_distribution():
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        importlib.metadata.version("vllm")


def _num_prepacks(updates: int) -> int:
    """How often the CPU experts prepack during a first load and `updates` more."""
    from vllm.model_executor.layers.fused_moe import unquantized_fused_moe_method as module
    from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend

    calls = []
    experts = SimpleNamespace(process_weights_after_loading=calls.append)

    class Method(module.UnquantizedFusedMoEMethod):
        def __init__(self):
            self.moe_kernel, self.unquantized_backend = None, UnquantizedMoeBackend.CPU

        def _init_moe_kernel(self, layer):
            self.moe_kernel = SimpleNamespace(fused_experts=experts)

    layer = torch.nn.Module()
    layer.moe_config = None
    layer.w13_weight = torch.nn.Parameter(torch.zeros(2, 4, 4), requires_grad=False)
    layer.w2_weight = torch.nn.Parameter(torch.zeros(2, 4, 4), requires_grad=False)
    method = Method()
    for _ in range(1 + updates):
        method._setup_kernel(layer, layer.w13_weight, layer.w2_weight)
    return len(calls)


@pytest.fixture
def restore(monkeypatch):
    """Undo what an `apply` changes on `owner.name`."""

    def remember(owner, *names):
        for name in names:
            monkeypatch.setattr(owner, name, owner.__dict__[name])

    return remember


def test_upstream_update_of_cpu_experts_is_not_prepacked(restore):
    from vllm.model_executor.layers.fused_moe import unquantized_fused_moe_method as module

    restore(module.UnquantizedFusedMoEMethod, "_setup_kernel")
    assert _num_prepacks(updates=2) == 1
    cpu_moe_update.apply()
    assert _num_prepacks(updates=2) == 3


def test_upstream_routes_are_refused_on_a_cpu(restore):
    from vllm.config import VllmConfig
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    restore(VllmConfig, "_verify_aux_output_compatibility", "use_v2_model_runner")
    restore(CPUModelRunner, "initialize_kv_cache")
    for name in ("execute_model", "sample_tokens"):
        assert name not in CPUModelRunner.__dict__  # inherited: removed again below
    config = VllmConfig.__new__(VllmConfig)
    for name, value in {
        "aux_output_config": SimpleNamespace(enabled=True),
        "attention_config": SimpleNamespace(hisparse_config=None),
        "model_config": SimpleNamespace(runner_type="generate", is_moe=False),
    }.items():
        object.__setattr__(config, name, value)
    with pytest.raises(ValueError, match="requires Model Runner V2"):
        config._verify_aux_output_compatibility()
    try:
        cpu_routed_experts.apply()
        with pytest.raises(ValueError, match="only supports MoE"):  # other checks still work
            config._verify_aux_output_compatibility()
    finally:
        del CPUModelRunner.execute_model, CPUModelRunner.sample_tokens


def test_upstream_engine_core_does_not_watch_its_parent(restore):
    from vllm.v1.engine.core import EngineCoreProc

    restore(EngineCoreProc, "run_engine_core")
    names = EngineCoreProc.run_engine_core.__code__.co_names
    assert not {"prctl", "set_death_signal", "PR_SET_PDEATHSIG"} & set(names)
    engine_orphans.apply()
    assert EngineCoreProc.run_engine_core.__qualname__ == "EngineCoreProc.run_engine_core"


def test_upstream_cpu_platform_spawns(restore, monkeypatch):
    from vllm.platforms.cpu import CpuPlatform

    restore(CpuPlatform, "check_and_update_config")
    assert "spawn" in CpuPlatform.check_and_update_config.__func__.__code__.co_consts
    monkeypatch.setattr(
        CpuPlatform,
        "check_and_update_config",
        classmethod(lambda cls, config: os.environ.update(VLLM_WORKER_MULTIPROC_METHOD="spawn")),
    )
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    cpu_fork_start.apply()
    CpuPlatform.check_and_update_config(None)
    assert os.environ["VLLM_WORKER_MULTIPROC_METHOD"] == "fork"


@pytest.fixture
def vllm_config():
    """Layers choose their CPU kernels, as in an eager engine."""
    from vllm.config import CompilationConfig, VllmConfig, set_current_vllm_config
    from vllm.platforms import current_platform

    current_platform.import_kernels()
    config = VllmConfig(compilation_config=CompilationConfig(custom_ops=["all"]))
    with set_current_vllm_config(config):
        yield config


def _rotation_error() -> float:
    """Of slices with a dimension for heads, as latent attention hands them over."""
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    rotary = RotaryEmbedding(8, 8, 64, 10000.0, is_neox_style=False, dtype=torch.float32)
    positions = torch.arange(6)
    query, key = torch.randn(6, 4, 20)[..., 12:], torch.randn(6, 24)[:, 16:].unsqueeze(1)
    expected = rotary.forward_native(positions, query.contiguous(), key.contiguous())
    found = rotary.forward_cpu(positions, query, key)
    return max(float((a - b).abs().max()) for a, b in zip(found, expected, strict=True))


def test_upstream_heads_of_latent_attention_are_not_rotated(restore, vllm_config):
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    restore(RotaryEmbedding, "forward_cpu")
    assert _rotation_error() > 0.1
    cpu_rotary_embedding.apply()
    assert _rotation_error() < 1e-6


def test_upstream_latent_sizes_are_refused(restore):
    from vllm.model_executor.layers.attention.mla_attention import MLACommonBackend
    from vllm.v1.attention.backends.mla.cpu_mla import CPUMLAImpl

    restore(MLACommonBackend, "get_supported_head_sizes")
    restore(CPUMLAImpl, "forward_mqa")
    assert not MLACommonBackend.supports_head_size(24)
    cpu_latent_attention._allow_other_sizes()
    assert MLACommonBackend.supports_head_size(24) and MLACommonBackend.supports_head_size(576)


def test_upstream_prefix_caching_is_off_with_latent_attention(restore, monkeypatch):
    from vllm.platforms.cpu import CpuPlatform

    restore(CpuPlatform, "check_and_update_config")
    assert "forcing chunked" in " ".join(
        text
        for text in CpuPlatform.check_and_update_config.__func__.__code__.co_consts
        if isinstance(text, str)
    )

    def switches_off(cls, config) -> None:
        config.cache_config.enable_prefix_caching = False

    monkeypatch.setattr(CpuPlatform, "check_and_update_config", classmethod(switches_off))
    cpu_latent_attention._keep_prefix_caching()
    for wanted in (True, False):
        config = SimpleNamespace(cache_config=SimpleNamespace(enable_prefix_caching=wanted))
        CpuPlatform.check_and_update_config(config)
        assert config.cache_config.enable_prefix_caching is wanted


def test_decoding_from_latent_vectors(vllm_config):
    """The size that vLLM's kernel knows: the same, over several blocks in any order."""
    from vllm import _custom_ops as ops

    torch.manual_seed(0)
    queries, cache = torch.randn(3, 4, 576), torch.randn(8, 16, 576)
    block_table = torch.tensor([[5, 0, 2], [1, 7, 0], [3, 0, 0]], dtype=torch.int32)
    lengths = torch.tensor([40, 17, 1], dtype=torch.int32)
    expected = torch.zeros(3, 4, 512)
    ops.mla_decode_kvcache_cpu(expected, queries, cache, 0.05, block_table, lengths)
    found = cpu_latent_attention.decode_latent(queries, cache, block_table, lengths, 512, 0.05)
    assert float((found - expected).abs().max()) < 1e-5


def test_upstream_latent_norms_take_the_epsilon_of_the_configuration(restore, monkeypatch):
    from vllm.model_executor.models import deepseek_v2

    def init(self):
        self.q_lora_rank = 8
        self.q_a_layernorm = SimpleNamespace(variance_epsilon=1e-5)
        self.kv_a_layernorm = SimpleNamespace(variance_epsilon=1e-5)

    for cls in (deepseek_v2.DeepseekV2MLAAttention, deepseek_v2.DeepseekV2Attention):
        assert "rms_norm_eps" in cls.__init__.__code__.co_names
        monkeypatch.setattr(cls, "__init__", init)
    cpu_latent_norm.apply()
    for cls in (deepseek_v2.DeepseekV2MLAAttention, deepseek_v2.DeepseekV2Attention):
        layer = cls()
        assert layer.q_a_layernorm.variance_epsilon == 1e-6
        assert layer.kv_a_layernorm.variance_epsilon == 1e-6


@pytest.mark.parametrize("in_parts", [True, False])
def test_layers_pass_whole_sequences_on(monkeypatch, in_parts):
    from vllm.model_executor.models import deepseek_v2

    layer_class = deepseek_v2.DeepseekV2DecoderLayer
    upstream = inspect.getsource(layer_class.forward)
    assert "hidden_states.shape[0] != full_num_tokens" in upstream  # of one token: 1 != 1

    def init(self):
        self.use_sequence_parallel_moe = in_parts
        self.self_attn = SimpleNamespace(o_proj=SimpleNamespace(reduce_results=not in_parts))

    assert "use_sequence_parallel_moe" in layer_class.__init__.__code__.co_names
    monkeypatch.setattr(layer_class, "__init__", init)
    whole_sequences.apply()
    layer = layer_class()
    assert not layer.use_sequence_parallel_moe
    assert layer.self_attn.o_proj.reduce_results


def test_norms_of_sizes_that_the_kernel_does_not_take(monkeypatch, vllm_config):
    from vllm.model_executor.layers.layernorm import RMSNorm

    monkeypatch.setattr(RMSNorm, "forward_cpu", RMSNorm.forward_cpu)  # inherited: removed again
    cpu_eager_layers._norm_by_kernel()
    for size in (16, 20, 13):
        norm, x = RMSNorm(size), torch.randn(5, size)
        expected = torch.nn.functional.rms_norm(x, (size,), norm.weight, norm.variance_epsilon)
        assert float((norm.forward_cpu(x) - expected).detach().abs().max()) < 1e-6


def _backend_with_adapters() -> str:
    """Which backend computes experts where LoRA is on."""
    from vllm.model_executor.layers.fused_moe import unquantized_fused_moe_method as module

    chosen = []

    def choose(config: SimpleNamespace) -> str:
        chosen.append(config.is_lora_enabled)
        return "triton" if config.is_lora_enabled else "cpu"

    original = module.select_unquantized_moe_backend
    module.select_unquantized_moe_backend = choose
    try:
        cpu_moe_beside_adapters.apply()
        return module.select_unquantized_moe_backend(SimpleNamespace(is_lora_enabled=True))
    finally:
        module.select_unquantized_moe_backend = original


def test_upstream_experts_are_tritons_where_lora_is_on():
    from vllm.model_executor.layers.fused_moe.oracle import unquantized

    source = inspect.getsource(unquantized.select_unquantized_moe_backend)
    assert "if moe_config.is_lora_enabled:" in source
    assert "UnquantizedMoeBackend.TRITON" in source


def test_experts_keep_their_kernel_where_lora_is_on():
    assert _backend_with_adapters() == "cpu"


def _added(
    of_tokens: tuple[int, ...], num_slots: int = 1, spoilt_slot: int | None = None
) -> torch.Tensor:
    """What a layer of two slices adds for tokens with the adapters 1, 2, ... and without (0)."""
    from vllm.lora.layers import LoRAMapping
    from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

    wrapper = PunicaWrapperCPU(16, 8, "cpu")
    slots = list(range(1, num_slots + 1))
    mapping = LoRAMapping(of_tokens, of_tokens, is_prefill=True)
    wrapper.update_metadata(mapping, slots, num_slots + 1, 64)
    torch.manual_seed(0)
    states, added = torch.randn(5, 12), torch.zeros(5, 10)
    a = tuple(torch.randn(num_slots, 1, 4, 12) for _ in range(2))
    b = tuple(torch.randn(num_slots, 1, rows, 4) for rows in (6, 4))
    if spoilt_slot is not None:
        for factor in (*a, *b):
            factor[spoilt_slot] = math.nan
    wrapper.add_lora_linear(added, states, a, b, 1.0, (6, 4))
    return added


def test_upstream_a_token_without_an_adapter_gets_that_of_others():
    assert (_added((1, 1, 0, 0, 1)) != 0).all()
    assert (_added((0, 0, 0, 0, 0)) == 0).all()
    mixed = _added((1, 3, 0, 0, 2), num_slots=3)
    torch.testing.assert_close(mixed[2:4], _added((3,) * 5, num_slots=3)[2:4])


@pytest.mark.parametrize("num_slots", [1, 3])
def test_every_token_gets_its_adapter_or_none(monkeypatch, num_slots):
    from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

    expected = {0: torch.zeros(5, 10)}
    for slot in range(1, num_slots + 1):
        expected[slot] = _added((slot,) * 5, num_slots)
    monkeypatch.setattr(PunicaWrapperCPU, "add_lora_linear", PunicaWrapperCPU.add_lora_linear)
    cpu_adapters.apply()
    for of_tokens in ((1,) * 5, (0,) * 5, (num_slots, 1, 0, 0, min(2, num_slots))):
        found = _added(of_tokens, num_slots)
        for token, slot in enumerate(of_tokens):
            torch.testing.assert_close(found[token], expected[slot][token])


def test_an_adapter_that_is_not_finite_spoils_its_own_tokens_alone(monkeypatch):
    from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

    monkeypatch.setattr(PunicaWrapperCPU, "add_lora_linear", PunicaWrapperCPU.add_lora_linear)
    cpu_adapters.apply()
    found = _added((1, 2, 0, 1, 2), num_slots=2, spoilt_slot=0)
    assert found[[0, 3]].isnan().any(1).all()
    assert not found[[1, 2, 4]].isnan().any()


def test_upstream_takes_no_float32_beside_fp8(restore):
    from vllm.model_executor.layers.quantization.fp8 import Fp8Config

    restore(Fp8Config, "get_supported_act_dtypes")
    assert torch.float32 not in Fp8Config.get_supported_act_dtypes()
    cpu_fp8_blocks._allow_float32()
    assert torch.float32 in Fp8Config.get_supported_act_dtypes()


@pytest.mark.skipif(
    torch.cpu._is_amx_tile_supported(), reason="this processor has AMX, for which vLLM has kernels"
)
def test_upstream_kernels_for_blocks_of_fp8_need_amx():
    from vllm.model_executor.kernels import linear
    from vllm.model_executor.layers.fused_moe.experts import cpu_moe
    from vllm.platforms import PlatformEnum

    for kernel in linear._POSSIBLE_FP8_BLOCK_KERNELS[PlatformEnum.CPU]:
        is_supported, reason = kernel.is_supported()
        assert not is_supported and "requires AMX" in reason
    assert not cpu_moe.CPUExpertsFp8._supports_current_device()


def test_blocks_of_fp8_are_multiplied_on_every_processor(monkeypatch, restore):
    """Matrices and experts, of which this worker has every second one."""
    from vllm.model_executor.kernels import linear
    from vllm.model_executor.layers.fused_moe.experts import cpu_moe
    from vllm.platforms import PlatformEnum

    kernels = linear._POSSIBLE_FP8_BLOCK_KERNELS
    there = {**kernels, PlatformEnum.CPU: list(kernels[PlatformEnum.CPU])}
    monkeypatch.setattr(linear, "_POSSIBLE_FP8_BLOCK_KERNELS", there)
    restore(cpu_moe, "CPUExpertsFp8", "prepare_fp8_moe_layer_for_cpu")
    cpu_fp8_blocks._add_linear_kernel()
    cpu_fp8_blocks._replace_experts()
    kernel = there[PlatformEnum.CPU][0]
    assert kernel.is_supported() == (True, None)
    tokens, weight = torch.randn(5, 130), torch.randn(200, 130)
    numbers, scales = quantise(weight)
    found = kernel.apply_block_scaled_mm(None, tokens, numbers, tokens.new_empty(1), scales)
    torch.testing.assert_close(found, tokens @ dequantise(numbers, scales, torch.float32).T)

    gate_up, down = torch.randn(2, 256, 130), torch.randn(2, 130, 128)
    w1, w1_scale = (torch.stack(parts) for parts in zip(*map(quantise, gate_up), strict=True))
    w2, w2_scale = (torch.stack(parts) for parts in zip(*map(quantise, down), strict=True))
    experts = SimpleNamespace(w1_scale=w1_scale, w2_scale=w2_scale)
    ids = torch.tensor([[0, 1], [2, 0], [3, 2], [1, 3], [2, 3]], dtype=torch.int32)
    shares = torch.rand(5, 2)
    here = torch.tensor([0, -1, 1, -1])
    output = torch.full((5, 130), torch.nan)
    arguments = (output, tokens, w1, w2, shares, ids, None, 4, here)
    further = (None, None, None, None, None)  # scales of inputs, work space, what experts meet
    cpu_moe.CPUExpertsFp8.apply(experts, *arguments, *further, False)
    with pytest.raises(NotImplementedError):
        cpu_moe.CPUExpertsFp8.apply(experts, *arguments, *further, True)
    expected = torch.zeros(5, 130)
    for token, place in itertools.product(range(5), range(2)):
        expert = int(here[ids[token, place]])
        if expert < 0:
            continue
        both = tokens[token] @ dequantise(w1[expert], w1_scale[expert], torch.float32).T
        activated = torch.nn.functional.silu(both[:128]) * both[128:]
        of_expert = activated @ dequantise(w2[expert], w2_scale[expert], torch.float32).T
        expected[token] += shares[token, place] * of_expert
    torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_trainer_rounds_to_fp8_as_vllm_does(dtype):
    from vllm.utils.deep_gemm import per_block_cast_to_fp8

    weight = (torch.randn(300, 260) * torch.logspace(-4, 2, 260)).to(dtype)
    weight[:128, :128] = 0
    numbers, scales = quantise(weight)
    expected, expected_scales = per_block_cast_to_fp8(weight, [128, 128])
    assert torch.equal(numbers.view(torch.uint8), expected.view(torch.uint8))
    assert torch.equal(scales, expected_scales)


class WithSlots(torch.nn.Module):
    """An engine's model, of a server that was started with these adapters; it has no layers."""

    def __init__(self, numbers):
        super().__init__()
        config = SimpleNamespace(max_lora_rank=8)
        self.lora_manager = SimpleNamespace(modules={}, packed_modules={}, lora_config=config)
        self.adapter_numbers = dict(numbers)


def refused(numbers, name: str) -> str:
    entry = TensorEntry(name, "float32", (2, 3))
    return adapter_slot.refusals(WithSlots(numbers), [entry])[name]


QUERY_A = "model.layers.0.self_attn.q_proj.lora_A.weight"


@pytest.mark.parametrize(
    ("numbers", "name", "told"),
    [
        ({"": 1}, f"math/{QUERY_A}", "one adapter for all domains"),
        ({"math": 1, "code": 2}, QUERY_A, "an adapter for each of the domains 'code', 'math'"),
        ({"math": 1, "code": 2}, f"law/{QUERY_A}", "'code', 'math', and not for 'law'"),
        ({"math": 1, "code": 2}, f"math/{QUERY_A}", "no layer of that name"),
    ],
)
def test_an_adapter_without_a_slot_is_refused(numbers, name, told):
    assert told in refused(numbers, name)


def test_an_engine_without_slots_takes_no_adapter():
    entry = TensorEntry(QUERY_A, "float32", (2, 3))
    assert "without adapters" in adapter_slot.refusals(torch.nn.Module(), [entry])[QUERY_A]


def test_every_slot_gets_an_adapter(monkeypatch):
    monkeypatch.setattr(adapter_slot, "refusals", lambda model, tensors: {})
    model = WithSlots({"math": 1, "code": 2})
    of_math = {f"math/{QUERY_A}": torch.zeros(2, 3)}
    with pytest.raises(MismatchError, match="no tensor came of the adapter of domain 'code'"):
        adapter_slot.take(model, of_math, 2, 1.0)
    adapter_slot.take(model, of_math | {f"code/{QUERY_A}": torch.ones(2, 3)}, 2, 1.0)
    assert model.published_adapters["code"].tensors[QUERY_A].sum() == 6
    adapter_slot.forget(model)
    assert "published_adapters" not in model.__dict__


def test_keys_and_values_of_one_adapter_are_not_those_of_another():
    """vLLM keeps blocks by tokens and the adapter's name and path."""
    from vllm.lora.request import LoRARequest
    from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys

    found = set()
    for number, domain in enumerate(("math", "code"), start=1):
        lora = LoRARequest(f"policy.{domain}", number, adapter_slot.path_of(domain))
        request = SimpleNamespace(
            lora_request=lora, mm_features=[], cache_salt=None, prompt_embeds=None
        )
        keys, _ = generate_block_hash_extra_keys(request, 0, 32, 0)
        found.add(keys)
    assert len(found) == 2 and None not in found
