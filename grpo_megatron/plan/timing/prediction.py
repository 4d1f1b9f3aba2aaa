"""What a recipe's step takes: seconds of every phase, what they amount to, and what to enlarge."""

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from grpo_megatron.config.passes import has_reference, num_whole_passes
from grpo_megatron.config.run import RunConfig
from grpo_megatron.errors import ConfigError
from grpo_megatron.plan.fp8_weights import NUMBER_BYTES
from grpo_megatron.plan.memory import (
    Plan,
    engine_layout,
    offloads_optimizer,
    policy_sizes,
    samples_of_step,
    vocabulary_of,
    whole_model,
)
from grpo_megatron.plan.model_facts import configuration_of
from grpo_megatron.plan.published_staleness import PublishedRange, published_range
from grpo_megatron.plan.timing.constants import CPU, Constants, sources
from grpo_megatron.plan.timing.generation import EngineLoad, generation_seconds
from grpo_megatron.plan.timing.lengths import Lengths, log_normal, read_lengths
from grpo_megatron.plan.timing.staleness import (
    Flow,
    FlowSeconds,
    Forecast,
    forecast,
    slots_of,
    spread_answers,
)
from grpo_megatron.plan.timing.step import StepSeconds
from grpo_megatron.plan.timing.tower import Images, tower_amounts
from grpo_megatron.plan.timing.trainer import (
    Machine,
    TrainerLoad,
    TrainerSeconds,
    trainer_seconds,
    trainer_work,
)
from grpo_megatron.plan.timing.work import model_flops, parameters_of_rank
from grpo_megatron.plan.weights import ELEMENT_BYTES, Sizes, sizes_of

MEDIAN_ERROR = 0.23
WORST_ERROR = 0.61
"""Of published times in the half that no constant was fitted to, as a share of each."""
_NOTHING = TrainerSeconds(0.0, 0.0, 0.0, 0.0, 0, 0.0)


@dataclass(frozen=True, slots=True)
class LengthOptions:
    """What is known of a run's lengths beside its recipe."""

    file: Path | None = None
    """Lengths of samples, see `read_lengths`."""
    answer_tokens: float | None = None
    """Mean tokens of an answer."""
    prompt_tokens: float | None = None
    """Mean tokens of a prompt."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """The predicted times of a run's step."""

    device: str
    lengths: Lengths
    num_gpus: int
    """Of trainer and engines; processes on a CPU."""
    generation_s: float
    logprobs_s: float
    """Passes of the old policy, references and teachers."""
    forward_backward_s: float
    """With the pipeline's bubble and the busiest expert rank."""
    gradient_sync_s: float
    optimizer_s: float
    publish_s: float
    switch_s: float
    """What shares GPUs, or is kept on the host, is carried there and back."""
    overhead_s: float
    step_s: float
    overlaps: bool
    """Whether generation and training go on at the same time."""
    bubble_fraction: float
    """Share of forward and backward in which the slowest stage waits."""
    num_microbatches: int
    """Of an update and data-parallel rank."""
    tokens_per_step: float
    """Prompts and answers of all samples, at their mean lengths."""
    computed_tokens_per_step: float
    """Of these the trainer computes, a shared prompt once."""
    tokens_per_s_per_gpu: float
    mfu: float
    """Share of the trainers' peak while forward and backward run."""
    step_mfu: float
    """Share of all GPUs' peak over the whole step."""
    trainer_utilisation: float
    """Share of the step in which the trainer computes."""
    engine_utilisation: float
    """Share of the step in which engines generate."""
    staleness_versions: float
    """Mean of `forecast`; 0 where no step is sampled before the one before it is trained."""
    staleness_updates: float
    """Mean optimizer steps between what samples were drawn from and what is updated with them."""
    gpu_hours_per_step: float
    gpu_hours: float
    """Of all steps."""
    largest_phase: str
    advice: str
    """What to enlarge."""
    forecast: Forecast | None
    """Staleness of trained tokens, and who waits for whom; None where nothing is generated and
    trained."""
    published: PublishedRange | None
    """Of runs that go at least as far ahead; None where rollouts do not run ahead, or where no
    published run with a known learning rate goes so far."""

    @property
    def trainer_s(self) -> float:
        """What the trainer does in a step."""
        passes_s = self.logprobs_s + self.forward_backward_s
        return passes_s + self.gradient_sync_s + self.optimizer_s

    def as_json(self, constants: Constants) -> dict[str, Any]:
        """Return all figures, and every constant with its source."""
        values = asdict(self)
        lengths = self.lengths
        values["lengths"] = {
            "prompt_tokens": lengths.prompt,
            "answer_tokens": lengths.answer,
            "longest_answer_tokens": lengths.longest,
            "source": lengths.source,
        }
        values["judged_errors"] = {"median": MEDIAN_ERROR, "worst": WORST_ERROR}
        return {**values, "constants": sources(constants)}


def lengths_of(config: RunConfig, options: LengthOptions, constants: Constants) -> Lengths:
    """Return the lengths of a run's samples: of a file, else log-normal around a mean that is given
    or assumed, and cut where the recipe cuts them. ConfigError as of `read_lengths`, and for a mean
    that is given and that the recipe does not allow."""
    rollout = config.rollout
    longest = max(min(rollout.max_new_tokens, rollout.max_model_len - 1), 1)
    longest_prompt = max(rollout.max_model_len - longest, 1)
    usual_prompt = constants["prompt_tokens"]
    if "vision_config" in configuration_of(config.model)[0]:
        usual_prompt = longest_prompt  # as memory is planned
    _refuse_longer(
        options.answer_tokens, longest, "answer", "a run cuts them there (rollout.max_new_tokens)"
    )
    _refuse_longer(
        options.prompt_tokens,
        longest_prompt,
        "prompt",
        "a run leaves longer ones out (rollout.max_model_len - rollout.max_new_tokens)",
    )
    if options.file is not None:
        return read_lengths(
            options.file,
            min(usual_prompt, longest_prompt),
            longest,
            longest_prompt,
            given_prompt=options.prompt_tokens,
        )
    prompt = options.prompt_tokens or min(usual_prompt, longest_prompt)
    answer = options.answer_tokens or constants["answer_share"] * longest
    source = "log-normal, mean as given"
    if options.answer_tokens is None:
        source = "log-normal, mean assumed (answer_share of the longest answer)"
    return log_normal(prompt, answer, float(longest), constants["answer_sigma"], source)


def _refuse_longer(mean: float | None, longest: int, what: str, why: str) -> None:
    """Raise ConfigError where the given mean of prompts or answers (`what`) is above `longest`
    tokens."""
    if mean is not None and mean > longest:
        raise ConfigError(
            f"{mean:g} tokens of {what}s on the mean, and the longest one has {longest}: {why}",
            where=f"--{what}-tokens",
            remedy=f"at most {longest}, or change the recipe",
        )


def predict_run(
    config: RunConfig,
    plan: Plan,
    device: str,
    constants: Constants,
    lengths: Lengths,
) -> Prediction:
    """Return what a step of a valid recipe takes on `device`, a CPU's where it has no GPUs. `plan`
    is its memory plan: of engines' cache, and of a publish."""
    placement = config.placement
    if not placement.gpus_per_node:
        device = CPU
    hf, _ = configuration_of(config.model)
    vocab_size = vocabulary_of(hf, config.model)
    # of the steps, which come after a cold start
    sizes = policy_sizes(config.model_copy(update={"cold_start": None}))
    machine = Machine(
        constants, constants.device(device), placement.gpus_per_node or config.num_devices
    )
    samples = samples_of_step(config)
    has_routers = bool(sizes.symbols["experts"])
    load = _trainer_load(config, samples, lengths, has_routers=has_routers)
    if sizes.tower:
        load = replace(load, images_per_sample=images_per_sample(config))
    trainer = _NOTHING
    if config.trains:
        backward_ratio = constants["attention_backward_ratio"]
        trainer = trainer_seconds(trainer_work(sizes, load, backward_ratio), machine)
        if config.has_own_critic:
            of_critic = replace(load, num_logprob_passes=1)  # its values
            work = trainer_work(replace(sizes, num_scalars=1), of_critic, backward_ratio)
            trainer = trainer.before(trainer_seconds(work, machine))
    at_once = _sequences_at_once(config, plan, lengths)
    publish_s = _publish_seconds(config, plan, machine)
    step = StepSeconds(
        generation_s=_generation_seconds(config, plan, hf, vocab_size, lengths, machine),
        trainer=trainer,
        publish_s=publish_s,
        pause_s=_pause_seconds(config, plan, machine, publish_s),
        switch_s=_switch_seconds(config, plan, sizes, machine),
        overhead_s=machine.step_overhead_s,
        overlaps=overlaps(config),
    )
    found = _forecast(config, at_once, lengths, step)
    return _prediction(config, device, lengths, load, sizes, machine, step, found)


def overlaps(config: RunConfig) -> bool:
    """Say whether a run generates and trains at the same time."""
    has_both = generates(config) and config.trains
    return has_both and config.placement.mode == "separate" and config.batch.max_staleness > 0


def generates(config: RunConfig) -> bool:
    """Say whether a run's steps have answers of the policy."""
    return not config.uses_dataset


def _trainer_load(
    config: RunConfig, samples: int, lengths: Lengths, *, has_routers: bool
) -> TrainerLoad:
    capacity = config.trainer.max_tokens_per_microbatch
    return TrainerLoad(
        num_samples=samples,
        num_updates=config.batch.updates_per_step,
        lengths=lengths,
        max_tokens_per_microbatch=capacity,
        max_tokens_per_logprob_microbatch=capacity,
        num_logprob_passes=num_whole_passes(config, has_routers=has_routers),
        computed_share=computed_share(config, lengths),
        is_sft=config.kind == "sft",
        has_host_optimizer=offloads_optimizer(config),
    )


def computed_share(config: RunConfig, lengths: Lengths) -> float:
    """Return the share of a step's tokens that the trainer computes: a prompt once for all samples
    of its group, where prompts are shared."""
    size = config.batch.num_samples_per_prompt
    if not config.trainer.share_prefixes or config.uses_dataset:
        return 1.0
    return (lengths.prompt / size + lengths.answer) / lengths.total


def images_per_sample(config: RunConfig) -> float:
    """Return how many images the trainer computes for each sample of a model that sees: one for
    each prompt, once for all samples of its group where prompts are shared; else, at most, one for
    each sample, for those of a prompt may be in rows of their own."""
    if not config.trainer.share_prefixes or config.uses_dataset:
        return 1.0
    return 1.0 / config.batch.num_samples_per_prompt


def _generation_seconds(
    config: RunConfig,
    plan: Plan,
    hf: dict[str, Any],
    vocab_size: int,
    lengths: Lengths,
    machine: Machine,
) -> float:
    if not generates(config):
        return 0.0
    rollout = config.rollout
    engines = num_engines(config)
    sizes = sizes_of(hf, vocab_size, engine_layout(rollout))
    samples = samples_of_step(config)
    prompts = config.batch.num_prompts
    if config.sampling.dynamic:
        samples = round(samples * machine.constants["dynamic_sampling_rounds"])
        prompts = round(prompts * machine.constants["dynamic_sampling_rounds"])
    load = EngineLoad(
        num_samples=samples / engines,
        num_prompts=prompts / engines,
        lengths=lengths,
        capacity=_sequences_at_once(config, plan, lengths),
        weight_share=_weight_share(config),
        batches_in_flight=_batches_in_flight(config),
        is_eager=rollout.engine_argument("--enforce-eager") is not None,
    )
    return generation_seconds(sizes, load, machine)


def _sequences_at_once(config: RunConfig, plan: Plan, lengths: Lengths) -> int:
    """Return how many sequences an engine has at once: at most what it may run, what the client
    asks for, and what its cache holds; 0 without engines."""
    if not plan.engine:
        return 0
    cached = int(plan.engine["kv_tokens"] / lengths.total)
    return max(min(asked_at_once(config), cached), 1)


def asked_at_once(config: RunConfig) -> int:
    """Return the sequences that an engine may run and that the client asks it for at once."""
    rollout = config.rollout
    of_request = config.batch.num_samples_per_prompt
    if rollout.deterministic or config.allocation is not None:
        of_request = 1
    asked = rollout.max_concurrent_requests * of_request // rollout.data_parallel_size
    return max(min(rollout.max_num_seqs, asked), 1)


def _weight_share(config: RunConfig) -> float:
    """Return bytes of a weight of layers in an engine, in those of its type."""
    if config.rollout.fp8 == "blockwise":
        return NUMBER_BYTES / ELEMENT_BYTES[config.rollout.dtype]
    return 1.0


def _publish_seconds(config: RunConfig, plan: Plan, machine: Machine) -> float:
    """Over the links, through the host's memory, or both: the slower of them."""
    publish = plan.publish
    if publish is None or config.kind not in ("rl", "distil") or not generates(config):
        return 0.0
    if config.publish_carrier == "nccl":
        return publish.seconds
    speed = machine.constants["host_bytes_per_s"]
    if machine.device.architecture == "cpu":
        speed = machine.device.link_bytes_per_s
    seconds = publish.worker_bytes / speed
    if config.publish_carrier == "gloo" and config.placement.mode == "separate":
        seconds = max(publish.seconds, seconds)
    return seconds


def _pause_seconds(config: RunConfig, plan: Plan, machine: Machine, publish_s: float) -> float:
    """Return the seconds of a publish in which engines pause: to load what has come into the host's
    memory beside decoding, or all."""
    if plan.publish is None or not config.publish.beside_decoding:
        return publish_s
    speed = machine.constants["host_bytes_per_s"]
    if machine.device.architecture == "cpu":
        speed = machine.memory_bytes_per_s / 2  # read and written
    return min(plan.publish.worker_bytes / speed, publish_s)


def _switch_seconds(config: RunConfig, plan: Plan, s: Sizes, machine: Machine) -> float:
    """Return the seconds in which engines that sleep put their weights on the host; references are
    kept there, too."""
    if machine.device.architecture == "cpu":
        return 0.0
    carried = 0.0
    if config.placement.mode == "colocated" and generates(config):
        carried += 2 * plan.engine["weights"]
    if has_reference(config):
        element: int = s.symbols["element"]
        carried += 2 * element * parameters_of_rank(s, 0).total
    return carried / machine.constants["host_bytes_per_s"]


def _prediction(
    config: RunConfig,
    device: str,
    lengths: Lengths,
    load: TrainerLoad,
    sizes: Sizes,
    machine: Machine,
    step: StepSeconds,
    found: Forecast | None,
) -> Prediction:
    trainer = step.trainer
    placement = config.placement
    num_gpus = config.num_devices
    if placement.gpus_per_node:
        num_gpus = placement.num_gpus
    tokens = load.num_samples * lengths.total
    whole = replace(whole_model(config), lora=config.lora)
    trained = config.batch.epochs * load.computed_share
    squares = load.num_samples * lengths.mean_square
    flops = trained * model_flops(whole, tokens, squares)
    flops += config.batch.epochs * _tower_flops(whole, config, load)
    if not config.trains:
        flops = 0.0
    peak = machine.flops(sizes)
    mfu = 0.0
    if trainer.forward_backward_s:
        mfu = flops / (trainer.forward_backward_s * peak * sizes.trainer.num_ranks)
    gpu_hours = step.step_s * num_gpus / 3600
    largest, advice = _what_to_enlarge(config, step)
    return Prediction(
        device=device,
        lengths=lengths,
        num_gpus=num_gpus,
        generation_s=step.generation_s,
        logprobs_s=trainer.logprobs_s,
        forward_backward_s=trainer.forward_backward_s,
        gradient_sync_s=trainer.gradient_sync_s,
        optimizer_s=trainer.optimizer_s,
        publish_s=step.publish_s,
        switch_s=step.switch_s,
        overhead_s=step.overhead_s,
        step_s=step.step_s,
        overlaps=step.overlaps,
        bubble_fraction=trainer.bubble_fraction,
        num_microbatches=trainer.num_microbatches,
        tokens_per_step=tokens,
        computed_tokens_per_step=load.computed_share * tokens,
        tokens_per_s_per_gpu=tokens / step.step_s / num_gpus,
        mfu=mfu,
        step_mfu=flops / (step.step_s * peak * num_gpus),
        trainer_utilisation=trainer.total_s / step.step_s,
        engine_utilisation=step.generation_s / step.step_s,
        staleness_versions=found.mean if found else 0.0,
        staleness_updates=_staleness_updates(config, found),
        gpu_hours_per_step=gpu_hours,
        gpu_hours=gpu_hours * config.num_steps,
        largest_phase=largest,
        advice=advice,
        forecast=found,
        published=_published(config),
    )


def _tower_flops(whole: Sizes, config: RunConfig, load: TrainerLoad) -> float:
    """Operations of a vision tower on the images of a step: three forwards' where it is trained,
    as in `model_flops`, and else one's."""
    if not load.images_per_sample:
        return 0.0
    images = Images(load.num_samples * load.images_per_sample, load.lengths.prompt)
    flops = tower_amounts(whole, images).flops
    if config.trainer.vision_tower == "trained":
        flops *= 3
    return flops


def _batches_in_flight(config: RunConfig) -> int:
    """Return steps that engines generate at once."""
    if not overlaps(config):
        return 1
    return config.steps_sampled_at_once


def flow_of(config: RunConfig, answers: tuple[float, ...], at_once: float) -> Flow:
    """Return what decides which steps of a run are in flight together. answers: as of
    `spread_answers`; at_once: sequences that all engines together run at once."""
    num_samples = samples_of_step(config)
    return Flow(
        max_staleness=config.batch.max_staleness,
        steps_at_once=config.steps_sampled_at_once,
        publish_waits=config.publish.pause == "wait",
        answers=answers,
        slots=slots_of(num_samples, at_once, len(answers)),
    )


def num_engines(config: RunConfig) -> int:
    """Return how many engines share a step's samples."""
    return config.rollout.num_replicas * config.rollout.data_parallel_size


def _forecast(
    config: RunConfig, at_once: int, lengths: Lengths, step: StepSeconds
) -> Forecast | None:
    """Forecast the steady state. What a step costs beside its phases is the trainer's where
    rollouts run ahead, and else comes before its training."""
    if not step.generation_s or not config.trains:
        return None
    flow = flow_of(config, spread_answers(lengths.answers), at_once * num_engines(config))
    token_s = step.generation_s / flow.makespan
    if _batches_in_flight(config) > 1:  # its seconds are those of engines that never run empty
        token_s = step.generation_s * min(flow.slots, 2 * len(flow.answers)) / flow.tokens
    record_s = step.overhead_s
    after_s = 0.0
    if flow.max_staleness:
        record_s = 0.0
        after_s = step.overhead_s
    seconds = FlowSeconds(
        token_s=token_s,
        reward_s=0.0,
        record_s=record_s,
        train_s=step.trainer.total_s + step.switch_s + step.publish_s - step.pause_s,
        publish_s=step.pause_s,
        after_s=after_s,
    )
    return forecast(flow, seconds)


def _published(config: RunConfig) -> PublishedRange | None:
    batch = config.batch
    if config.kind != "rl" or batch.max_staleness == 0:
        return None
    return published_range(batch.max_staleness * batch.updates_per_step)


def _staleness_updates(config: RunConfig, found: Forecast | None) -> float:
    """Updates of the step itself, half of them on the mean, and those of the steps between."""
    updates = config.batch.updates_per_step
    if config.kind != "rl" or found is None:
        return 0.0
    return found.mean * updates + (updates - 1) / 2


def _what_to_enlarge(config: RunConfig, step: StepSeconds) -> tuple[str, str]:
    """Return the phase that a step waits for, and what makes it shorter."""
    trainer = step.trainer
    phases = {
        "generation": step.generation_s,
        "logprobs": trainer.logprobs_s,
        "forward_backward": trainer.forward_backward_s,
        "gradient_sync": trainer.gradient_sync_s,
        "optimizer": trainer.optimizer_s,
    }
    if step.overlaps:
        of_trainer = trainer.total_s + step.publish_s
        training_waits = step.generation_s + step.pause_s >= of_trainer
        if training_waits:
            phases = {"generation": step.generation_s}
        else:
            del phases["generation"]
    phases |= {"publish": step.publish_s, "switch": step.switch_s, "overhead": step.overhead_s}
    largest = max(phases, key=lambda name: phases[name])
    return largest, _ADVICE[largest] + _of_bubble(largest, trainer)


_ADVICE = {
    "generation": "more rollout nodes (replicas), or a smaller "
    "rollout.tensor_parallel_size where the cache allows it",
    "logprobs": "more trainer nodes, or larger micro-batches",
    "forward_backward": "more trainer nodes, or another layout (--search)",
    "gradient_sync": "fewer, larger updates, or trainer.overlap_communication",
    "optimizer": "shard the optimizer over more data-parallel ranks",
    "publish": "faster links, or more trainer ranks than a replica has workers",
    "switch": "GPUs of their own for trainer and engines (placement.mode = 'separate')",
    "overhead": "larger steps: more prompts or samples, so that what each step costs is shared",
}


def _of_bubble(largest: str, trainer: TrainerSeconds) -> str:
    if largest == "forward_backward" and trainer.bubble_fraction > 0.15:
        return (
            f"; {trainer.bubble_fraction:.0%} of it is the pipeline's bubble: fewer stages, "
            "virtual stages or more micro-batches"
        )
    return ""
