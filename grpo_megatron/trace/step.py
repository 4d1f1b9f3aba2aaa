"""One optimizer step of a recipe on one rank: the trainer's own code, traced."""

import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

from grpo_megatron.trace.rank import as_rank  # isort: skip  # before Megatron

from grpo_megatron.batching.store import SampleTable
from grpo_megatron.config.run import RunConfig
from grpo_megatron.config.trainer import TrainerConfig
from grpo_megatron.plan.memory import vocabulary_of
from grpo_megatron.plan.model_facts import configuration_of, facts_from_hf
from grpo_megatron.routing.shape import RouteShape
from grpo_megatron.trace.collectives import Collective
from grpo_megatron.trace.kernels import compiled_kernels, fused_kernels
from grpo_megatron.trace.loads import Load, stage_and_place
from grpo_megatron.trace.memory import Peak
from grpo_megatron.trace.mode import Pass, TraceMode
from grpo_megatron.trace.routing import balanced_routes
from grpo_megatron.trace.samples import write_full_step
from grpo_megatron.trace.values import DEVICE
from grpo_megatron.trainer.lora.domain_adapters import DomainAdapters
from grpo_megatron.trainer.megatron.policy import Policy, policy_of_run
from grpo_megatron.trainer.megatron.static_bytes import StaticBytes, static_bytes_of
from grpo_megatron.trainer.megatron.upstream_fixes import create_adam_state
from grpo_megatron.trainer.steps import optimizer_step, preference_update, token_update
from grpo_megatron.trainer.steps.references import References
from grpo_megatron.trainer.steps.rl_update import Training


@dataclass
class RankTrace:
    """What was seen of one rank."""

    rank: int
    stage: int
    load: Load
    static: StaticBytes
    peak: Peak
    collectives: list[Collective]
    passes: list[Pass]
    num_operators: int


@contextmanager
def building(layout: TrainerConfig, rank: int) -> Iterator[None]:
    """Let this process be a rank on whose device everything lies, without memory, in the block.

    For what only builds models there; `trace_rank` also runs them."""
    with as_rank(layout, rank, on_gpu=False), TraceMode(boundary=()), DEVICE:
        yield


def trace_rank(config: RunConfig, rank: int, load: Load) -> RankTrace:
    """Build the policy of `rank` and take one optimizer step.

    Its rows are full of samples that share nothing, which is what takes the most memory."""
    layout = config.trainer.model_copy(update={"share_prefixes": False})
    config = config.model_copy(update={"trainer": layout})
    on_gpu = config.placement.gpus_per_node > 0
    hf = dict(configuration_of(config.model)[0])
    hf["vocab_size"] = vocabulary_of(hf, config.model)
    with ExitStack() as stack:
        stack.enter_context(as_rank(layout, rank, on_gpu=on_gpu))
        gathers_keys = layout.context_parallel_size > 1
        stack.enter_context(fused_kernels(on_gpu=on_gpu, gathers_keys=gathers_keys))
        stack.enter_context(balanced_routes())
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        table = write_full_step(
            folder / "step_000000",
            config,
            load.num_microbatches * load.samples_per_microbatch * layout.dp,
            load,
            vocab_size=hf["vocab_size"],
            route_shape=_route_shape(config, hf),
        )
        if not on_gpu:  # where host and device are one
            stack.enter_context(DEVICE)
        mode = TraceMode(_boundary(config, hf, load))
        if on_gpu:
            stack.enter_context(compiled_kernels(mode))
        stack.enter_context(_phases(mode))
        stack.enter_context(mode)
        with mode.places.during("build"), DEVICE:  # moved there, parameters lose their marks
            policy = _build(config, hf)
            adapters: DomainAdapters | None = None
            if config.adapter_domains and policy.lora is not None:
                adapters = DomainAdapters(policy, config.adapter_domains)
        static = static_bytes_of(policy)
        if adapters is not None:
            static = replace(static, adapters=adapters.num_bytes)
        for number, model in enumerate(policy.models):
            mode.places.follow(model, f"chunk {number}" if len(policy.models) > 1 else "")
        with mode.places.during("step"):
            _train(config, policy, table)
        stage, _ = stage_and_place(layout, rank)
        return RankTrace(
            rank,
            stage,
            load,
            static,
            mode.memory.peak,
            mode.collectives,
            mode.passes,
            mode.num_operators,
        )


def _build(config: RunConfig, hf: dict[str, Any]) -> Policy:
    policy = policy_of_run(config, hf, is_cold=config.cold_start is not None)
    create_adam_state(policy.optimizer)  # there from the second step on
    policy.gather_weights()  # as at the end of every update
    return policy


def _train(config: RunConfig, policy: Policy, table: SampleTable) -> None:
    if config.trains_preferences:  # a later update than the first, which looks at the reference
        preference_update.train_preferences(config, policy, table, 1, 2)
        return
    if config.kind != "rl":
        token_update.train_tokens(config, policy, table, config.optimizer, 0, 1)
        return
    references = References(config)
    if references.wanted and policy.lora is not None:
        references.begin_with_base()
    elif references.wanted:
        references.snapshot(policy)
    Training(config, policy, references, table, {}).run(0, 1)


def _route_shape(config: RunConfig, hf: dict[str, Any]) -> RouteShape | None:
    if not config.records_routes:
        return None
    facts = facts_from_hf(hf)
    return RouteShape(facts.moe_layers, facts.num_experts_per_token, facts.num_experts)


def _boundary(config: RunConfig, hf: dict[str, Any], load: Load) -> tuple[int, int, int]:
    """Shape of what one pipeline stage hands to the next: [tokens, 1, hidden]."""
    layout = config.trainer
    tokens = load.padded_tokens // layout.context_parallel_size
    if layout.sp:
        tokens //= layout.tensor_parallel_size
    return (tokens, 1, hf["hidden_size"])


@contextmanager
def _phases(mode: TraceMode) -> Iterator[None]:
    """Name the trainer's passes, and answer for ranks that have what this one has not."""
    with ExitStack() as stack:
        for name, phase in _PHASES.items():
            stand_in = _named(getattr(optimizer_step, name), phase, mode)
            for module in (optimizer_step, preference_update):
                if hasattr(module, name):
                    stack.enter_context(mock.patch.object(module, name, stand_in))
        stack.enter_context(mock.patch.object(optimizer_step, "all_gathered", _stats_of_one))
        yield


_PHASES = {
    "logprob_pass": "log-probs",
    "compute_gradients": "gradients",
    "apply_gradients": "update",
}


def _named(function: Callable[..., Any], phase: str, mode: TraceMode) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        if phase != "update":
            mode.passes.append(Pass(phase, len(args[1].microbatches)))
        with mode.places.during(phase):
            return function(*args, **kwargs)

    return call


def _stats_of_one(value: Any) -> list[Any]:
    """Metrics of the step: this rank's, or a loss where only other ranks have one."""
    numbers, _ = value
    if numbers is not None:
        return [value]
    return [(({"loss/value": [1.0, 0.0]}, {}, {}), {"loss/value": "sum"})]
