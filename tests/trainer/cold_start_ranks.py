"""What the worker groups execute of a cold start."""

from __future__ import annotations

from pathlib import Path

from grpo_megatron.config.run import RunConfig
from grpo_megatron.trainer.requests import ResetOptimizer, TrainColdStart
from tests.integration import trainer_side


def first_step(model: str, samples: str, temperature: float) -> tuple[float, float]:
    """The NLL that a cold start reports of its first step, in a run that samples at this
    temperature, and the temperature of log-probs behind it."""
    domain = {"name": "even", "source": "file", "path": "x", "rewards": [{"function": "a:b"}]}
    config = RunConfig.model_validate(
        {
            "name": "case",
            "model": {"preset": "tiny-qwen3-moe"},
            "trainer": {"num_ranks": 1, "precision": "float32", "num_threads": 1},
            "rollout": {"temperature": temperature},
            "cold_start": {"target_accuracy": 0.5, "max_steps": 5},
            "domains": [domain],
        }
    )
    trainer_side.start(config, model)
    trainer_side.execute(ResetOptimizer(cold_start=True))
    report = trainer_side.execute(TrainColdStart(directory=Path(samples), first_update=0))
    service = trainer_side._service
    assert service is not None
    return report.metrics["loss/nll"], service.policy.models[0].temperature
