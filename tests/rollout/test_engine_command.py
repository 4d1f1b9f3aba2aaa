"""The command line and environment of a server."""

from __future__ import annotations

import argparse
import json
import sys
from types import SimpleNamespace

import pytest

from grpo_megatron.config.lora import LoraConfig
from grpo_megatron.config.presets import load_preset
from grpo_megatron.network import Endpoint
from grpo_megatron.plan.devices import DEFAULT_DEVICE, device_bytes
from grpo_megatron.plan.resolve import resolve
from grpo_megatron.rollout import replica
from grpo_megatron.rollout.gpu_memory import gpu_bytes
from grpo_megatron.rollout.plugin import engine_token
from grpo_megatron.rollout.seeds import derive_seed
from tests.e2e.family_models import settings_of
from tests.rollout.engines import make_config

TOKEN = "secret-of-the-server"


def command(monkeypatch, on_cpu: bool, index: int = 0, host: str = "127.0.0.1", **rollout):
    monkeypatch.setattr(replica, "is_cpu_engine", lambda: on_cpu)
    return replica.serve_command(make_config(**rollout), "/model", index, 8000, host, token=TOKEN)


@pytest.mark.parametrize("on_cpu", [True, False])
def test_what_every_server_needs(monkeypatch, on_cpu):
    argv, environment = command(monkeypatch, on_cpu)
    text = " ".join(argv)
    for part in (
        "--model /model",
        "--host 127.0.0.1",
        "--port 8000",
        "--enable-scale-out",
        "--enable-prompt-tokens-details",
        "--logprobs-mode processed_logprobs",
        "--dtype float32",
    ):
        assert part in text
    assert "--enable-return-routed-experts" not in text
    assert environment["VLLM_SERVER_DEV_MODE"] == "1"
    assert environment["VLLM_ALLOW_INSECURE_SERIALIZATION"] == "0"
    assert argv[argv.index("--middleware") + 1] == engine_token.MIDDLEWARE
    assert environment[engine_token.VARIABLE] == TOKEN and TOKEN not in text
    assert environment["VLLM_API_KEY"] == ""


def test_a_server_that_scores_text_is_vllms_own(monkeypatch):
    """With a tokenizer, and log-probs at temperature 1."""
    monkeypatch.setattr(replica, "is_cpu_engine", lambda: True)
    rollout = make_config(max_model_len=128).rollout
    argv, environment = replica.scoring_command(rollout, "/teacher", 8001, 16)
    text = " ".join(argv)
    assert argv[2] == "vllm.entrypoints.openai.api_server"
    for part in ("--model /teacher", "--port 8001", "--max-model-len 128", "--max-logprobs 16"):
        assert part in text
    for part in ("--skip-tokenizer-init", "processed_logprobs", "--weight-transfer-config"):
        assert part not in text
    assert "VLLM_SERVER_DEV_MODE" not in environment
    assert environment["OMP_NUM_THREADS"] == "1"


def test_routes_and_own_arguments(monkeypatch):
    argv, _ = command(
        monkeypatch, False, record_routes=True, engine_arguments=("--gpu-memory-utilization", "0.5")
    )
    assert "--enable-return-routed-experts" in argv and argv[-1] == "0.5"


def colocated_command(monkeypatch, *overrides: str) -> list[str]:
    """A server that shares one H200 with the trainer."""
    monkeypatch.setattr(replica, "is_cpu_engine", lambda: False)
    monkeypatch.setattr(replica, "gpu_bytes", lambda: 140 << 30)
    config = resolve("single_gpu/qwen2.5-1.5b", overrides).config
    argv, _ = replica.serve_command(config, "/model", 0, 8000, token=TOKEN)
    return argv


def test_an_engine_beside_the_trainer_does_not_measure_what_is_free(monkeypatch):
    argv = colocated_command(monkeypatch)
    assert "--enable-sleep-mode" in argv
    cache = int(argv[argv.index("--kv-cache-memory-bytes") + 1])
    share = 0.35 * (140 << 30)
    weights = 2 * 1_543_714_304
    assert cache == pytest.approx(share - weights - (3 << 30), rel=0.01)


@pytest.mark.parametrize(
    ("arguments", "given"),
    [
        (["--gpu-memory-utilization", "0.35", "--kv-cache-memory-bytes", "1073741824"], 1),
        (["--gpu-memory-utilization", "0.01"], 0),  # vLLM says what is missing
    ],
)
def test_a_cache_that_is_given_or_has_no_room_is_left_alone(monkeypatch, arguments, given):
    argv = colocated_command(monkeypatch, f"rollout.engine_arguments={json.dumps(arguments)}")
    assert argv.count("--kv-cache-memory-bytes") == given


class _Driver(SimpleNamespace):
    """pynvml, of a machine with one GPU or with a driver that is not loaded."""

    class NVMLError(Exception):
        pass

    def __init__(self, total: int | None):
        self.total = total

    def nvmlInit(self) -> None:
        if self.total is None:
            raise self.NVMLError

    def nvmlShutdown(self) -> None: ...

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> SimpleNamespace:
        return SimpleNamespace(total=self.total)


@pytest.mark.parametrize(
    ("driver", "total"),
    [
        (None, device_bytes(DEFAULT_DEVICE)),
        (_Driver(None), device_bytes(DEFAULT_DEVICE)),
        (_Driver(141 << 30), 141 << 30),
    ],
)
def test_memory_of_a_gpu_that_cannot_be_asked_is_what_plan_assumes(monkeypatch, driver, total):
    monkeypatch.setitem(sys.modules, "pynvml", driver)
    assert gpu_bytes() == total


@pytest.mark.parametrize(
    ("rollout", "reported"),
    [({}, "1"), ({"top_k": 20}, "33"), ({"top_k": 20, "top_p": 0.9}, "33"), ({"min_p": 0.1}, "-1")],
)
def test_truncation_needs_log_probs(monkeypatch, rollout, reported):
    argv, _ = command(monkeypatch, True, **rollout)
    assert argv[argv.index("--max-logprobs") + 1] == reported


def test_cpu_only_where_it_must_differ(monkeypatch):
    argv, environment = command(monkeypatch, True, deterministic=True, num_threads=3)
    assert "--enforce-eager" in argv and "--no-enable-chunked-prefill" in argv
    assert environment["OMP_NUM_THREADS"] == "3"
    argv, environment = command(monkeypatch, False, deterministic=True)
    assert "--enforce-eager" not in argv and "OMP_NUM_THREADS" not in environment
    assert environment["VLLM_BATCH_INVARIANT"] == "1"


def test_only_one_worker_may_run_inside_the_engine_core(monkeypatch):
    argv, environment = command(monkeypatch, True)
    assert "--distributed-executor-backend" in argv
    assert environment["GRPO_MEGATRON_FORK_ENGINE"] == "1"
    argv, environment = command(monkeypatch, True, tensor_parallel_size=2)
    assert "--distributed-executor-backend" not in argv
    assert "GRPO_MEGATRON_FORK_ENGINE" not in environment


def test_data_parallel_engines_with_whole_experts(monkeypatch):
    argv, environment = command(monkeypatch, True, data_parallel_size=4, expert_parallel=True)
    assert argv[argv.index("--data-parallel-size") + 1] == "4"
    assert "--enable-expert-parallel" in argv
    assert environment["GRPO_MEGATRON_FORK_ENGINE"] == "1"  # each engine is one process
    argv, _ = command(monkeypatch, True)
    assert "--data-parallel-size" not in argv
    assert "--enable-expert-parallel" not in argv


@pytest.mark.parametrize(("node", "further"), [(0, []), (2, ["4", "--headless"])])
def test_engines_of_a_server_are_shared_by_nodes(node, further):
    rollout = make_config(data_parallel_size=8, tensor_parallel_size=4).rollout
    arguments = replica.multi_node_arguments(rollout, 4, node, Endpoint("10.0.0.1", 29500))
    assert arguments[:6] == [
        "--data-parallel-size-local",
        "2",
        "--data-parallel-address",
        "10.0.0.1",
        "--data-parallel-rpc-port",
        "29500",
    ]
    assert arguments[7:] == further


def test_replicas_have_different_random_numbers(monkeypatch):
    seeds = []
    for index in range(3):
        argv, _ = command(monkeypatch, True, index)
        seeds.append(argv[argv.index("--seed") + 1])
    assert len(set(seeds)) == 3


def test_loopback_servers_use_no_other_interface(monkeypatch):
    assert command(monkeypatch, True)[1]["GLOO_SOCKET_IFNAME"] == "lo"
    assert "GLOO_SOCKET_IFNAME" not in command(monkeypatch, True, host="10.0.0.7")[1]


def test_cores_are_shared(monkeypatch):
    monkeypatch.setattr(replica.os, "sched_getaffinity", lambda _: set(range(16)))
    assert replica.num_threads(make_config(num_threads=None)) == 15
    assert replica.num_threads(make_config(num_threads=None, num_replicas=2)) == 7
    assert (
        replica.num_threads(make_config(num_threads=None, num_replicas=2, tensor_parallel_size=2))
        == 3
    )
    assert (
        replica.num_threads(make_config(num_threads=None, data_parallel_size=2, num_replicas=2))
        == 3
    )
    assert replica.num_threads(make_config(num_threads=None, num_replicas=32)) == 1


def test_seeds_depend_on_every_part():
    parts = [
        (s, t, p, g) for s in (0, 1) for t in (0, 1, 10) for p in ("a", "1", "10") for g in (0, 1)
    ]
    seeds = {derive_seed(*p) for p in parts}
    assert len(seeds) == len(parts) and all(0 <= s < 2**31 for s in seeds)
    assert derive_seed(1, "1") != derive_seed("1", 1)
    assert derive_seed(7, 3, "add-17", 2) == GOLDEN_SEED


GOLDEN_SEED = 1674585042  # runs resume across versions of this package


def test_a_checkpoint_of_latent_attention(monkeypatch, tmp_path):
    """Its config.json is completed, and its attention does not depend on what the CPU can do."""
    (tmp_path / "config.json").write_text(json.dumps(settings_of("moonlight")))
    monkeypatch.setattr(replica, "is_cpu_engine", lambda: True)
    argv, _ = replica.serve_command(make_config(), str(tmp_path), 0, 8000, token=TOKEN)
    overrides = json.loads(argv[argv.index("--hf-overrides") + 1])
    assert overrides["topk_method"] == "noaux_tc"
    assert argv[argv.index("--attention-backend") + 1] == "CPU_MLA"
    monkeypatch.setattr(replica, "is_cpu_engine", lambda: False)
    argv, _ = replica.serve_command(make_config(), str(tmp_path), 0, 8000, token=TOKEN)
    assert "--attention-backend" not in argv and "--hf-overrides" in argv


def test_plugins_of_the_user_are_kept(monkeypatch):
    monkeypatch.setenv("VLLM_PLUGINS", "mine,grpo_megatron,yours")
    _, environment = command(monkeypatch, True)
    assert environment["VLLM_PLUGINS"] == "grpo_megatron,mine,yours"
    monkeypatch.delenv("VLLM_PLUGINS")
    _, environment = command(monkeypatch, True)
    assert environment["VLLM_PLUGINS"] == "grpo_megatron"


def test_a_server_with_slots_for_the_policys_adapter(monkeypatch, tmp_path):
    """Slots of the next rank that vLLM has, beside the layers that have targets."""
    monkeypatch.setattr(replica, "is_cpu_engine", lambda: True)
    hf = load_preset("tiny-qwen3-moe").hf | {"vocab_size": 256}
    (tmp_path / "config.json").write_text(json.dumps(hf))
    lora = LoraConfig(rank=9, targets=("self_attn",), publish="adapter")
    config = make_config().model_copy(update={"lora": lora})
    argv, _ = replica.serve_command(config, str(tmp_path), 0, 8000, token=TOKEN)
    assert argv[argv.index("--max-lora-rank") + 1] == "16"
    assert argv[argv.index("--max-loras") + 1] == "1"
    module = json.loads(argv[argv.index("--lora-modules") + 1])
    assert module == {"name": "policy", "path": "grpo_megatron:published"}
    first = argv.index("--lora-target-modules") + 1
    assert argv[first : first + 4] == ["k_proj", "o_proj", "q_proj", "v_proj"]
    merged = config.model_copy(update={"lora": lora.model_copy(update={"publish": "merged"})})
    argv, _ = replica.serve_command(merged, str(tmp_path), 0, 8000, token=TOKEN)
    assert "--enable-lora" not in argv


def test_a_server_with_a_slot_for_the_adapter_of_every_domain(monkeypatch, tmp_path):
    """vLLM's own parser reads them, also a name that it would not take as NAME=PATH."""
    monkeypatch.setattr(replica, "is_cpu_engine", lambda: True)
    hf = load_preset("tiny-qwen3-moe").hf | {"vocab_size": 256}
    (tmp_path / "config.json").write_text(json.dumps(hf))
    lora = LoraConfig(rank=8, targets=("self_attn",), publish="adapter", per_domain=True)
    config = make_config(("math", "code, easy/hard")).model_copy(update={"lora": lora})
    argv, _ = replica.serve_command(config, str(tmp_path), 0, 8000, token=TOKEN)
    assert argv[argv.index("--max-loras") + 1] == "2"
    found = modules_of(argv)
    assert found == [
        ("policy.math", "grpo_megatron:published/math"),
        ("policy.code, easy/hard", "grpo_megatron:published/code, easy/hard"),
    ]
    assert [name for name, _ in found] == list(config.engine_adapters)
    assert config.engine_adapter_of("code, easy/hard") == "policy.code, easy/hard"


def modules_of(argv: list[str]) -> list[tuple[str, str]]:
    """Names and paths of the adapters that vLLM reads from its arguments."""
    from vllm.entrypoints.launchers.cli_args import LoRAParserAction

    first = argv.index("--lora-modules") + 1
    end = argv.index("--lora-target-modules")
    namespace = argparse.Namespace()
    action = LoRAParserAction(["--lora-modules"], "lora_modules")
    action(argparse.ArgumentParser(), namespace, argv[first:end])
    return [(module.name, module.path) for module in namespace.lora_modules]
