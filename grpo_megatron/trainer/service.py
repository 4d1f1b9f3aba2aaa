"""How a trainer executes each of `requests`. Every rank executes every request."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from msgspec.structs import replace

from grpo_megatron.algorithms.stats import Stats
from grpo_megatron.batching.store import SampleTable, StepDomain
from grpo_megatron.checkpoints import (
    distributed,
    fitting,
    hf_export,
    hf_import,
    reward_models,
)
from grpo_megatron.checkpoints.retention import ADAPTERS_FOLDER, WEIGHTS_FOLDER, is_torch_dist
from grpo_megatron.config.run import RunConfig
from grpo_megatron.errors import CheckpointError
from grpo_megatron.plan.hf_config import computation
from grpo_megatron.plan.model_facts import read_config
from grpo_megatron.plan.reward_labels import RewardHead
from grpo_megatron.trainer.checks import logprob_check
from grpo_megatron.trainer.checks.logprob_diff import (
    measure_logprob_diff,
    write_logprob_diff,
)
from grpo_megatron.trainer.lora import peft_format
from grpo_megatron.trainer.lora.domain_adapters import DomainAdapters
from grpo_megatron.trainer.megatron.model_config import why_not_share_prefixes
from grpo_megatron.trainer.megatron.platform import peak_memory_bytes
from grpo_megatron.trainer.megatron.policy import Policy, base_tensors, policy_of_run
from grpo_megatron.trainer.megatron.static_bytes import static_bytes_of
from grpo_megatron.trainer.megatron.upstream_fixes import create_adam_state
from grpo_megatron.trainer.model_sender import ModelSender, PublishedModel
from grpo_megatron.trainer.requests import (
    AnyRequest,
    CompareLogprobs,
    DescribeWeights,
    ExportModel,
    FindCorruptFiles,
    FinishCheckpoint,
    JoinTransfer,
    LoadCheckpoint,
    LogprobComparison,
    MeasureLogprobDiff,
    OpenTransfer,
    RenewReference,
    ResetOptimizer,
    SaveCheckpoint,
    ScoreAnswers,
    ScoreSteps,
    SendWeights,
    SnapshotReference,
    Stop,
    TakeAdapters,
    TakeWeights,
    Train,
    TrainColdStart,
    TrainReport,
)
from grpo_megatron.trainer.steps.answer_scores import answer_scores
from grpo_megatron.trainer.steps.critic import Critic, build_critic
from grpo_megatron.trainer.steps.joined_reports import joined_report
from grpo_megatron.trainer.steps.optimizer_step import logprob_pass, prepare, reduce_stats
from grpo_megatron.trainer.steps.preference_update import train_preferences
from grpo_megatron.trainer.steps.references import References
from grpo_megatron.trainer.steps.rl_update import Training
from grpo_megatron.trainer.steps.step_labels import step_logits
from grpo_megatron.trainer.steps.teachers import Teachers
from grpo_megatron.trainer.steps.token_update import train_tokens
from grpo_megatron.weights.fp8_model import Fp8Model
from grpo_megatron.weights.publish_plan import Kept, OpenedStream


def _with_exact_sharing(config: RunConfig, hf: dict[str, Any]) -> RunConfig:
    """Turn `trainer.share_prefixes` off, and say so, where it would not be exact."""
    problem = ""
    if config.trainer.share_prefixes:
        problem = why_not_share_prefixes(hf, config.routing.router_policy)
    if not problem:
        return config
    if dist.get_rank() == 0:
        print(f"trainer.share_prefixes is off: {problem}", flush=True)
    trainer = config.trainer.model_copy(update={"share_prefixes": False})
    return config.model_copy(update={"trainer": trainer})


class TrainerService:
    """The policy, started from a Hugging Face directory, and what the controller may ask of it.

    Raises ConfigError or CheckpointError for a directory that is no checkpoint, or one of a model
    that is not supported. Every method is collective."""

    def __init__(self, config: RunConfig, model_path: Path):
        hf = read_config(model_path)
        if config.kind == "reward_model":
            reward_models.refuse_other_labels(hf, config.reward_labels, model_path)
        config = _with_exact_sharing(config, hf)
        self.config = config
        self.model_path = model_path
        self._is_cold = config.cold_start is not None
        """Whether the policy is what a cold start trains: the weights alone."""
        self.policy = self._build_policy(hf)
        self.model_sender = ModelSender(
            self._published_weights(), config.publish, config.publish_carrier
        )
        self.adapter_sender: ModelSender | None = None
        self.load_hf(model_path)
        self.policy.begin_magnitudes()
        if self.policy.lora is not None and self.policy.lora.path is not None:
            self.take_adapters(self.policy.lora.path)
        self.references = References(config)
        if self.references.wanted:
            self.references.read_files(self.policy, self.load_hf)
        self.domain_adapters: DomainAdapters | None = None
        self._begin_adapters()
        self.critic: Critic | None = None
        if config.critic is not None and config.has_own_critic:
            self.critic = build_critic(config, config.critic, self.policy)
        self._pending: distributed.PendingCheckpoint | None = None
        self.teachers: Teachers | None = None
        if config.distillation is not None:
            self.teachers = Teachers(config, config.distillation, self._load_model)

    def _build_policy(self, hf: dict[str, Any]) -> Policy:
        """Make what is trained next."""
        return policy_of_run(self.config, hf, is_cold=self._is_cold)

    def execute(self, request: AnyRequest) -> Any:
        """Return the answer of `request`, of the type that its class names."""
        match request:
            case Train():
                return self.train(request)
            case TrainColdStart(directory=directory, first_update=first_update):
                return self.train_cold_start(directory, first_update)
            case ResetOptimizer(cold_start=cold_start):
                return self.reset_optimizer(cold_start=cold_start)
            case SnapshotReference():
                return self.snapshot_reference()
            case RenewReference(after=step):
                return self.renew_reference(step)
            case TakeWeights(directory=directory):
                return self.load_hf(directory)
            case TakeAdapters(directory=directory):
                return self.take_adapters(directory)
            case ScoreAnswers(directory=directory, with_adapters=with_adapters):
                return self.score_answers(directory, with_adapters=with_adapters)
            case ScoreSteps(directory=directory):
                return step_logits(self.config, self.policy, _table(directory))
            case CompareLogprobs(directory=directory):
                return self.compare_logprobs(directory)
            case MeasureLogprobDiff():
                return self.measure_logprob_diff(request)
            case SaveCheckpoint(directory=directory, state=state, beside=beside):
                self.save(directory, state)
                if not beside:
                    self.finish_checkpoint(wait=True)
                return None
            case FinishCheckpoint(wait=wait):
                return self.finish_checkpoint(wait=wait)
            case LoadCheckpoint(directory=directory):
                return self.load(directory)
            case FindCorruptFiles(directory=directory):
                return corrupt_files(directory)
            case ExportModel(directory=directory, answer_ends=answer_ends):
                return self.export(directory, answer_ends)
            case DescribeWeights(adapters=adapters):
                if adapters and self.adapter_sender is None:
                    return []
                return self._sender(adapters=adapters).tensors()
            case OpenTransfer(kept=kept, adapters=adapters):
                return self._open_transfer(kept, adapters=adapters)
            case JoinTransfer(adapters=adapters):
                return self._sender(adapters=adapters).join()
            case SendWeights(version=version, adapters=adapters):
                if self.domain_adapters is not None:
                    self.domain_adapters.refresh()
                return self._sender(adapters=adapters).send(version)
            case Stop():  # whoever reads requests ends with this one
                return None

    def _published_weights(self) -> PublishedModel:
        """Return the weights that a publish sends: with the adapters in them, unless engines get
        these apart; in FP8 where engines keep them so."""
        if self.config.rollout.fp8 != "none":
            return Fp8Model(self.policy.sharded)
        if self.config.engine_adapters:
            return self.policy.base
        return self.policy.sharded

    def _begin_adapters(self) -> None:
        """Let the adapters that the policy has, if any, be those of every domain that is to have
        its own, and make what sends them, where engines get them apart from the weights."""
        if self.policy.lora is None:
            return
        domains = self.config.adapter_domains
        if domains:
            self.domain_adapters = DomainAdapters(self.policy, domains)
        if not self.config.engine_adapters:
            return
        if self.domain_adapters is None:
            adapters = peft_format.adapter_model(self.policy)
        else:
            adapters = self.domain_adapters.published()
        self.adapter_sender = ModelSender(
            adapters, self.config.publish, self.config.publish_carrier
        )

    def _sender(self, *, adapters: bool) -> ModelSender:
        """Return what sends weights, or the policy's adapters."""
        if not adapters:
            return self.model_sender
        assert self.adapter_sender is not None  # `DescribeWeights` said that there are some
        return self.adapter_sender

    def _open_transfer(self, kept: Sequence[Kept], *, adapters: bool) -> list[OpenedStream]:
        """Plan a transfer and listen for the engines, which have one connection at a time."""
        for sender in (self.model_sender, self.adapter_sender):
            if sender is not None:
                sender.close()
        return self._sender(adapters=adapters).open(kept)

    def load_hf(self, directory: Path) -> None:
        """Read a Hugging Face checkpoint; a converted one, or one of a run, serves as well.

        Raises CheckpointError where it is of another model or cannot be read."""
        self._load_model(directory)
        self.policy.optimizer.reload_model_params()  # its fp32 copies follow

    def _load_model(self, directory: Path) -> None:
        if computation(read_config(directory)) != computation(self.policy.hf):
            raise CheckpointError(
                "its config.json computes something else than the policy's",
                where=str(directory),
                remedy="give the same architecture",
            )
        if is_torch_dist(directory):
            if distributed.read_state(directory).get("lora"):
                raise CheckpointError(
                    "the checkpoint is of a run with adapters, which are not weights",
                    where=str(directory),
                    remedy="give that run's export, or convert the checkpoint: grpo-megatron "
                    "convert to-hf (--domain, where domains have adapters of their own)",
                )
            distributed.load_model(directory / "weights", self.policy.chunks, weights_alone=True)
        else:
            hf_import.import_weights(self.policy.sharded, directory)

    def score_answers(self, directory: Path, *, with_adapters: bool) -> list[float]:
        """Return the sum of log-probs of each recorded answer; by the weights alone where the
        policy's adapters are to be left out."""
        table = _table(directory)
        with contextlib.ExitStack() as stack:
            if not with_adapters:
                stack.enter_context(self.policy.without_adapters())
            found: list[float] = answer_scores(self.config, self.policy, table).tolist()
        return found

    def take_adapters(self, directory: Path) -> None:
        """Read adapters in PEFT's format. Raises CheckpointError as `import_adapters`."""
        peft_format.import_adapters(self.policy, directory)
        self.policy.optimizer.reload_model_params()  # its fp32 copies follow

    def train(self, request: Train) -> TrainReport:
        """Take all optimizer steps of a recorded step; afterwards renew the reference, if due."""
        table = _table(request.directory)
        if self.config.adapter_domains:
            report = self._train_domains(request, table)
        elif self.config.kind == "rl":
            report = self._train_rl(request, table, request.state)
        elif self.config.trains_preferences:
            report = train_preferences(
                self.config, self.policy, table, request.first_update, request.num_updates
            )
        else:
            report = train_tokens(
                self.config,
                self.policy,
                table,
                self.config.optimizer,
                request.first_update,
                request.num_updates,
                self.teachers,
            )
        self.renew_reference(table.manifest.step)
        report.metrics["trainer/peak_memory_gib"] = peak_memory_bytes() / 2**30
        return replace(report, memory=self._memory())

    def _train_rl(
        self, request: Train, table: SampleTable, state: Mapping[str, Any]
    ) -> TrainReport:
        """Take the optimizer steps of `table`, after which the objective had learned `state`."""
        training = Training(
            self.config,
            self.policy,
            self.references,
            table,
            state,
            replayed=request.replayed,
            exact=request.exact,
            critic=self.critic,
        )
        return training.run(request.first_update, request.num_updates)

    def _train_domains(self, request: Train, table: SampleTable) -> TrainReport:
        """Take the optimizer steps of every domain that the step has samples of, one domain after
        the other, each with adapters, optimizer state and objective of its own."""
        reports = {}
        for of_domain in self._computed_apart(table):
            state = request.state.get(of_domain.domain_name, {})
            reports[of_domain.domain_name] = self._train_rl(request, of_domain, state)
        return joined_report(reports, request.state)

    def _computed_apart(self, table: SampleTable) -> Iterator[SampleTable]:
        """Yield what is recorded as it is computed: the whole table; or, where domains have
        adapters of their own, each domain's part, while the policy has its adapters. Collective."""
        if self.domain_adapters is None:
            yield table
            return
        for number, name in enumerate(self.domain_adapters.domains):
            if not (table.domain == number).any():
                continue
            self.domain_adapters.take(name)
            yield SampleTable(table.directory, verify=False, domain=StepDomain(number, name))

    def renew_reference(self, step: int) -> None:
        """Let the reference follow the policy, if that is due after a step of the run."""
        interval = self.config.objective.reference_interval
        is_due = interval > 0 and (step + 1) % interval == 0
        if is_due and self.references.wanted:
            self.references.refresh(self.policy)

    def _memory(self) -> dict[str, dict[str, int]]:
        """Return bytes of this rank's models by component, counted on their tensors."""
        static = static_bytes_of(self.policy)
        if self.domain_adapters is not None:
            static = dataclasses.replace(static, adapters=self.domain_adapters.num_bytes)
        found = {"policy": static.parts}
        if self.critic is not None:
            found["critic"] = static_bytes_of(self.critic.model).parts
        return found

    def snapshot_reference(self) -> None:
        """Let the policy as it is now, when RL begins, be its own reference, and the critic begin.

        Raises CheckpointError where the critic has a checkpoint of its own that cannot be read."""
        if self.references.wanted:
            self._begin_reference()
        if self.critic is not None:
            self.critic.begin(self.policy)

    def _begin_reference(self) -> None:
        """Let the policy as it is now be the reference; where domains have adapters of their own,
        the model without any, which is what they began as."""
        if self.domain_adapters is None:
            self.references.snapshot(self.policy)
        else:
            self.references.begin_with_base()

    def train_cold_start(self, directory: Path, first_update: int) -> TrainReport:
        """Take one supervised optimizer step per update of the recorded step, at temperature 1 as
        kind sft does: `rollout.temperature` is that of sampling, and nobody sampled these."""
        settings = self.config.cold_start
        assert settings is not None  # only a cold start asks for it
        with self.policy.at_temperature(1.0):
            return train_tokens(
                self.config,
                self.policy,
                _table(directory),
                settings.optimizer,
                first_update,
                settings.max_steps,
            )

    def compare_logprobs(self, directory: Path) -> LogprobComparison:
        """Compute an engine's samples with this policy, and compare (see `logprob_check`)."""
        table = SampleTable(directory, verify=False)
        stats = Stats()
        for part in self._computed_apart(table):
            stats.add(self._compared_logprobs(part))
        stats = reduce_stats(stats)
        return LogprobComparison(
            problem=logprob_check.disagreement(self.config, table, stats),
            remedy=logprob_check.REMEDY,
            metrics=stats.result(),
        )

    def _compared_logprobs(self, table: SampleTable) -> Stats:
        """Return how far the log-probs of a table's engines are from those of the policy."""
        stats = Stats()
        batch = prepare(self.config.trainer, table, np.arange(len(table)))
        for part, output in zip(batch.microbatches, logprob_pass(self.policy, batch), strict=True):
            if output.numel():
                logprobs = output[0]
                logprob_diff = logprobs - part.rollout_logprobs
                compared = logprob_check.compare(
                    self.config, table, part.table_rows, logprobs, logprob_diff
                )
                stats.add(compared)
        return stats

    def measure_logprob_diff(self, request: MeasureLogprobDiff) -> dict[str, float]:
        """Write log-probs of a recorded step under several routings; returns metrics of routing."""
        table = _table(request.directory)
        parts = []
        for part in self._computed_apart(table):
            state = request.state
            if part.domain_name:
                state = state.get(part.domain_name, {})
            diff = measure_logprob_diff(
                self.config, self.policy, part, by_layer=request.by_layer, state=state
            )
            parts.append((part, diff))
        return write_logprob_diff(request.to, table, parts)

    def reset_optimizer(self, *, cold_start: bool) -> None:
        """Drop all moments; take the settings of the cold start or of RL."""
        if cold_start:
            assert self.config.cold_start is not None
            self.policy.reset_optimizer(self.config.cold_start.optimizer)
            return
        self._end_cold_start()
        self.policy.reset_optimizer(self.config.optimizer)
        if self.domain_adapters is not None:
            create_adam_state(self.policy.optimizer)  # for `DomainAdapters.take`

    def _end_cold_start(self) -> None:
        """Put the adapters and the value head that RL trains beside the weights that the cold start
        has trained."""
        was_cold = self._is_cold
        self._is_cold = False
        is_as_it_was = self.config.lora is None and not self.config.policy_has_value_head
        if is_as_it_was or not was_cold:
            return
        trained = self.policy
        self.policy = self._build_policy(trained.hf)
        with torch.no_grad():
            for tensor, value in zip(base_tensors(self.policy), base_tensors(trained), strict=True):
                tensor.copy_(value)
        self.policy.begin_magnitudes()
        trained.release()
        self.model_sender.model = self._published_weights()
        self._begin_adapters()

    def export(self, directory: Path, answer_ends: Collection[int] = ()) -> int:
        """Write the policy as a Hugging Face checkpoint, adapters merged into its weights; they
        themselves are written beside it, in PEFT's format. Where domains have adapters of their own
        each has a folder in both. answer_ends: of a reward model, see `mark_as_reward_model`.
        Returns the bytes of weights written.

        Raises what `export_model` does."""
        if self.domain_adapters is None:
            return self._export(directory, directory.with_name("adapter"), answer_ends)
        num_bytes = 0
        for domain in self.domain_adapters.domains:
            self.domain_adapters.take(domain)
            num_bytes += self._export(directory / domain, directory.with_name("adapter") / domain)
        return num_bytes

    def _export(
        self, directory: Path, adapter_directory: Path, answer_ends: Collection[int] = ()
    ) -> int:
        """Write the policy as it is, and its adapters, as `export` does."""
        num_bytes = hf_export.export_model(
            self.policy.sharded, directory, self.model_path, mark=self._mark(answer_ends)
        )
        if self.policy.lora is not None:
            base = self.config.model.path or Path(str(self.config.model.preset))
            peft_format.export_adapters(self.policy, adapter_directory, str(base))
        return num_bytes

    def _mark(self, answer_ends: Collection[int] | None) -> Callable[[Path], None] | None:
        """Return what lets a config.json say that the policy is a reward model; None where it is
        none. answer_ends: see `mark_as_reward_model`."""
        if self.config.kind != "reward_model":
            return None
        return functools.partial(
            reward_models.mark_as_reward_model,
            head=RewardHead.of_run(self.config),
            answer_ends=answer_ends,
        )

    def save(self, directory: Path, state: dict[str, Any]) -> None:
        """Begin to write a checkpoint, and `state` with it, after the one before is finished.

        Raises SetupError when the disk is full."""
        self.finish_checkpoint(wait=True)
        policy = self.policy
        reference = self.references.save(policy, directory)
        state = {**state, "reference": reference, **self._state_of_adapters()}
        if self.config.policy_has_value_head and not self._is_cold:
            state[fitting.VALUE_HEAD] = True
        if self.critic is not None:
            state[fitting.CRITIC] = True
        self._pending = distributed.PendingCheckpoint(
            directory,
            self._checkpoint_parts(),
            state,
            self.model_path,
            self._mark(answer_ends=None),
        )

    def _checkpoint_parts(self) -> Iterator[distributed.Part]:
        """Yield what a checkpoint is made of; the policy has the adapters that a part is about
        until the next one is asked for."""
        create_adam_state(self.policy.optimizer)  # it has none before its first step
        if self.domain_adapters is None:
            yield distributed.Part(WEIGHTS_FOLDER, self.policy.chunks, self.policy.optimizer)
        else:
            yield distributed.Part(WEIGHTS_FOLDER, self.policy.chunks, holds="weights")
            for domain in self.domain_adapters.domains:
                self.domain_adapters.take(domain)
                yield self._part_of_domain(domain)
        if self.critic is not None:
            model = self.critic.model
            create_adam_state(model.optimizer)
            yield distributed.Part(distributed.CRITIC, model.chunks, model.optimizer)

    def _part_of_domain(self, domain: str) -> distributed.Part:
        """Describe the adapters of a domain, which the policy has."""
        return distributed.Part(
            f"{ADAPTERS_FOLDER}/{domain}",
            self.policy.chunks,
            self.policy.optimizer,
            holds="adapters",
        )

    def _state_of_adapters(self) -> dict[str, Any]:
        """Return what a checkpoint says of adapters, beside the adapters themselves: nothing where
        the weights are trained."""
        if self.policy.lora is None:
            return {}
        state: dict[str, Any] = {
            fitting.LORA: self.policy.lora.identity(),
            "reference_is_base": self.references.start_is_base,
        }
        if self.domain_adapters is not None:
            state[fitting.ADAPTER_DOMAINS] = list(self.domain_adapters.domains)
        return state

    def finish_checkpoint(self, *, wait: bool) -> bool:
        """Finish the checkpoint that `save` began, unless it is being written and may not be waited
        for; returns whether none is left.

        Raises SetupError where it could not be written."""
        pending = self._pending
        if pending is None:
            return True
        if not wait and not pending.is_written():
            return False
        self._pending = None
        pending.finish()
        return True

    def load(self, directory: Path) -> dict[str, Any]:
        """Restore what `save` wrote, and return its `state`.

        Raises CheckpointError where it is incomplete, or of another model."""
        state = distributed.read_state(directory)
        fitting.refuse_unfitting(self.config, state, directory, is_cold=self._is_cold)
        reference = state.pop("reference", None)
        reference_is_base = state.pop("reference_is_base", False)
        has_adapters = state.pop(fitting.LORA, None) is not None
        state.pop(fitting.ADAPTER_DOMAINS, None)
        has_critic = state.pop(fitting.CRITIC, False)
        has_value_head = state.pop(fitting.VALUE_HEAD, False)
        if has_adapters or (has_value_head and self.config.policy_has_value_head):
            self._end_cold_start()
        policy = self.policy
        if reference_is_base:
            self.references.begin_with_base()
        elif reference:
            self.references.load(policy, directory, reference)
        if self.domain_adapters is not None:
            self._load_domain_adapters(self.domain_adapters, directory)
        elif self.config.trains:
            create_adam_state(policy.optimizer)  # to load into
            distributed.load_checkpoint(
                directory,
                distributed.Part(WEIGHTS_FOLDER, policy.chunks, policy.optimizer),
            )
            policy.apply_settings()
        else:  # a run that trained, and now evaluates or samples
            distributed.load_model(directory / WEIGHTS_FOLDER, policy.chunks)
        if self.critic is not None:
            self._load_critic(self.critic, directory, is_there=has_critic)
        is_known = reference_is_base or reference
        if self.references.wanted and not is_known:  # the objective is another one since
            self._begin_reference()
        return state

    def _load_domain_adapters(self, adapters: DomainAdapters, directory: Path) -> None:
        """Restore the weights and the adapters of every domain."""
        policy = self.policy
        weights = directory / WEIGHTS_FOLDER
        distributed.load_model(weights, policy.chunks, weights_alone=True)
        for domain in adapters.domains:
            adapters.take(domain)
            create_adam_state(policy.optimizer)  # to load into
            distributed.load_checkpoint(directory, self._part_of_domain(domain))
            policy.apply_settings()

    def _load_critic(self, critic: Critic, directory: Path, *, is_there: bool) -> None:
        """Restore the critic of a checkpoint; in one from before the first RL step it may be
        missing, and begins as in a new run.

        Raises CheckpointError as `Critic.begin` does."""
        if not is_there:
            critic.begin(self.policy)
            return
        create_adam_state(critic.model.optimizer)  # to load into
        model = critic.model
        distributed.load_checkpoint(
            directory, distributed.Part(distributed.CRITIC, model.chunks, model.optimizer)
        )
        model.apply_settings()


def corrupt_files(directory: Path) -> list[str]:
    """Name the files of a checkpoint that are not as written, below the checkpoints' directory;
    where these are whole, those of the reference that it names. Collective."""
    names = distributed.corrupt_files(directory)
    if names:
        return [f"{directory.name}/{name}" for name in names]
    reference = distributed.read_state(directory).get("reference")
    if not reference:
        return []
    names = distributed.corrupt_files(directory.with_name(reference))
    return [f"{reference}/{name}" for name in names]


def _table(directory: Path) -> SampleTable:
    """Open a recorded step; one rank verifies it for all."""
    return SampleTable(directory, verify=dist.get_rank() == 0)
