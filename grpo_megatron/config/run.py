"""`RunConfig`: a whole recipe, and its tables that have no module of their own."""

from datetime import date
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from grpo_megatron.config.alarms import AlarmsConfig
from grpo_megatron.config.allocation import AllocationConfig, SeedingConfig
from grpo_megatron.config.base import InputPath, Strict
from grpo_megatron.config.critic import CriticConfig
from grpo_megatron.config.engine_words import given_options
from grpo_megatron.config.environment import AgentConfig, EnvironmentConfig, EpisodeConfig
from grpo_megatron.config.experience import ExperienceConfig
from grpo_megatron.config.lora import ENGINE_ADAPTER, LoraConfig, adapter_name
from grpo_megatron.config.objective import BatchConfig, DomainObjective, ObjectiveConfig
from grpo_megatron.config.preferences import PreferencesConfig
from grpo_megatron.config.secret_values import REFERENCE
from grpo_megatron.config.trainer import OptimizerConfig, TrainerConfig
from grpo_megatron.config.watch import WatchConfig


class ModelConfig(Strict):
    """A `path`, a `preset`, or the preset of a released model with the path of its checkpoint."""

    preset: str | None = None
    """Name of a file in `models/`. Alone, its architecture is initialised at random (from `seed`);
    of a released model, `plan` needs nothing else and training needs `path` too."""
    path: InputPath | None = None
    """Hugging Face checkpoint directory to start from."""


class RewardConfig(Strict):
    """One reward component."""

    function: str
    """`module:function`, a typed plain function (see `grpo_megatron.rewards.functions`), or
    `environment`: the outcome of the episode, from its environment or its program."""
    weight: float = 1.0
    """Weight in the sum."""
    name: str | None = None
    """Name in metrics; default: the function's."""
    arguments: dict[str, Any] = {}
    """Keyword arguments passed to every call."""

    @property
    def component(self) -> str:
        """The component's name in metrics."""
        return self.name or self.function.rpartition(":")[2]


STEP_ROLES = ("trainer", "engines", "rewards")
"""What may have something to do in a step."""
RUN_NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"
"""What a run may be called: its directory is `runs_dir/name`, and never outside of `runs_dir`."""


class DomainConfig(Strict):
    """One domain: a source of prompts with verifiable answers, and its rewards."""

    name: str
    """Name in metrics and gates, without `.`, `@`, `<`, `>` and `=`; not `all`."""
    source: Literal["reasoning_gym", "file", "run", "shapes"]
    """`reasoning_gym`: procedural problems; `file`: JSONL, Parquet, JSON or CSV; `run`: samples
    that an RL run has recorded, as preferences; `shapes`: pictures of shapes to be counted
    (docs/vision.md)."""
    dataset: str | None = None
    """reasoning-gym data set, for example `chain_sum`."""
    arguments: dict[str, Any] = {}
    """Arguments of the reasoning-gym data set, for example `{min_digits = 2}`; of a file:
    `answer_after`, `domain_field`, `split` (docs/recipes.md); of a run: `pairs`, `domain`
    (docs/preferences.md); of shapes: `side`, `shape_side`, `fewest`, `most`, `most_others`,
    `kinds`, `question`, `seed` (docs/vision.md)."""
    path: InputPath | None = None
    """File, or a folder with the shards of a data set; of source `run`, the directory of a run."""
    prompt_field: str = "question"
    """Field that holds the question or a conversation; as it is, `messages`, `prompt` and the
    fields of known benchmarks are found as well."""
    answer_field: str = "answer"
    """Field that holds the expected answer."""
    image_field: str = "images"
    """Field with the images of a row, for a model that sees: one or a list of paths, `data:` URIs
    or bytes."""
    image_folder: InputPath | None = None
    """Folder that paths of images begin in; default: that of the data file."""
    num_problems: int | None = Field(None, ge=1)
    """How many problems to draw (reasoning-gym, shapes) or to read at most (file)."""
    template: str = "{question}"
    """Prompt template: `{question}`, `{answer}`-free; `{metadata[expression]}` reaches metadata.
    `chat`: the chat template of the model's tokenizer."""
    template_arguments: dict[str, Any] = {}
    """What the chat template is given beside the messages, for example
    `{enable_thinking = false}`."""
    template_date: date | None = None
    """The day for chat templates that write today's date."""
    system_prompt: str | None = None
    """Chat template: system message of conversations that have none."""
    question_template: str = "{question}"
    """Chat template: the user's message where a row has a question and no conversation."""
    assistant_prefix: str = ""
    """Chat template: text with which every answer begins, for example `<think>` and a new line."""
    response_template: str | None = None
    """What supervised training trains of a row without responses, for example
    `{metadata[thought]}</think>{answer}`; default: the answer."""
    weight: float = Field(1.0, ge=0)
    """Share of this domain in the training prompts, relative to the others."""
    rewards: tuple[RewardConfig, ...] = ()
    """Reward components; the reward is their weighted sum. At least one, but for preferences."""
    reward_clip: float | None = Field(None, gt=0)
    """Clip the weighted sum to ±reward_clip; default: not at all. Refused where steps or
    components are trained (`objective.advantage`)."""
    accuracy: str | None = None
    """Reward component that says whether a completion is correct; default: the first."""
    accuracy_threshold: float = 1.0
    """A completion is correct if that component is at least this."""
    max_new_tokens: int | None = Field(None, ge=1)
    """Longest completion of this domain; default: `rollout.max_new_tokens`."""
    keep_routing_weight: float | None = Field(None, ge=0)
    """Weight of `routing.keep_loss` for this domain; default: `routing.keep_weight`."""
    reference: InputPath | None = None
    """Hugging Face checkpoint that this domain's KL refers to; default: the policy at the start of
    RL."""
    objective: DomainObjective | None = None
    """What this domain sets differently from `[objective]`."""
    environment: EnvironmentConfig | None = None
    """What replies to the policy; default: nothing does, an answer is one turn."""
    agent: AgentConfig | None = None
    """A program that drives the domain's episodes and asks the policy by OpenAI's API."""

    @property
    def accuracy_component(self) -> str:
        """The reward component that says whether a completion is correct."""
        return self.accuracy or self.rewards[0].component

    @property
    def episodes(self) -> EpisodeConfig | None:
        """Settings of the domain's episodes; None where an answer is one turn."""
        return self.environment or self.agent

    @property
    def episodes_table(self) -> str:
        """The name of the table that has them."""
        if self.environment is None:
            return "agent"
        return "environment"

    @property
    def num_environment_servers(self) -> int:
        """Servers of the domain's environment, as roles of the run."""
        if self.environment is None:
            return 0
        return self.environment.servers

    @property
    def hosted(self) -> EnvironmentConfig | None:
        """What runs in processes of environments; None: nothing."""
        if self.agent is not None:
            return self.agent.hosted
        return self.environment

    @property
    def least_correct(self) -> float:
        """The smallest value of that component that counts as correct, rounding allowed for."""
        return self.accuracy_threshold - 1e-9


class DataConfig(Strict):
    """Splits, made by a hash of the prompt text, so that equal prompts share a split."""

    num_validation: int = Field(512, ge=0)
    """Prompts kept out of training, used while training."""
    num_heldout: int = Field(1024, ge=0)
    """Prompts kept out of training and validation, used for the final accuracy."""
    reward_timeout_s: float = Field(5.0, gt=0)
    """Hard limit per reward call; past it the worker is killed (a coroutine is cancelled), the
    sample is unscorable."""
    reward_workers: int = Field(1, ge=1)
    """Reward processes; with reward_hosts, of each host."""
    reward_hosts: int = Field(0, ge=0)
    """Hosts of reward processes, in a job spread over the nodes that generate; 0: the processes run
    beside the controller."""
    reward_concurrency: int = Field(16, ge=1)
    """Coroutines of async rewards that one reward process runs at a time."""


class SamplingConfig(Strict):
    """Which groups are kept after scoring (docs/sampling.md)."""

    dynamic: bool = False
    """Keep a group only if some of its completions are correct and some are not; draw further
    prompts until `batch.num_prompts` groups are kept (DAPO, arXiv:2503.14476)."""
    max_refill_rounds: int = Field(4, ge=0)
    """Rounds after the first; then the step trains what there is, or is skipped."""
    max_oversampling: float = Field(2.0, ge=1)
    """A round draws at most this many prompts per missing group."""
    surplus_staleness: int = Field(0, ge=0)
    """Versions that kept groups left over from an earlier step may be behind on top of
    `batch.max_staleness`; older ones are dropped."""
    zero_variance: Literal["keep", "drop", "resample"] = "keep"
    """Groups whose rewards are all equal: trained with advantage 0, or left out; `resample` is
    refused (docs/sampling.md says why)."""


class CurriculumConfig(Strict):
    """Prompts drawn by success rate instead of epoch by epoch (`data/curriculum.py`)."""

    rate: float = Field(0.5, gt=0, le=1)
    """Weight of the newest visit in a prompt's moving success rate p."""
    floor: float = Field(0.05, gt=0)
    """A prompt is drawn in proportion to p (1 - p) + floor."""
    replay_share: float = Field(0.05, ge=0, lt=1)
    """Share of the draws that go to mastered prompts."""


class CorrectionConfig(Strict):
    """Guided retries of wrong completions (docs/sampling.md, EDGE-GRPO, arXiv:2507.21848)."""

    probability: float = Field(0.75, gt=0, le=1)
    """Share of the wrong completions that a retry replaces."""
    answer_share: float = Field(1 / 3, ge=0, le=1)
    """Share of the retries that are told the answer."""
    cue: str = "\n\nWait, something is wrong here. Let me check it step by step.\n"
    """What is appended to the wrong completion."""
    answer_cue: str = "\n\nWait, the answer should be {answer}. Let me check it step by step.\n"
    """The same for a retry that is told the answer."""
    max_retry_tokens: int = Field(256, ge=1)
    """Longest retry (and never longer than the domain's completions)."""


class TeacherConfig(Strict):
    """One teacher: a `path`, or the `url` of a server."""

    path: InputPath | None = None
    """Checkpoint of the student's architecture and tokenizer, Hugging Face or of a run."""
    url: str | None = Field(None, pattern="^https?://")
    """vLLM server of any model with the student's tokenizer, for topk_tail: http://HOST:PORT."""
    model: str | None = Field(None, min_length=1)
    """What the server at `url` calls the teacher: one of its models or adapters (vLLM's
    `--lora-modules NAME=DIRECTORY`); default: the first that it lists."""
    api_key: str | None = Field(None, pattern=REFERENCE)
    """Key that the server asks for: the name of the environment variable that has it, `"$NAME"`."""
    domains: tuple[str, ...] = ()
    """What it teaches; default: every domain."""
    weight: float = Field(1.0, gt=0)
    """Of its divergence in the loss."""


class DistillationConfig(Strict):
    """KL to one teacher per domain, or to a weighted set of them."""

    teachers: tuple[TeacherConfig, ...] = Field(min_length=1)
    """One for each domain, or a weighted set."""
    mode: Literal["full", "topk_tail", "sampled"] = "full"
    """full: KL over the vocabulary; topk_tail: over the teacher's likeliest tokens and one for all
    others; sampled: policy gradient with the teacher's log-probs of the sampled tokens."""
    top_k: int = Field(64, ge=1)
    """Likeliest tokens of topk_tail."""
    forward_weight: float = Field(0.0, ge=0, le=1)
    """Share of forward KL (teacher to student) in the loss; 0: reverse KL."""
    temperature: float | None = Field(None, gt=0)
    """Divides the logits of both; default: that of rollouts."""
    samples: Literal["policy", "dataset"] = "policy"
    """What is trained: the policy's own samples, or the responses of the data set."""


class RoutingConfig(Strict):
    """Mixture-of-Experts routing under RL."""

    replay: Literal["none", "r2", "r3"] = "none"
    """Experts of the training passes. none: the live router's choice; r2: the choice of the
    trainer's old-policy pass; r3: the engine's choice, in the old-policy pass too. Gates always
    come from the live router, so that it keeps its gradient."""
    on_missing: Literal["live", "fail"] = "live"
    """r3, where a token's route is missing, stale or damaged: the live router's choice (counted),
    or stop."""
    keep_loss: Literal["none", "kl", "set_mass", "cross_entropy"] = "none"
    """Auxiliary loss that holds routers: KL(old || live); -log of the live probability of the
    replayed set; mean cross-entropy on that set."""
    keep_weight: float = Field(0.0, ge=0)
    """Weight of `keep_loss`; domains may have their own."""
    balance_weight: float = Field(0.0, ge=0)
    """Load-balance loss from live probabilities and replayed counts."""
    shared_tokens: Literal["each_use", "once"] = "each_use"
    """What a prompt's token, of which all samples of a group are a continuation, counts in the
    losses on routers and in routing metrics. each_use: once for every sample, as if each had been
    computed alone; once: 1 in an optimizer step, whether or not it is computed once."""
    router_policy: Literal["none", "freeze_weights", "freeze_bias"] = "freeze_bias"
    """none: router weights and selection bias are trained; freeze_bias: weights only;
    freeze_weights: neither."""
    level_experts: bool = True
    """r3 with expert parallelism: choose which samples share a micro-batch so that the ranks that
    have the experts get equal shares of the tokens."""
    load_alarm: float = Field(4.0, gt=1)
    """Say so when an expert gets this many times the mean load of its layer."""


class RolloutConfig(Strict):
    """vLLM servers and sampling."""

    num_replicas: int = Field(1, ge=1)
    """Independent servers."""
    tensor_parallel_size: int = Field(1, ge=1)
    """Tensor parallelism within a server."""
    data_parallel_size: int = Field(1, ge=1)
    """Engines within a server, each with requests and a cache of its own; all workers of a server,
    tensor times data parallel, share the experts of a sparse model between them."""
    expert_parallel: bool = False
    """The workers of a server have whole experts each, instead of a part of every expert."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Weights and activations of the engine."""
    fp8: Literal["none", "blockwise"] = "none"
    """Matrices of layers in FP8, with a scale for every block of 128 x 128 numbers; the trainer
    rounds and publishes them so (docs/fp8.md). Everything else stays in `dtype`."""
    max_new_tokens: int = Field(512, ge=1)
    """Longest completion."""
    max_model_len: int = Field(2048, ge=2)
    """Longest prompt plus completion."""
    segment_tokens: int | None = Field(None, ge=1)
    """Completions are chains of requests of so many tokens, so that a server that dies costs one of
    them; default: one request."""
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
    max_restarts: int = Field(3, ge=0)
    """Times that a server that died or hung is started again, each time after twice the pause, and
    so are a rollout worker and a server of an environment; 0: the others go on without it. Engines
    that share GPUs with the trainer are not started again."""
    engine_arguments: tuple[str, ...] = ()
    """More `vllm serve` arguments, passed through. Names are written in full; what fields say, and
    what would add workers, is refused."""

    @property
    def num_workers(self) -> int:
        """Workers of a server: a GPU each."""
        return self.tensor_parallel_size * self.data_parallel_size

    def engine_argument(self, name: str) -> str | None:
        """Return what stands behind one of `engine_arguments`, joined by = or as the next word; of
        several the last, as vLLM does.

        name: with dashes, also where the argument has underscores. Empty where nothing stands
        behind it; None where the argument is not given."""
        found = None
        for option in given_options(self.engine_arguments):
            if option.name == name:
                found = option.value
        return found

    @property
    def expert_parts(self) -> int:
        """Into how many parts the columns of an expert are split."""
        if self.expert_parallel:
            return 1
        return self.num_workers

    @property
    def truncation(self) -> dict[str, float]:
        """vLLM's sampling parameters that narrow the distribution; empty: none does.

        `logprobs` is how many to report so that all kept ids are among them, -1 for all: what ties
        with the k-th is kept as well, which is frequent in bfloat16."""
        narrow: dict[str, float] = {}
        if self.top_k is not None:
            narrow["top_k"] = self.top_k
        if self.top_p < 1:
            narrow["top_p"] = self.top_p
        if self.min_p > 0:
            narrow["min_p"] = self.min_p
        if not narrow:
            return {}
        if self.top_k is None:
            narrow["logprobs"] = -1
        else:
            narrow["logprobs"] = self.top_k + self.top_k // 4 + 8
        return narrow


class PublishConfig(Strict):
    """Weight publishing from the trainer to the servers."""

    method: Literal["auto", "nccl", "ipc", "gloo", "file"] = "auto"
    """`nccl`: from GPU to GPU; `ipc`: a receiver copies out of the sender's GPU memory where it can
    read that (one node, a GPU that it sees), else through host memory; `gloo`: through host memory;
    `auto`: NCCL where trainer and engines have GPUs of their own, IPC where they share them, gloo
    without GPUs; `file`: safetensors and `reload_weights`."""
    pause: Literal["wait", "abort", "keep"] = "wait"
    """Requests in flight: `wait` for their end; with batch.max_staleness >= 1 also `abort` them and
    continue with new requests, or let the engine `keep` them, both under the new weights."""
    beside_decoding: bool = False
    """Weights come into host memory while engines decode, which pause to load them only: with
    batch.max_staleness >= 1, pause abort or keep, and weights that pass through host memory."""
    num_senders: int = Field(1, ge=1)
    """Without effect, for recipes of earlier versions: every trainer rank sends what it holds."""
    bucket_mib: int = Field(256, ge=1)
    """Weights travel in messages up to this size, or a 64th of what an engine worker keeps where
    that is less (and more than 1 MiB)."""
    delta: bool = False
    """Send of each message only what changed since the publish before, exactly, where that is less.
    Worth it over slow links; trainer and engines keep a copy of what they send and receive in host
    memory."""
    canary_tolerance: float | None = Field(None, gt=0)
    """Largest mean |trainer - engine| log-prob difference over the canary's tokens; default: 1e-4
    where both compute in float32, 0.3 where the trainer's matrices are FP8 (0.1 was seen) or the
    engine's are, else 0.1 (bfloat16 MoE: 0.02 is usual)."""
    canary: bool = True
    """Compare log-probs of trainer and engines in every step before weights change: of its samples,
    or of eight prompts where training computes something else (rollouts ahead, replayed experts).
    """


class PlacementConfig(Strict):
    """Nodes of each role, for `submit` and `plan`; a run on one machine needs none of it."""

    mode: Literal["separate", "colocated"] = "separate"
    """`separate`: trainer and engines have GPUs of their own; `colocated`: they share GPUs."""
    trainer_nodes: int = Field(1, ge=1)
    """Nodes that train; each has equally many trainer ranks."""
    rollout_nodes: int = Field(0, ge=0)
    """Nodes that generate; 0: engines run on the trainer's nodes (separate: on the GPUs that the
    trainer leaves free)."""
    environment_nodes: int = Field(0, ge=0)
    """Nodes with nothing but servers of environments (`environment.servers`), which need no GPU; 0:
    these servers run on nodes that generate."""
    gpus_per_node: int = Field(0, ge=0)
    """GPUs a node; 0: CPU."""
    shared_servers: tuple[str, ...] = ()
    """Addresses of judges and reward models on the trainer's devices: they rest while it works
    (GPU: asleep, with vLLM's --enable-sleep-mode; CPU: paused) and wake for rewards."""

    @property
    def num_trainer_gpus(self) -> int:
        """GPUs of all nodes that train."""
        return self.trainer_nodes * self.gpus_per_node

    @property
    def num_nodes(self) -> int:
        """Nodes of the job, of trainer, engines and servers of environments."""
        return self.trainer_nodes + self.rollout_nodes + self.environment_nodes

    @property
    def num_gpus(self) -> int:
        """GPUs of all nodes that train or generate."""
        return (self.trainer_nodes + self.rollout_nodes) * self.gpus_per_node


class ColdStartConfig(Strict):
    """Short supervised start on prompt + answer, stopped by greedy validation accuracy."""

    target_accuracy: float = Field(0.36, gt=0, le=1)
    """Stop once validation accuracy is at least this."""
    max_steps: int = Field(2000, ge=1)
    """Give up (with an error) after this many optimizer steps."""
    batch_size: int = Field(128, ge=1)
    """Samples an optimizer step."""
    steps_per_evaluation: int = Field(20, ge=1)
    """Optimizer steps between accuracy checks; a tenth of them near the target."""
    checkpoint_interval: int = Field(200, ge=1)
    """Optimizer steps between checkpoints of the cold start, which RL's replace."""
    optimizer: OptimizerConfig = OptimizerConfig(lr=2e-3)
    """Optimizer of the cold start; its state is dropped afterwards."""


class EvaluationConfig(Strict):
    """Accuracy while training (greedy, validation prompts) and at the end (held-out prompts)."""

    interval: int = Field(0, ge=0)
    """RL steps between evaluations; 0: only before and after."""
    num_samples: int = Field(0, ge=0)
    """Samples a prompt for pass@k and majority@k at the end; 0: greedy only."""


PairChoice = Literal["best_worst", "correct_incorrect"]
"""How two samples of a group are chosen (`data.preference_pairs`)."""


class RejectionConfig(Strict):
    """Verified samples as a data set (`controller/rejection.py`)."""

    num_samples: int = Field(8, ge=1)
    """Samples a training prompt."""
    max_per_prompt: int = Field(4, ge=1)
    """Kept responses a prompt."""
    max_prompts: int | None = Field(None, ge=1)
    """Prompts a domain; default: all."""
    pairs: PairChoice | None = None
    """Write pairs for kind preferences instead, at most one a prompt: the samples with the highest
    and the lowest reward, or the best correct and the worst incorrect one; default: responses."""
    scripts: tuple[str, ...] = ()
    """Keep only responses in these Unicode scripts, for example ['latin']; default: any."""


class CheckpointConfig(Strict):
    """Distributed checkpoints and the sample store."""

    interval: int = Field(50, ge=0)
    """RL steps between checkpoints; 0: only the last."""
    keep: int = Field(2, ge=1)
    """Complete checkpoints kept."""
    beside_next_step: bool = True
    """Copy what is saved to host memory and write it while the next step runs; false: wait until it
    is written. (Megatron-Core 0.16.1 always waits.)"""
    keep_steps: int = Field(4, ge=1)
    """Recorded steps kept after each older checkpoint, for `replay` and `mismatch`; those since the
    newest are kept always."""


class TelemetryConfig(Strict):
    """Mirrors of metrics.jsonl."""

    wandb: Literal["off", "offline", "online"] = "off"
    """Weights & Biases."""
    wandb_project: str = "grpo-megatron"
    """Project in which Weights & Biases shows the run."""
    tensorboard: bool = False
    """TensorBoard event files under `tensorboard/`."""
    samples_per_step: int = Field(2, ge=0)
    """Best and worst completions kept readable per step."""


class RunConfig(Strict):
    """One recipe, resolved."""

    name: str = Field(pattern=RUN_NAME)
    """Run directory is `runs_dir/name`."""
    kind: Literal[
        "rl",
        "sft",
        "distil",
        "preferences",
        "reward_model",
        "experience",
        "rejection_sample",
        "eval",
    ] = "rl"
    """rl; sft: on the responses of the data set; distil: to teachers; preferences: on pairs of
    answers (DPO and others); reward_model: a scalar for answers, on pairs; rejection_sample: makes
    a data set; experience: lessons in the prompt, the weights stay; eval: accuracy only."""
    seed: int = Field(0, ge=0, lt=2**31)
    """Seed of weights, sampling and splits."""
    num_steps: int = Field(100, ge=0)
    """Training steps."""
    runs_dir: Path = Path("runs")
    """Parent of run directories; choose no folder that a restart or a cleaner empties."""
    model: ModelConfig
    data: DataConfig = DataConfig()
    domains: tuple[DomainConfig, ...] = Field(min_length=1)
    objective: ObjectiveConfig = ObjectiveConfig()
    batch: BatchConfig = BatchConfig()
    sampling: SamplingConfig = SamplingConfig()
    curriculum: CurriculumConfig | None = None
    correction: CorrectionConfig | None = None
    allocation: AllocationConfig | None = None
    seeding: SeedingConfig | None = None
    distillation: DistillationConfig | None = None
    preferences: PreferencesConfig = PreferencesConfig()
    rejection: RejectionConfig = RejectionConfig()
    experience: ExperienceConfig | None = None
    routing: RoutingConfig = RoutingConfig()
    trainer: TrainerConfig = TrainerConfig()
    lora: LoraConfig | None = None
    optimizer: OptimizerConfig = OptimizerConfig()
    critic: CriticConfig | None = None
    rollout: RolloutConfig = RolloutConfig()
    publish: PublishConfig = PublishConfig()
    placement: PlacementConfig = PlacementConfig()
    cold_start: ColdStartConfig | None = None
    evaluation: EvaluationConfig = EvaluationConfig()
    gates: tuple[str, ...] = ()
    """Conditions on result.json; where one fails, so does the run, with its weights exported."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    telemetry: TelemetryConfig = TelemetryConfig()
    alarms: AlarmsConfig = AlarmsConfig()
    watch: WatchConfig = WatchConfig()

    def max_new_tokens_of(self, domain: str) -> int:
        """Longest completion of the domain with this name."""
        for known in self.domains:
            if known.name == domain and known.max_new_tokens is not None:
                return known.max_new_tokens
        return self.rollout.max_new_tokens

    @property
    def largest_group(self) -> int:
        """Most samples that a prompt may have in a step."""
        size = self.batch.num_samples_per_prompt
        if self.allocation is None:
            return size
        return self.allocation.max_samples_per_prompt or 2 * size

    @property
    def trains_preferences(self) -> bool:
        """Whether pairs of answers, or answers with labels or with labels of their steps, are
        trained."""
        return self.kind in ("preferences", "reward_model")

    @property
    def begins_as_reference(self) -> bool:
        """Whether the weights that a run of preferences begins with are its reference's, adapters
        aside: a reference that is named has none."""
        reference = self.preferences.reference
        if reference is None:
            return True
        start = self.model.path
        return start is not None and reference.resolve() == start.resolve()

    @property
    def compares_pairs(self) -> bool:
        """Whether preferences are pairs of answers, which share a micro-batch."""
        return self.preferences.is_paired

    @property
    def reward_labels(self) -> tuple[str, ...]:
        """Names of the scalars of a reward model that has several, by domain; empty: it has one."""
        if not self.preferences.scalar_per_domain:
            return ()
        return tuple(domain.name for domain in self.domains)

    @property
    def num_scalars(self) -> int:
        """Scalars that a reward model's head gives for a token; 0 where the policy is a language
        model."""
        if self.kind != "reward_model":
            return 0
        return max(len(self.reward_labels), 1)

    @property
    def longest_preference(self) -> int:
        """Tokens of a prompt with an answer; a reward model needs one more to be read at the
        last."""
        if self.kind == "reward_model":
            return self.rollout.max_model_len - 1
        return self.rollout.max_model_len

    @property
    def num_replicas(self) -> int:
        """Engines of the run: none where preferences are trained, since nothing is generated."""
        if self.trains_preferences:
            return 0
        return self.rollout.num_replicas

    @property
    def num_devices(self) -> int:
        """GPUs, or processes on a CPU, of trainer and engines."""
        rollout = self.rollout
        return self.trainer.num_ranks + self.num_replicas * rollout.num_workers

    @property
    def shares_gpus(self) -> bool:
        """Whether trainer and engines take turns on the same GPUs."""
        is_on_gpus = self.placement.gpus_per_node > 0
        return self.placement.mode == "colocated" and is_on_gpus and self.num_replicas > 0

    @property
    def engine_restarts(self) -> int:
        """Times that a server is started again. The trainer may have filled the GPUs that it shares
        with engines, so that a start would fail, or make the trainer fail."""
        if self.shares_gpus:
            return 0
        return self.rollout.max_restarts

    @property
    def trainer_restarts(self) -> int:
        """Times that training is started again while engines go on serving. Where they share GPUs,
        engines may have filled these, so that the trainer's start would fail."""
        if self.shares_gpus:
            return 0
        return self.trainer.max_restarts

    @property
    def trains(self) -> bool:
        """Whether a run of this kind changes the weights."""
        return self.kind in ("rl", "sft", "distil") or self.trains_preferences

    @property
    def has_own_critic(self) -> bool:
        """Whether a value model with weights of its own is trained beside the policy."""
        return self.critic is not None and self.critic.has_own_trunk

    @property
    def policy_has_value_head(self) -> bool:
        """Whether the policy has a head of values beside its output layer."""
        return self.critic is not None and not self.critic.has_own_trunk

    @property
    def takes_steps(self) -> bool:
        """Whether a run of this kind has steps, and an accuracy before the first of them."""
        return self.trains or self.kind == "experience"

    @property
    def step_roles(self) -> tuple[str, ...]:
        """Which of `STEP_ROLES` have a part in the steps of the run: engines have none where a data
        set is trained, rewards have none where preferences are."""
        roles = []
        if self.trains:
            roles.append("trainer")
        if self.takes_steps and not self.uses_dataset:
            roles.append("engines")
        if self.takes_steps and not self.trains_preferences:
            roles.append("rewards")
        return tuple(roles)

    @property
    def input_paths(self) -> dict[str, Path]:
        """What a run reads, by the key of the setting that names it: model, data sets, references,
        teachers, the critic's first weights."""
        paths = {"model.path": self.model.path}
        if self.lora is not None:
            paths["lora.path"] = self.lora.path
        if self.experience is not None:
            paths["experience.path"] = self.experience.path
        for number, domain in enumerate(self.domains):
            paths[f"domains.{number}.path"] = domain.path
        given = {key: path for key, path in paths.items() if path is not None}
        return {**given, **self.paths_of_other_models}

    @property
    def after_a_checkpoint(self) -> "RunConfig":
        """What a trainer goes by that goes on with a checkpoint, which has the adapters of the run:
        without those that the run began with."""
        if self.lora is None or self.lora.path is None:
            return self
        lora = self.lora.model_copy(update={"path": None})
        return self.model_copy(update={"lora": lora})

    @property
    def paths_of_other_models(self) -> dict[str, Path]:
        """Those of `input_paths` whose models are asked about the policy's tokens."""
        paths = {"preferences.reference": self.preferences.reference}
        if self.critic is not None:
            paths["critic.path"] = self.critic.path
        if self.distillation is not None:
            for number, teacher in enumerate(self.distillation.teachers):
                paths[f"distillation.teachers.{number}.path"] = teacher.path
        for number, domain in enumerate(self.domains):
            paths[f"domains.{number}.reference"] = domain.reference
        return {key: path for key, path in paths.items() if path is not None}

    @property
    def uses_dataset(self) -> bool:
        """Whether the responses of a data set are trained, not the policy's own samples."""
        if self.kind == "sft" or self.trains_preferences:
            return True
        return self.distillation is not None and self.distillation.samples == "dataset"

    @property
    def canary_tolerance(self) -> float:
        """Mean |trainer - engine| log-prob difference that rounding may explain."""
        if self.publish.canary_tolerance is not None:
            return self.publish.canary_tolerance
        if self.trainer.fp8 != "none" or self.rollout.fp8 != "none":
            return 0.3
        if self.trainer.precision == self.rollout.dtype == "float32":
            return 1e-4
        return 0.1

    @property
    def can_verify_from_samples(self) -> bool:
        """Whether a step's samples can be its canary: each is trained, the engine recorded for it
        sampled it, and training computes what that engine did, experts and all."""
        if self.kind != "rl" or not self.publish.canary:
            return False
        is_of_these_weights = self.batch.max_staleness == 0 and not self.correction
        computes_alike = self.routing.replay != "r3" and not self.rollout.truncation
        trains_all = self.objective.overlong == "none" and self.objective.subset == "none"
        engine_is_known = self.rollout.num_replicas == 1 or self.groups_stay_on_one_engine
        return is_of_these_weights and computes_alike and trains_all and engine_is_known

    @property
    def steps_sampled_at_once(self) -> int:
        """How many steps engines may be asked for together: two where rollouts run several steps
        ahead, publishes do not wait for them, and no prompt of a step is drawn by the answers of
        the one before; else one."""
        draws_by_answers = (
            self.sampling.dynamic
            or self.curriculum is not None
            or self.seeding is not None
            or self.allocation is not None
            or self.correction is not None
        )
        if self.batch.max_staleness < 2 or self.publish.pause == "wait" or draws_by_answers:
            return 1
        return 2

    @property
    def groups_stay_on_one_engine(self) -> bool:
        """Whether all samples of a prompt are one request."""
        return not self.rollout.deterministic and self.allocation is None

    @property
    def environment_servers(self) -> tuple[str, ...]:
        """The domain of every server of an environment, by the server's number."""
        found: list[str] = []
        for domain in self.domains:
            found += [domain.name] * domain.num_environment_servers
        return tuple(found)

    @property
    def domains_with_episodes(self) -> tuple[str, ...]:
        """Names of the domains whose prompts are answered in several turns: to an environment, or
        to a program."""
        return tuple(domain.name for domain in self.domains if domain.episodes is not None)

    @property
    def publish_carrier(self) -> Literal["gloo", "nccl", "ipc"]:
        """What carries weights, where they do not go through files.

        A GPU cannot be twice in a group of NCCL, so trainers that share theirs take IPC."""
        method = self.publish.method
        if method == "nccl" or method == "ipc":
            return method
        placement = self.placement
        if method == "file" or method == "gloo" or placement.gpus_per_node == 0:
            return "gloo"
        if placement.mode == "colocated":
            return "ipc"
        return "nccl"

    @property
    def adapter_domains(self) -> tuple[str, ...]:
        """Names of the domains that train adapters of their own; empty where all train the same, or
        the weights."""
        if self.lora is None or not self.lora.per_domain:
            return ()
        return tuple(domain.name for domain in self.domains)

    @property
    def engine_adapters(self) -> tuple[str, ...]:
        """What requests call the adapters that engines have beside the weights, slot by slot; empty
        where they get weights with the adapters in them."""
        if self.lora is None or self.lora.publish != "adapter":
            return ()
        if not self.adapter_domains:
            return (ENGINE_ADAPTER,)
        return tuple(adapter_name(domain) for domain in self.adapter_domains)

    def engine_adapter_of(self, domain: str) -> str:
        """Return what requests for a prompt of `domain` call their adapter; empty where engines
        have none."""
        if not self.engine_adapters:
            return ""
        if not self.adapter_domains:
            return ENGINE_ADAPTER
        return adapter_name(domain)

    @property
    def records_routes(self) -> bool:
        """Whether engines are asked for the experts of every token."""
        if self.num_replicas == 0:
            return False
        return self.rollout.record_routes or self.routing.replay == "r3"
