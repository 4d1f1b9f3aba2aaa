"""The critic of PPO: a value model of its own, trained beside the policy on the same micro-batches,
or a head on the policy's own layers, trained with them.

A model of its own is the policy's layers with a scalar head (`RewardHead`) in the place of the
output layer, at the same layout. The scalar at the position before a policy token is V of that
token's state. Values are computed when a step is trained, with the critic's weights of then: none
is older than its step."""

from collections.abc import Sequence
from pathlib import Path

import torch

from grpo_megatron.algorithms.batch import SampleBatch, ValueTargets
from grpo_megatron.algorithms.stats import MetricRecorder, Stats
from grpo_megatron.algorithms.value_loss import value_losses
from grpo_megatron.checkpoints.hf_import import import_weights
from grpo_megatron.config.critic import CriticConfig
from grpo_megatron.config.run import RunConfig
from grpo_megatron.device_copies import to_device
from grpo_megatron.errors import CheckpointError
from grpo_megatron.plan import critic_model
from grpo_megatron.plan.model_facts import read_config
from grpo_megatron.trainer.megatron.policy import Policy, build_policy
from grpo_megatron.trainer.steps.microbatch import MicroBatch, UpdateBatch
from grpo_megatron.trainer.steps.optimizer_step import (
    LossFunction,
    apply_gradients,
    compute_gradients,
    logprob_pass,
)

_GRAD_NORM = "grad/norm"
_OF_THE_CRITIC = "critic/"


class Critic:
    """A value model with its optimizer.

    Attributes:
        settings: `[critic]`.
        model: A `Policy` by type, whose first output row are values."""

    def __init__(self, settings: CriticConfig, model: Policy):
        self.settings = settings
        self.model = model

    def begin(self, policy: Policy) -> None:
        """Take over the weights of `[critic] path`, or without it those of the policy's layers; a
        head that neither has stays as it is. Collective.

        Raises CheckpointError where the checkpoint is of another model or cannot be read."""
        if self.settings.path is None:
            self._copy_layers(policy)
        else:
            self._read(self.settings.path)
        self.model.optimizer.reload_model_params()

    def _read(self, directory: Path) -> None:
        """Read a checkpoint, whose sizes are known by now also where a tokenizer decides some."""
        problem = critic_model.difference(read_config(directory), self.model.hf)
        if problem:
            raise CheckpointError(problem, where=str(directory), remedy=critic_model.REMEDY)
        import_weights(self.model.sharded, directory)

    def _copy_layers(self, policy: Policy) -> None:
        with torch.no_grad():
            for own, theirs in zip(self.model.models, policy.models, strict=True):
                weights = {**dict(theirs.named_parameters()), **dict(theirs.named_buffers())}
                for name, tensor in (*own.named_parameters(), *own.named_buffers()):
                    if name in weights:
                        tensor.copy_(weights[name])

    def is_warming_up(self, step: int) -> bool:
        """Whether the critic alone is trained in a step of the run."""
        return step < self.settings.warmup_steps

    def compute_values(self, updates: Sequence[UpdateBatch]) -> None:
        """Put the values of all policy tokens into `MicroBatch.values`. Collective."""
        for update in updates:
            outputs = logprob_pass(self.model, update)
            for microbatch, output in zip(update.microbatches, outputs, strict=True):
                microbatch.values = output[0]

    def train(
        self,
        update: UpdateBatch,
        batch: SampleBatch,
        targets: ValueTargets,
        rate: float,
        domains: Sequence[str],
        *,
        is_last: bool,
    ) -> Stats:
        """Take one optimizer step on the tokens of an update that count; without such tokens, none.

        rate: learning rate; is_last: no other step follows, so that the weights are read next.
        Returns metrics, equal on all ranks. Raises TrainerError as `apply_gradients` does.
        Collective."""
        num_counted = num_counted_tokens(update, batch, targets)
        if num_counted == 0:
            if is_last:  # the update before this one may have left the weights ungathered
                self.model.gather_weights()
            return Stats()
        self.model.set_learning_rate(rate)
        loss = ValueLoss(self.settings, batch, targets, num_counted, domains)
        stats = compute_gradients(self.model, update, loss)
        stats = apply_gradients(self.model, stats, gather=is_last)
        return _without_policy_names(stats)


def num_counted_tokens(update: UpdateBatch, batch: SampleBatch, targets: ValueTargets) -> int:
    """Return how many tokens of an update teach the critic, on all ranks together."""
    return int(targets.is_counted[batch.flat_index(update.episodes)].sum())


class ValueLoss:
    """A `LossFunction`: the mean value loss over the tokens of an optimizer step that count. Values
    are the first row of its output.

    num_counted: these tokens, of all ranks and micro-batches; without any, the loss is 0."""

    def __init__(
        self,
        settings: CriticConfig,
        batch: SampleBatch,
        targets: ValueTargets,
        num_counted: int,
        domains: Sequence[str],
    ):
        self._settings = settings
        self._batch = batch
        self._targets = targets
        self._num_counted = num_counted
        self._domains = domains

    def __call__(self, microbatch: MicroBatch, output: torch.Tensor) -> tuple[torch.Tensor, Stats]:
        """Return the micro-batch's loss and metrics. output: fp32 [1 or more, n]."""
        values = output[0]
        samples = torch.from_numpy(microbatch.episodes)
        index = self._batch.flat_index(samples)
        targets = self._targets
        is_counted = to_device(targets.is_counted[index], values.device)
        losses, is_clipped = value_losses(
            values,
            to_device(targets.old[index].float(), values.device),
            to_device(targets.returns[index].float(), values.device),
            self._settings.value_clip,
        )
        losses = torch.where(is_counted, losses, 0.0)
        domain = to_device(self._batch.domains[samples], values.device)
        meter = MetricRecorder(domain[microbatch.sample], domain, self._domains)
        meter.set_mean("critic/loss", losses, where=is_counted)
        meter.set_mean("critic/clip_fraction", is_clipped.double(), where=is_counted)
        return losses.sum() / max(self._num_counted, 1), meter.stats


class PolicyAndValueLoss:
    """A `LossFunction` of layers that policy and critic share: `policy loss + weight * value loss`.

    Its output is the policy's, and a last row of values."""

    def __init__(self, policy: LossFunction, value: LossFunction, weight: float):
        self._policy = policy
        self._value = value
        self._weight = weight

    def __call__(self, microbatch: MicroBatch, output: torch.Tensor) -> tuple[torch.Tensor, Stats]:
        """Return the micro-batch's loss and metrics. output: fp32 [3 or 4, n]."""
        policy_loss, stats = self._policy(microbatch, output[:-1])
        value_loss, of_values = self._value(microbatch, output[-1:])
        stats.add(of_values)
        return policy_loss + self._weight * value_loss, stats


def _without_policy_names(stats: Stats) -> Stats:
    """Rename the metrics of an optimizer step that have the names of the policy's."""
    stats.means["critic/grad_norm"] = stats.means[_GRAD_NORM]
    stats.units["critic/grad_norm"] = stats.units[_GRAD_NORM]
    found = Stats()
    for name, sum_and_count in stats.means.items():
        if name.startswith(_OF_THE_CRITIC):
            found.means[name] = sum_and_count
            found.units[name] = stats.units[name]
    return found


def build_critic(config: RunConfig, settings: CriticConfig, policy: Policy) -> Critic:
    """Make the critic of a policy, which begins with its weights; the head is drawn from the run's
    seed. What `[critic] path` names is not read before RL begins (`Critic.begin`), since a resume
    needs none of it. Collective."""
    model = build_policy(
        policy.hf,
        config.trainer,
        settings.optimizer,
        router_policy=config.routing.router_policy,
        seed=config.seed,
        num_scalars=1,
    )
    critic = Critic(settings, model)
    if settings.path is None:
        critic.begin(policy)
    return critic
