"""`[rollout]` and `[publish]`: the vLLM replicas and how they get new weights."""

from typing import Literal

from pydantic import Field

from grpo_megatron.config.base import Strict

_NEUTRAL = {"top_p": 1.0, "min_p": 0.0}


class RolloutConfig(Strict):
    """vLLM servers and sampling."""

    num_replicas: int = Field(1, ge=1)
    tensor_parallel_size: int = Field(1, ge=1)
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    max_new_tokens: int = Field(512, ge=1)
    max_model_len: int = Field(2048, ge=2)
    segment_tokens: int | None = Field(None, ge=1)
    temperature: float = Field(1.0, gt=0)
    top_k: int | None = Field(None, ge=1)
    top_p: float = Field(1.0, gt=0, le=1)
    min_p: float = Field(0.0, ge=0, lt=1)
    deterministic: bool = False
    max_num_seqs: int = Field(256, ge=1)
    max_concurrent_requests: int = Field(64, ge=1)
    kv_cache_gib: float = Field(1.0, gt=0)
    num_threads: int | None = Field(None, ge=1)
    record_routes: bool = False
    startup_timeout_s: float = Field(600.0, gt=0)
    request_timeout_s: float = Field(600.0, gt=0)
    max_attempts: int = Field(3, ge=1)
    engine_arguments: tuple[str, ...] = ()

    @property
    def truncation(self) -> dict[str, float]:
        """vLLM's sampling parameters that narrow the distribution; empty: none does.

        `logprobs` is how many to report so that all kept ids are among them, -1 for all: what ties
        with the k-th is kept as well, which is frequent in bfloat16."""
        values = {"top_k": self.top_k, "top_p": self.top_p, "min_p": self.min_p}
        narrow = {n: v for n, v in values.items() if v is not None and v != _NEUTRAL.get(n)}
        if narrow:
            narrow["logprobs"] = self.top_k + self.top_k // 4 + 8 if self.top_k else -1
        return narrow


class PublishConfig(Strict):
    """Weight publishing from the trainer to the servers."""

    method: Literal["gloo", "file"] = "gloo"
    pause: Literal["wait", "abort", "keep"] = "wait"
    num_senders: int = Field(1, ge=1)
    bucket_mib: int = Field(256, ge=1)
    canary_tolerance: float | None = Field(None, gt=0)
    canary: bool = True
