"""Tiny models, real servers and a stand-in for the trainer, for tests of the rollout package."""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch

from grpo_megatron.config.lora import LoraConfig, is_target
from grpo_megatron.config.run import RunConfig
from grpo_megatron.orphans import die_with_parent
from grpo_megatron.rollout.client import EngineClient
from grpo_megatron.rollout.engine_control import EngineControl
from grpo_megatron.rollout.replica import serve_command
from grpo_megatron.types import Completion
from grpo_megatron.weights.boxes import Box, whole_box
from grpo_megatron.weights.publish_plan import HeldBox, OpenedStream, plan_streams, tensors_of
from grpo_megatron.weights.tensor_entry import entry_of
from grpo_megatron.weights.transfer import StreamSender
from tests import engine_faults

VOCABULARY = 256
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_hidden_layers": 2,
    "intermediate_size": 128,
    "max_position_embeddings": 512,
    "initializer_range": 0.1,
    "bos_token_id": None,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
EXPERTS = {
    "moe_intermediate_size": 64,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}

Weights = Mapping[str, torch.Tensor]


def make_checkpoint(path: Path, *, moe: bool, seed: int) -> Path:
    """A random model whose norms and routers are not trivial."""
    from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(seed)
    model = (
        Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, **EXPERTS))
        if moe
        else Qwen3ForCausalLM(Qwen3Config(**SIZES))
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(0.1 * torch.randn_like(parameter))
            if name.endswith("gate.weight"):
                parameter.mul_(3)
    model.save_pretrained(path)
    return path


def weights_of(checkpoint: Path) -> Weights:
    from safetensors.torch import load_file

    return load_file(checkpoint / "model.safetensors")


def reference(checkpoint: Path):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()


def logprob_error(model, prompt: Sequence[int], completion: Completion, temperature=1.0) -> float:
    """Largest |engine - reference| over the completion's tokens."""
    ids = torch.tensor([[*prompt, *completion.token_ids.tolist()]])
    with torch.no_grad():
        logits = model(ids).logits[0, len(prompt) - 1 : -1] / temperature
    expected = logits.log_softmax(-1).gather(-1, ids[0, len(prompt) :, None])[:, 0].numpy()
    return float(np.abs(expected - completion.logprobs).max())


def make_adapter(
    checkpoint: Path, lora: LoraConfig, seed: int = 0
) -> tuple[Weights, torch.nn.Module]:
    """An adapter for every layer that is a target, and the model with it in its weights."""
    model = reference(checkpoint)
    generator = torch.Generator().manual_seed(seed)
    adapter = {}
    for name, parameter in model.named_parameters():
        module = name.removesuffix(".weight")
        is_linear = module.endswith("_proj") and parameter.dim() == 2
        if not is_linear or not is_target(module.partition(".layers.")[2], lora.targets):
            continue
        num_outputs, num_inputs = parameter.shape
        a = 0.1 * torch.randn(lora.rank, num_inputs, generator=generator)
        b = 0.1 * torch.randn(num_outputs, lora.rank, generator=generator)
        adapter |= {f"{module}.lora_A.weight": a, f"{module}.lora_B.weight": b}
        with torch.no_grad():
            parameter += lora.scale * b @ a
    return adapter, model


def reference_routes(model, prompt: Sequence[int], completion: Completion) -> np.ndarray:
    """Sorted experts `[T_p + T - 1, L, K]` of the reference's router."""
    ids = torch.tensor([[*prompt, *completion.token_ids.tolist()]])
    with torch.no_grad():
        logits = model(ids, output_router_logits=True).router_logits
    top = torch.stack([layer.topk(EXPERTS["num_experts_per_tok"], -1).indices for layer in logits])
    return np.sort(top.transpose(0, 1).numpy()[:-1], -1)


def first_tie(model, prompt: Sequence[int], completion: Completion, gap: float = 1e-5) -> int:
    """The first of the `T_p + T - 1` rows in which rounding decides which experts a router takes;
    behind it the engine may have computed something else. T_p + T - 1 where there is none."""
    ids = torch.tensor([[*prompt, *completion.token_ids.tolist()]])
    with torch.no_grad():
        logits = model(ids, output_router_logits=True).router_logits
    is_tied = torch.zeros(ids.shape[1], dtype=torch.bool)
    for layer in logits:
        taken = EXPERTS["num_experts_per_tok"]
        best = layer.topk(taken + 1, -1).values
        is_tied |= best[:, taken - 1] - best[:, taken] < gap
    rows = is_tied[:-1].nonzero()
    if len(rows):
        return int(rows[0])
    return ids.shape[1] - 1


def make_config(domains: Sequence[str] = ("d",), **rollout) -> RunConfig:
    base = {
        "dtype": "float32",
        "max_model_len": 256,
        "max_num_seqs": 64,
        "kv_cache_gib": 0.125,
        "max_new_tokens": 24,
        "num_threads": 1,
    }
    return RunConfig.model_validate(
        {
            "name": "test",
            "model": {"preset": "tiny-qwen3-moe"},
            "domains": [
                {
                    "name": name,
                    "source": "reasoning_gym",
                    "dataset": "chain_sum",
                    "template": "{question}",
                    "rewards": [{"function": "grpo_megatron.rewards.functions:exact_match"}],
                }
                for name in domains
            ],
            "batch": {"num_prompts": 6, "num_samples_per_prompt": 4},
            "rollout": base | rollout,
        }
    )


def _with_faults(environment: dict[str, str]) -> dict[str, str]:
    """The server's plugins and that of the tests."""
    faults = engine_faults.environment(*filter(None, [os.environ.get("PYTHONPATH")]))
    plugins = f"{environment['VLLM_PLUGINS']},{engine_faults.PLUGIN}"
    return {**faults, "VLLM_PLUGINS": plugins}


@dataclass
class Server:
    """A real server and what is needed to talk to it."""

    config: RunConfig
    checkpoint: Path
    port: int
    process: subprocess.Popen
    log: Path
    name: str
    token: str

    @classmethod
    def start(
        cls,
        name: str,
        checkpoint: Path,
        directory: Path,
        lora: LoraConfig | None = None,
        domains: Sequence[str] = ("d",),
        **rollout,
    ) -> Server:
        config = make_config(domains, **rollout).model_copy(update={"lora": lora})
        token = secrets.token_hex(16)
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        argv, environment = serve_command(config, str(checkpoint), 0, port, token=token)
        log = directory / f"{name}.log"
        with open(log, "w") as file:
            process = subprocess.Popen(
                argv,
                env={**os.environ, **environment, **_with_faults(environment)},
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=partial(die_with_parent, os.getpid()),  # of a session that is ended
            )
        return cls(config, checkpoint, port, process, log, name, token)

    def client(self) -> EngineClient:
        url = f"http://127.0.0.1:{self.port}"
        return EngineClient(url, name=self.name, request_timeout_s=300, token=self.token)

    def wait(self) -> None:
        async def ready() -> None:
            async with self.client() as client:
                await client.wait_ready(1200, lambda: self.process.poll() is None)
                await client.set_weight_version(0)

        try:
            asyncio.run(ready())
        except Exception as error:
            raise RuntimeError(self.log.read_text()[-3000:]) from error

    def stop(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(10)


class Trainer:
    """Senders on threads, each holding every n-th tensor."""

    def __init__(self, weights: Weights, num_senders: int = 2, sender_class=StreamSender) -> None:
        self.held: list[list[HeldBox]] = [[] for _ in range(num_senders)]
        for number, (name, tensor) in enumerate(sorted(weights.items())):
            box = HeldBox(entry_of(name, tensor), whole_box(tensor.shape))
            self.held[number % num_senders].append(box)
        self._sender_class, self.senders = sender_class, []

    async def connect(
        self, clients: Sequence[EngineClient], lora: LoraConfig | None = None
    ) -> EngineControl:
        """lora: what is held are adapters, of a domain where names begin with `DOMAIN/`."""
        publisher = EngineControl(clients, timeout_s=300)
        adapter = None
        if lora is None:
            kept = await publisher.kept_boxes(tensors_of(self.held))
        else:
            kept = await publisher.kept_adapters(tensors_of(self.held))
            adapter = {"rank": lora.rank, "scale": lora.scale}
        streams = plan_streams(self.held, kept, 1 << 17)
        opened, self.senders = [], []
        for number, stream in enumerate(streams):
            own = [
                self._sender_class(number, stream, k, "127.0.0.1", timeout_s=300)
                for k in stream.senders
            ]
            address = own[0].listen()
            opened.append(OpenedStream(*address, "gloo", stream))
            self.senders += [(sender, address) for sender in own]
        await publisher.prepare(opened, self._join, adapter)
        return publisher

    async def _join(self) -> None:
        joins = (asyncio.to_thread(sender.join, address) for sender, address in self.senders)
        await asyncio.gather(*joins)

    async def send(self, weights: Weights, version: int) -> dict[str, str]:
        def piece_of(name: str, box: Box) -> torch.Tensor:
            return box.view_in(whole_box(weights[name].shape), weights[name])

        def one(sender: StreamSender) -> dict[str, str]:
            for bucket in sender.messages:
                sender.send(version, bucket, piece_of)
            sender.finish()
            return sender.digests

        parts = await asyncio.gather(*(asyncio.to_thread(one, s) for s, _ in self.senders))
        return {name: digest for part in parts for name, digest in part.items()}

    async def publish(
        self,
        clients: Sequence[EngineClient],
        weights: Weights,
        version: int,
        lora: LoraConfig | None = None,
    ):
        publisher = await self.connect(clients, lora)
        await publisher.publish(version, lambda: self.send(weights, version))
