"""`[rollout]` and `[publish]`: the vLLM replicas and how they get new weights."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from grpo_megatron.config.base import Strict


class RolloutConfig(Strict):
    """vLLM servers and sampling."""

    num_replicas: int = Field(1, ge=1)
    """Independent servers."""
    tensor_parallel_size: int = Field(1, ge=1)
    """Tensor parallelism within a server."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Weights and activations of the engine."""
    max_new_tokens: int = Field(512, ge=1)
    """Longest completion."""
    max_model_len: int = Field(2048, ge=2)
    """Longest prompt plus completion."""
    segment_tokens: int | None = Field(None, ge=1)
    """Completions are chains of requests of so many tokens, so that a server that dies costs one
    of them; default: one request."""
    temperature: float = Field(1.0, gt=0)
    """Sampling temperature; the trainer's log-probs use the same."""
    deterministic: bool = False
    """One seeded request per sample, so that a resumed run samples the same tokens."""
    max_num_seqs: int = Field(256, ge=1)
    """Sequences that run at once in a server."""
    max_concurrent_requests: int = Field(64, ge=1)
    """Requests that the client keeps in flight per server."""
    kv_cache_gib: float = Field(1.0, gt=0)
    """CPU: size of the KV cache."""
    num_threads: int | None = Field(None, ge=1)
    """CPU: OpenMP threads a server; default: all cores divided over the servers."""
    record_routes: bool = False
    """Ask the engine for the experts of every token (MoE only)."""
    startup_timeout_s: float = Field(600.0, gt=0)
    """How long a server may take until it answers."""
    request_timeout_s: float = Field(600.0, gt=0)
    """How long one request may take."""
    max_attempts: int = Field(3, ge=1)
    """Times a request is tried, each time on another live server where there is one."""
    engine_arguments: tuple[str, ...] = ()
    """More `vllm serve` arguments, passed through."""


class PublishConfig(Strict):
    """Weight publishing from the trainer to the servers."""

    method: Literal["gloo", "file"] = "gloo"
    """`gloo`: streamed through process groups; `file`: safetensors and `reload_weights`."""
    pause: Literal["wait", "abort", "keep"] = "wait"
    """Requests in flight: `wait` for their end; with batch.max_staleness >= 1 also `abort` them
    and continue with new requests, or let the engine `keep` them, both under the new weights."""
    num_senders: int = Field(1, ge=1)
    """Trainer ranks that send, each its own part of the tensors."""
    bucket_mib: int = Field(256, ge=1)
    """Tensors are packed up to this size."""
    canary_tolerance: float | None = Field(None, gt=0)
    """Largest mean |trainer - engine| log-prob difference over the canary's tokens; default:
    1e-4 where both compute in float32, else 0.1 (bfloat16 MoE: 0.02 is usual)."""
    canary: bool = True
    """Compare a canary's log-probs after every publish."""
