"""`RunConfig`: a whole recipe, and its tables that have no module of their own."""

from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from grpo_megatron.config.base import InputPath, Strict
from grpo_megatron.config.objective import BatchConfig, DomainObjective, ObjectiveConfig
from grpo_megatron.config.trainer import OptimizerConfig, TrainerConfig


class ModelConfig(Strict):
    preset: str | None = None
    path: InputPath | None = None


class RewardConfig(Strict):
    function: str
    weight: float = 1.0
    name: str | None = None
    arguments: dict[str, Any] = {}

    @property
    def component(self) -> str:
        return self.name or self.function.rpartition(":")[2]


class DomainConfig(Strict):
    name: str
    source: Literal["reasoning_gym", "file"]
    dataset: str | None = None
    arguments: dict[str, Any] = {}
    path: InputPath | None = None
    prompt_field: str = "question"
    answer_field: str = "answer"
    num_problems: int | None = Field(None, ge=1)
    template: str = "{question}"
    weight: float = Field(1.0, ge=0)
    rewards: tuple[RewardConfig, ...] = Field(min_length=1)
    reward_clip: float | None = Field(None, gt=0)
    accuracy: str | None = None
    accuracy_threshold: float = 1.0
    max_new_tokens: int | None = Field(None, ge=1)
    keep_routing_weight: float | None = Field(None, ge=0)
    reference: InputPath | None = None
    objective: DomainObjective | None = None

    @property
    def accuracy_component(self) -> str:
        """The reward component that says whether a completion is correct."""
        return self.accuracy or self.rewards[0].component

    @property
    def least_correct(self) -> float:
        """The smallest value of that component that counts as correct, rounding allowed for."""
        return self.accuracy_threshold - 1e-9


class DataConfig(Strict):
    num_validation: int = Field(512, ge=0)
    num_heldout: int = Field(1024, ge=0)
    reward_timeout_s: float = Field(5.0, gt=0)
    reward_workers: int = Field(1, ge=1)
    reward_concurrency: int = Field(16, ge=1)


class SamplingConfig(Strict):
    dynamic: bool = False
    max_refill_rounds: int = Field(4, ge=0)
    max_oversampling: float = Field(2.0, ge=1)
    surplus_staleness: int = Field(0, ge=0)
    zero_variance: Literal["keep", "drop", "resample"] = "keep"


class CurriculumConfig(Strict):
    rate: float = Field(0.5, gt=0, le=1)
    floor: float = Field(0.05, gt=0)
    replay_share: float = Field(0.05, ge=0, lt=1)


class CorrectionConfig(Strict):
    probability: float = Field(0.75, gt=0, le=1)
    answer_share: float = Field(1 / 3, ge=0, le=1)
    cue: str = "\n\nWait, something is wrong here. Let me check it step by step.\n"
    answer_cue: str = "\n\nWait, the answer should be {answer}. Let me check it step by step.\n"
    max_retry_tokens: int = Field(256, ge=1)


class TeacherConfig(Strict):
    path: InputPath | None = None
    url: str | None = Field(None, pattern="^https?://")
    domains: tuple[str, ...] = ()
    weight: float = Field(1.0, gt=0)


class DistillationConfig(Strict):
    teachers: tuple[TeacherConfig, ...] = Field(min_length=1)
    mode: Literal["full", "topk_tail", "sampled"] = "full"
    top_k: int = Field(64, ge=1)
    forward_weight: float = Field(0.0, ge=0, le=1)
    temperature: float | None = Field(None, gt=0)
    samples: Literal["policy", "dataset"] = "policy"


class RoutingConfig(Strict):
    replay: Literal["none", "r2", "r3"] = "none"
    on_missing: Literal["live", "fail"] = "live"
    keep_loss: Literal["none", "kl", "set_mass", "cross_entropy"] = "none"
    keep_weight: float = Field(0.0, ge=0)
    balance_weight: float = Field(0.0, ge=0)
    router_policy: Literal["none", "freeze_weights", "freeze_bias"] = "freeze_bias"
    load_alarm: float = Field(4.0, gt=1)


class RolloutConfig(Strict):
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
        neutral = {"top_k": None, "top_p": 1.0, "min_p": 0.0}
        narrow = {n: getattr(self, n) for n, value in neutral.items() if getattr(self, n) != value}
        if narrow:
            narrow["logprobs"] = self.top_k + self.top_k // 4 + 8 if self.top_k else -1
        return narrow


class PublishConfig(Strict):
    method: Literal["gloo", "file"] = "gloo"
    pause: Literal["wait", "abort", "keep"] = "wait"
    num_senders: int = Field(1, ge=1)
    bucket_mib: int = Field(256, ge=1)
    canary_tolerance: float | None = Field(None, gt=0)
    canary: bool = True


class PlacementConfig(Strict):
    mode: Literal["separate", "colocated"] = "separate"
    trainer_nodes: int = Field(1, ge=1)
    rollout_nodes: int = Field(0, ge=0)
    gpus_per_node: int = Field(0, ge=0)
    shared_servers: tuple[str, ...] = ()

    @property
    def num_trainer_gpus(self) -> int:
        return self.trainer_nodes * self.gpus_per_node

    @property
    def num_nodes(self) -> int:
        return self.trainer_nodes + self.rollout_nodes


class ColdStartConfig(Strict):
    target_accuracy: float = Field(0.36, gt=0, le=1)
    max_steps: int = Field(2000, ge=1)
    batch_size: int = Field(128, ge=1)
    steps_per_evaluation: int = Field(20, ge=1)
    checkpoint_interval: int = Field(200, ge=1)
    optimizer: OptimizerConfig = OptimizerConfig(lr=2e-3)


class EvaluationConfig(Strict):
    interval: int = Field(0, ge=0)
    num_samples: int = Field(0, ge=0)


class RejectionConfig(Strict):
    num_samples: int = Field(8, ge=1)
    max_per_prompt: int = Field(4, ge=1)
    max_prompts: int | None = Field(None, ge=1)
    scripts: tuple[str, ...] = ()


class CheckpointConfig(Strict):
    interval: int = Field(50, ge=0)
    keep: int = Field(2, ge=1)
    keep_steps: int = Field(4, ge=1)


class TelemetryConfig(Strict):
    wandb: Literal["off", "offline", "online"] = "off"
    wandb_project: str = "grpo-megatron"
    tensorboard: bool = False
    samples_per_step: int = Field(2, ge=0)


class RunConfig(Strict):
    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    kind: Literal["rl", "sft", "distil", "rejection_sample", "eval"] = "rl"
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
    distillation: DistillationConfig | None = None
    rejection: RejectionConfig = RejectionConfig()
    routing: RoutingConfig = RoutingConfig()
    trainer: TrainerConfig = TrainerConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    rollout: RolloutConfig = RolloutConfig()
    publish: PublishConfig = PublishConfig()
    placement: PlacementConfig = PlacementConfig()
    cold_start: ColdStartConfig | None = None
    evaluation: EvaluationConfig = EvaluationConfig()
    gates: tuple[str, ...] = ()
    checkpoint: CheckpointConfig = CheckpointConfig()
    telemetry: TelemetryConfig = TelemetryConfig()

    def max_new_tokens_of(self, domain: str) -> int:
        own = next((d.max_new_tokens for d in self.domains if d.name == domain), None)
        return own or self.rollout.max_new_tokens

    @property
    def num_devices(self) -> int:
        """GPUs, or processes on a CPU, of trainer and engines."""
        rollout = self.rollout
        return self.trainer.num_ranks + rollout.num_replicas * rollout.tensor_parallel_size

    @property
    def trains(self) -> bool:
        return self.kind in ("rl", "sft", "distil")

    @property
    def input_paths(self) -> list[Path]:
        """What a run reads: model, data sets, references, teachers."""
        teachers = self.distillation.teachers if self.distillation else ()
        return sorted({self.model.path, *(t.path for t in teachers), *(
            path for d in self.domains for path in (d.path, d.reference))} - {None})

    @property
    def uses_dataset(self) -> bool:
        """Whether the responses of a data set are trained, not the policy's own samples."""
        return self.kind == "sft" or (
            self.distillation is not None and self.distillation.samples == "dataset")

    @property
    def canary_tolerance(self) -> float:
        """Mean |trainer - engine| log-prob difference that rounding may explain."""
        exact = self.trainer.precision == self.rollout.dtype == "float32"
        return self.publish.canary_tolerance or (1e-4 if exact else 0.1)

    @property
    def samples_prove(self) -> bool:
        """Whether a step's samples can be its canary: each is trained, the engine recorded for it
        sampled it, and training computes what that engine did, experts and all."""
        return (self.publish.canary and self.kind == "rl" and self.batch.max_staleness == 0
                and self.routing.replay != "r3" and not self.rollout.truncation
                and self.objective.overlong == self.objective.subset == "none"
                and not self.correction
                and (self.rollout.num_replicas == 1 or not self.rollout.deterministic))

    @property
    def records_routes(self) -> bool:
        """Whether engines are asked for the experts of every token."""
        return self.rollout.record_routes or self.routing.replay == "r3"
