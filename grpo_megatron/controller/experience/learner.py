"""Steps of a run of kind experience: sample groups, grade them, learn lessons, keep the weights."""

import asyncio
from dataclasses import replace

import numpy as np

from grpo_megatron.config.experience import ExperienceConfig
from grpo_megatron.config.layouts import fill
from grpo_megatron.config.run import RunConfig
from grpo_megatron.controller.display import Phases, show
from grpo_megatron.controller.experience.library import Library
from grpo_megatron.controller.experience.writer import (
    MAX_PROPOSALS,
    Attempt,
    GradedProblem,
    LessonWriter,
)
from grpo_megatron.controller.group_filter import GroupFilter
from grpo_megatron.controller.sampling_metrics import rollout_metrics
from grpo_megatron.data.prompt_text import PromptRenderer
from grpo_megatron.data.sampler import PromptSampler
from grpo_megatron.data.tokenizer import TextTokenizer
from grpo_megatron.rewards.pool import RewardPool
from grpo_megatron.rollout.chunk_dispatch import ChunkDispatcher
from grpo_megatron.rundir import RunDir
from grpo_megatron.telemetry.events import append_event
from grpo_megatron.telemetry.metrics import MetricsWriter
from grpo_megatron.telemetry.mirrors import Mirrors
from grpo_megatron.types import Prompt, ScoredGroup


class PromptTeller:
    """Puts the lessons of `library` before questions.

    Attributes:
        shortened: Prompts that had no room for all lessons, since they were counted last.

    Raises DataError where the tokenizer cannot write the layout, or the marks of lessons in it."""

    def __init__(
        self,
        config: RunConfig,
        settings: ExperienceConfig,
        *,
        library: Library,
        tokenizer: TextTokenizer,
    ):
        marks = {"experiences": "[E0123456789]\n[E1] ", "question": ""}
        tokenizer.encode(
            fill(settings.layout, marks), where="experience.layout, with lessons as [E1]"
        )
        self.library = library
        self.shortened = 0
        self._config = config
        self._settings = settings
        self._tokenizer = tokenizer
        self._renderers: dict[str, PromptRenderer] = {}
        for domain in config.domains:
            self._renderers[domain.name] = PromptRenderer(domain, tokenizer.chat_template)

    def with_lessons(self, prompt: Prompt) -> Prompt:
        """Return the prompt with the lessons, the newest of them where not all fit beside the
        longest completion; as it is where there are none, or not one fits."""
        num_lessons = len(self.library.lessons)
        room = self._config.rollout.max_model_len - self._config.max_new_tokens_of(prompt.domain)
        for count in range(num_lessons, 0, -1):
            token_ids = self._token_ids(prompt, count)
            if len(token_ids) <= room:
                if count < num_lessons:
                    self.shortened += 1
                return replace(prompt, token_ids=tuple(token_ids))
        if num_lessons > 0:
            self.shortened += 1
        return prompt

    def take_shortened(self) -> int:
        """Return how many prompts were shortened; it begins anew."""
        shortened = self.shortened
        self.shortened = 0
        return shortened

    def _token_ids(self, prompt: Prompt, count: int) -> list[int]:
        lessons = self.library.as_text(newest=count)

        def rephrase(question: str) -> str:
            values = {"experiences": lessons, "question": question}
            return fill(self._settings.layout, values)

        text = self._renderers[prompt.domain].rephrased(prompt, rephrase)
        return self._tokenizer.encode(text, where=f"{prompt.prompt_id} with lessons")


class ExperienceLearner:
    """Takes `num_steps` steps, or those that an earlier attempt left.

    Attributes:
        step: Steps that were taken, over all attempts."""

    def __init__(
        self,
        config: RunConfig,
        run_dir: RunDir,
        *,
        sampler: PromptSampler,
        dispatcher: ChunkDispatcher,
        rewards: RewardPool,
        teller: PromptTeller,
        writer: LessonWriter,
        phases: Phases,
        stopping: asyncio.Event,
    ):
        self.step = 0
        self._config = config
        self._run_dir = run_dir
        self._sampler = sampler
        self._dispatcher = dispatcher
        self._rewards = rewards
        self._teller = teller
        self._writer = writer
        self._phases = phases
        self._stopping = stopping
        self._filter = GroupFilter(config)

    def restore(self) -> None:
        """Go on after the last step whose lessons were written, if there is one."""
        path = self._run_dir.experience
        if not path.exists():
            return
        state = self._teller.library.load(path)
        self.step = state["step"]
        self._sampler.load_state_dict(state["sampler"])
        show("message", text=f"resumed after step {self.step}")
        append_event(self._run_dir.events, "resumed", step=self.step)

    async def run(self, metrics: MetricsWriter, mirrors: Mirrors) -> None:
        """Take the steps that are left, until the last or until told to stop."""
        metrics.truncate_after(self.step - 1)
        while self.step < self._config.num_steps and not self._stopping.is_set():
            values = await self._take_step()
            record = metrics.write(self.step, values)
            metrics.write_normalisers({})
            mirrors.log(record)
            self.step += 1
            self._save()
            show("step", metrics=record, samples=[])

    async def _take_step(self) -> dict[str, float]:
        """Learn from the groups of one batch of prompts; returns the step's metrics."""
        prompts = self._sampler.draw(self._config.batch.num_prompts)
        told = [self._teller.with_lessons(prompt) for prompt in prompts]
        with self._phases.measure("rollout"):
            groups = await self._dispatcher.rollouts(self.step, told)
        with self._phases.measure("reward"):
            scored = await self._rewards.score(groups)
        teaching = [group for group in scored if rewards_differ(group.rewards)]
        library = self._teller.library
        with self._phases.measure("lessons"):
            problems = [graded(group) for group in teaching]
            operations = await self._writer.operations(problems, library)
        num_changes = library.apply(operations)
        counts = self._writer.take_counts()
        refused = library.take_refused()
        num_refused = len(refused) + counts.surplus
        if counts.surplus:
            refused.append(f"{counts.surplus} beyond the first {MAX_PROPOSALS} of their groups")
        for reason in refused:
            append_event(self._run_dir.events, "lesson_refused", step=self.step, reason=reason)
        return {
            **self._filter.metrics(scored),
            **rollout_metrics(scored),
            "experience/lessons": float(len(library.lessons)),
            "experience/groups_that_teach": float(len(teaching)),
            "experience/changes": float(num_changes),
            "experience/refused": float(num_refused),
            "experience/unreadable": float(counts.unreadable),
            "experience/failed_requests": float(counts.failed),
            "experience/shortened_prompts": float(self._teller.take_shortened()),
        }

    def _save(self) -> None:
        self._teller.library.save(
            self._run_dir.experience, step=self.step, sampler=self._sampler.state_dict()
        )


def rewards_differ(rewards: np.ndarray) -> bool:
    """Whether a group [G] has a better and a worse answer; NaN is neither."""
    known = rewards[~np.isnan(rewards)]
    return len(known) > 1 and bool(known.max() > known.min())


def graded(group: ScoredGroup) -> GradedProblem:
    """Return a group as the writer sees it; what was not scored is left out."""
    prompt = group.group.prompt
    attempts = []
    for completion, reward in zip(group.group.completions, group.rewards, strict=True):
        if not np.isnan(reward):
            attempts.append(Attempt(completion.text, float(reward)))
    return GradedProblem(prompt.question or prompt.text, prompt.answer, attempts)
