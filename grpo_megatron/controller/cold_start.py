"""A short supervised start: the policy must be right sometimes before rewards can teach it."""

from grpo_megatron.controller.dataset import DatasetAnswers
from grpo_megatron.controller.display import show
from grpo_megatron.controller.evaluation import greedy_accuracy
from grpo_megatron.controller.recorder import record_completions
from grpo_megatron.controller.session import Session
from grpo_megatron.data.sampler import PromptSampler
from grpo_megatron.errors import TrainerError


async def cold_start(session: Session) -> None:
    """Train on prompt + answer until greedy validation accuracy reaches the target, within
    `cold_start.max_steps`. The weights are published as version 0."""
    config, settings = session.config, session.config.cold_start
    weights = {domain.name: domain.weight for domain in config.domains}
    sampler = PromptSampler(session.splits.train, weights, config.seed + 1)
    directory = session.run_dir.store / "cold_start"
    answers = DatasetAnswers(session.tokenizer, config.rollout.max_model_len)
    done, accuracy = 0, 0.0
    await session.trainer.call("reset_optimizer", cold_start=True)
    while accuracy < settings.target_accuracy:
        if done >= settings.max_steps:
            raise TrainerError(
                f"cold start reached accuracy {accuracy:.3f} after {done} steps, the target is "
                f"{settings.target_accuracy}", where="cold_start.max_steps",
                remedy="raise max_steps or lower target_accuracy")
        # accuracy climbs steeply in the end: look often, so that RL starts at about one height
        often = 10 if accuracy >= settings.target_accuracy / 4 else 1
        batches = [sampler.draw(settings.batch_size)
                   for _ in range(max(settings.steps_per_evaluation // often, 1))]
        with session.phase("train"):
            await session.judges.rest(sleep=config.placement.gpus_per_node > 0)
            record_completions(directory, [(update, prompt, answers.completion(0, prompt.answer))
                for update, batch in enumerate(batches) for prompt in batch])
            report = await session.trainer.call("supervise", directory=str(directory),
                                                first_update=done)
        done += len(batches)
        with session.phase("publish"):
            await session.publisher.publish(0)
        with session.phase("rollout"):
            accuracy = await greedy_accuracy(session, session.splits.validation)
        show("message", text=f"cold start: step {done}, nll {report['nll']:.3f}, "
                             f"validation accuracy {accuracy:.3f}")
    await session.trainer.call("reset_optimizer", cold_start=False)
    session.event("cold_start_done", steps=done, accuracy=accuracy)
    session.phase.take_seconds()
