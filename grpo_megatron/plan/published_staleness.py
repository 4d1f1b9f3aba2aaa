"""Learning rates and batches that published asynchronous runs have, by how far they run ahead.

They are settings that somebody trained with and gave away, no proof that others fail. A bound for
the product of staleness and learning rate has been derived (arXiv:2607.01083), but with constants
of model and task that nobody has published."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PublishedRun:
    """A run, or a recipe that its authors ship."""

    staleness: int
    """Optimizer steps that samples may be behind."""
    learning_rate: float
    """With AdamW."""
    samples: int
    """Of an optimizer step; at least, where a source counts tasks."""
    correction: str
    """What its objective does about old samples."""
    source: str


_AREAL = "AReaL 4aef98d8, examples/math/"
_PRIME_RL = "prime-rl 559b4477, examples/advanced/"
_VCPO = "VCPO (arXiv:2602.17616) c7f030f0, recipe/fully_async_policy/shell/vcpo/"

PUBLISHED_RUNS = (
    PublishedRun(2, 1.7e-5, 1024, "decoupled PPO", _AREAL + "gsm8k_grpo.yaml (1.5B)"),
    PublishedRun(4, 1e-5, 512, "decoupled PPO", _AREAL + "boba_grpo.yaml (1.5B)"),
    PublishedRun(8, 1e-6, 512, "DPPO", _PRIME_RL + "qwen3-30b-a3b/math.toml"),
    PublishedRun(10, 1e-6, 512, "VCPO", _VCPO + "math/vcpo_k=10.sh (7B)"),
    PublishedRun(12, 1e-6, 64, "VCPO", _VCPO + "gsm8k/vcpo_k=12.sh (1.5B)"),
    PublishedRun(16, 1e-6, 2048, "DPPO", _PRIME_RL + "minimax-m2.5/swe.toml"),
    PublishedRun(128, 1e-6, 512, "VCPO", _VCPO + "math/vcpo_k=128.sh (7B)"),
)


@dataclass(frozen=True, slots=True)
class PublishedRange:
    """What runs have that allow at least some staleness."""

    staleness: int
    """That was asked about, in optimizer steps."""
    max_learning_rate: float
    min_samples: int
    """Of an optimizer step."""
    sources: tuple[str, ...]


def published_range(staleness: int) -> PublishedRange | None:
    """Return what published runs with samples `staleness` or more optimizer steps behind have; None
    where no run with a known learning rate goes so far."""
    known = [run for run in PUBLISHED_RUNS if run.staleness >= staleness]
    if not known:
        return None
    return PublishedRange(
        staleness=staleness,
        max_learning_rate=max(run.learning_rate for run in known),
        min_samples=min(run.samples for run in known),
        sources=tuple(run.source for run in known),
    )
