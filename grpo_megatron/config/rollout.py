"""`[rollout]` and `[publish]`: the vLLM replicas and how they get new weights."""

from typing import Literal

from pydantic import Field

from grpo_megatron.config.base import Strict

_NEUTRAL = {"top_p": 1.0, "min_p": 0.0}


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
    top_k: int | None = Field(None, ge=1)
    """Sample among so many most likely tokens. The trainer's log-probs are then over the same
    tokens, so top_p and min_p need this bound too, unless the vocabulary is small."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Sample among the most likely tokens that have this probability together."""
    min_p: float = Field(0.0, ge=0, lt=1)
    """Sample among tokens at least so likely as this share of the likeliest."""
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

    @property
    def truncation(self) -> dict[str, float]:
        """vLLM's sampling parameters that narrow the distribution; empty: none does.

        `logprobs` is how many to report so that all kept ids are among them, -1 for all: what ties
        with the k-th is kept as well, which is frequent in bfloat16.
        """
        values = {"top_k": self.top_k, "top_p": self.top_p, "min_p": self.min_p}
        narrow = {n: v for n, v in values.items() if v is not None and v != _NEUTRAL.get(n)}
        if narrow:
            narrow["logprobs"] = self.top_k + self.top_k // 4 + 8 if self.top_k else -1
        return narrow


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
    """Tensors are packed up to this size, or an eighth of the model where that is less."""
    canary_tolerance: float | None = Field(None, gt=0)
    """Largest mean |trainer - engine| log-prob difference over the canary's tokens; default:
    1e-4 where both compute in float32, else 0.1 (bfloat16 MoE: 0.02 is usual)."""
    canary: bool = True
    """Compare a canary's log-probs after every publish."""
