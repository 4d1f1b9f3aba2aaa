"""What a rollout worker is asked by the controller, and what it answers."""

from typing import Any

import msgspec

from grpo_megatron.batching.spool import ShardReport
from grpo_megatron.types import PromptImage


class ChunkProblem(msgspec.Struct, frozen=True):
    """What an environment gets of a prompt: a `types.Problem`."""

    question: str
    answer: str
    metadata: dict[str, Any]


class ChunkPrompt(msgspec.Struct, frozen=True):
    """A prompt, and which of its samples are wanted: numbers [first, end)."""

    prompt_id: str
    domain: str
    token_ids: tuple[int, ...]
    first: int
    end: int
    problem: ChunkProblem | None = None
    """In a domain with an environment."""
    images: tuple[PromptImage, ...] = ()
    """Their files are in the run's folder of images."""


class EngineAddress(msgspec.Struct, frozen=True):
    """Where an engine answers, and the token that it wants."""

    url: str
    token: str = ""

    def __repr__(self) -> str:
        return f"EngineAddress({self.url!r})"  # logs have no secret


class Chunk(msgspec.Struct, frozen=True):
    """Some prompts of a call, to be sampled by one worker and written as one shard."""

    shard: str
    """Path of the new file."""
    step: int
    """Seeds depend on it in deterministic mode."""
    prompts: list[ChunkPrompt]
    max_tokens: int
    """Longest completion."""
    greedy: bool
    """The most likely completion, without routes."""
    engines: list[EngineAddress | None]
    """By replica; None: not to be asked."""
    home: int
    """The replica that is asked first."""


class SampledChunk(msgspec.Struct, frozen=True):
    """The samples of a chunk, on the disk."""

    report: ShardReport
    replicas: list[int]
    """Which engine sampled each prompt, its first sample where there were several."""
    dead: list[tuple[int, str]]
    """Replicas that were found dead meanwhile, and why."""
    counts: dict[str, float] = {}
    """What this worker has counted since it answered last: how episodes have ended
    (`EnvironmentHost.take_metrics`), cached tokens of prompts (`PrefixCacheCounts.take`)."""
