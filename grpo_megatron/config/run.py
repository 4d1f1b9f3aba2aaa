"""`RunConfig`: a whole recipe."""

from pathlib import Path
from typing import Literal

from pydantic import Field

from grpo_megatron.config.base import InputPath, Strict
from grpo_megatron.config.data import DataConfig, DomainConfig
from grpo_megatron.config.objective import BatchConfig, ObjectiveConfig
from grpo_megatron.config.rollout import PublishConfig, RolloutConfig
from grpo_megatron.config.trainer import OptimizerConfig, TrainerConfig


class ModelConfig(Strict):
    """A `path`, a `preset`, or the preset of a released model with the path of its checkpoint."""

    preset: str | None = None
    path: InputPath | None = None


class SamplingConfig(Strict):
    """Selection after scoring (docs/sampling.md)."""

    dynamic: bool = False
    max_refill_rounds: int = Field(4, ge=0)
    max_oversampling: float = Field(2.0, ge=1)
    surplus_staleness: int = Field(0, ge=0)
    zero_variance: Literal["keep", "drop", "resample"] = "keep"


class CurriculumConfig(Strict):
    """Prompts drawn by success rate instead of epoch by epoch (`data/curriculum.py`)."""

    rate: float = Field(0.5, gt=0, le=1)
    floor: float = Field(0.05, gt=0)
    replay_share: float = Field(0.05, ge=0, lt=1)


class CorrectionConfig(Strict):
    """Guided retries of wrong completions (docs/sampling.md, EDGE-GRPO, arXiv:2507.21848)."""

    probability: float = Field(0.75, gt=0, le=1)
    answer_share: float = Field(1 / 3, ge=0, le=1)
    cue: str = "\n\nWait, something is wrong here. Let me check it step by step.\n"
    answer_cue: str = "\n\nWait, the answer should be {answer}. Let me check it step by step.\n"
    max_retry_tokens: int = Field(256, ge=1)


class RoutingConfig(Strict):
    """Mixture-of-Experts routing under RL."""

    replay: Literal["none", "r2", "r3"] = "none"
    on_missing: Literal["live", "fail"] = "live"
    keep_loss: Literal["none", "kl", "set_mass", "cross_entropy"] = "none"
    keep_weight: float = Field(0.0, ge=0)
    balance_weight: float = Field(0.0, ge=0)
    router_policy: Literal["none", "freeze_weights", "freeze_bias"] = "freeze_bias"
    load_alarm: float = Field(4.0, gt=1)


class PlacementConfig(Strict):
    """Nodes of each role, for `submit` and `plan`; a run on one machine needs none of it."""

    mode: Literal["separate", "colocated"] = "separate"
    trainer_nodes: int = Field(1, ge=1)
    rollout_nodes: int = Field(0, ge=0)
    gpus_per_node: int = Field(0, ge=0)

    @property
    def num_trainer_gpus(self) -> int:
        return self.trainer_nodes * self.gpus_per_node

    @property
    def num_nodes(self) -> int:
        return self.trainer_nodes + self.rollout_nodes


class ColdStartConfig(Strict):
    """Short supervised start on prompt + answer, stopped by greedy validation accuracy."""

    target_accuracy: float = Field(0.36, gt=0, le=1)
    max_steps: int = Field(2000, ge=1)
    batch_size: int = Field(128, ge=1)
    steps_per_evaluation: int = Field(20, ge=1)
    optimizer: OptimizerConfig = OptimizerConfig(lr=2e-3)


class EvaluationConfig(Strict):
    """Greedy accuracy on validation prompts while training."""

    interval: int = Field(0, ge=0)


class CheckpointConfig(Strict):
    """Distributed checkpoints and the sample store."""

    interval: int = Field(50, ge=0)
    keep: int = Field(2, ge=1)
    keep_steps: int = Field(4, ge=1)


class TelemetryConfig(Strict):
    """Mirrors of metrics.jsonl."""

    wandb: Literal["off", "offline", "online"] = "off"
    wandb_project: str = "grpo-megatron"
    tensorboard: bool = False
    samples_per_step: int = Field(2, ge=0)


class RunConfig(Strict):
    """One recipe, resolved."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    seed: int = Field(0, ge=0, lt=2**31)
    num_steps: int = Field(100, ge=0)
    runs_dir: Path = Path("runs")
    model: ModelConfig
    data: DataConfig = DataConfig()
    domains: tuple[DomainConfig, ...] = Field(min_length=1)
    objective: ObjectiveConfig = ObjectiveConfig()
    batch: BatchConfig = BatchConfig()
    sampling: SamplingConfig = SamplingConfig()
    curriculum: CurriculumConfig | None = None
    correction: CorrectionConfig | None = None
    routing: RoutingConfig = RoutingConfig()
    trainer: TrainerConfig = TrainerConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    rollout: RolloutConfig = RolloutConfig()
    publish: PublishConfig = PublishConfig()
    placement: PlacementConfig = PlacementConfig()
    cold_start: ColdStartConfig | None = None
    evaluation: EvaluationConfig = EvaluationConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    telemetry: TelemetryConfig = TelemetryConfig()

    def max_new_tokens_of(self, domain: str) -> int:
        own = next((d.max_new_tokens for d in self.domains if d.name == domain), None)
        return own or self.rollout.max_new_tokens

    @property
    def records_routes(self) -> bool:
        """Whether engines are asked for the experts of every token."""
        return self.rollout.record_routes or self.routing.replay == "r3"
