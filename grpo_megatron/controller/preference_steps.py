"""Preferences instead of samples: the steps that are trained, the reference's log-probs, which are
computed once before the first step, and accuracy on pairs that are kept out of training."""

import asyncio
import hashlib
import itertools
import json
import math
import shutil
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch

from grpo_megatron.algorithms.preferences import (
    MARGIN,
    REFERENCE,
    kto_baseline,
    labelled_losses,
    pair_losses,
)
from grpo_megatron.batching.manifest import StepFacts, is_recorded, read_manifest
from grpo_megatron.batching.spool import store_groups
from grpo_megatron.config.evaluated_share import EvaluatedShare, share_of
from grpo_megatron.config.run import RunConfig
from grpo_megatron.controller.display import show, show_phase
from grpo_megatron.controller.evaluation import Results, over_domains, wilson
from grpo_megatron.controller.recorded_step import RecordedStep
from grpo_megatron.controller.recorder import record_step
from grpo_megatron.controller.rollout_batch import load_sampling, sampling_state
from grpo_megatron.controller.trainer_link import TrainerLink
from grpo_megatron.data.preferences import Preference, Preferences
from grpo_megatron.data.sampler import PromptSampler
from grpo_megatron.data.tokenizer import TextTokenizer
from grpo_megatron.errors import DataError, raised_as
from grpo_megatron.files import write_atomically
from grpo_megatron.routing.shape import recorded_shape
from grpo_megatron.rundir import RunDir
from grpo_megatron.telemetry.samples import extremes
from grpo_megatron.trainer.requests import (
    Request,
    ScoreAnswers,
    ScoreSteps,
    TakeAdapters,
    TakeWeights,
)
from grpo_megatron.types import (
    Completion,
    Prompt,
    RolloutGroup,
    ScoredGroup,
    Turn,
    VersionSpan,
)

_AT_ONCE = 512
"""Preferences whose answers the trainer looks at in one request."""
_T = TypeVar("_T")

Scores = dict[str, tuple[float, float]]
"""Sums of log-probs of both answers, by id of the preference."""
Logits = dict[str, list[float]]
"""What a process reward model says of an answer's steps, by id of the preference."""


class PreferenceRecorder:
    """Writes preferences as a step of the sample store: a group is a prompt with its two answers,
    whose rewards are the labels, NaN for an answer to another prompt. spool: where answers lie
    until they are in a step.

    Attributes:
        domains: Their names, in the order of the recipe."""

    def __init__(self, config: RunConfig, spool: Path, tokenizer: TextTokenizer):
        self._config = config
        self._spool = spool
        self._tokenizer = tokenizer
        self._numbers = itertools.count()
        self.domains = [domain.name for domain in config.domains]

    def groups(self, preferences: Sequence[Preference], reference: Scores) -> list[ScoredGroup]:
        """Write the answers; returns their groups, with the scores of the reference as component
        where they are given."""
        groups = [RolloutGroup(one.prompt, self._answers(one), 0) for one in preferences]
        path = self._spool / f"preferences-{next(self._numbers):06d}"
        stored = store_groups(path, groups, recorded_shape(self._config))
        scored = []
        for one, group in zip(preferences, stored, strict=True):
            components = {}
            if self._config.preferences.use_margins:
                components[MARGIN] = np.full(2, one.margin)
            if reference:
                components[REFERENCE] = np.array(reference[one.prompt.prompt_id])
            scored.append(ScoredGroup(group, components, np.array(one.labels, np.float64)))
        return scored

    def _answers(self, one: Preference) -> tuple[Completion, ...]:
        """Return the answers as the trainer is to look at them."""
        if self._config.preferences.loss != "bradley_terry":
            return one.answers
        return tuple(read_at_its_end(answer) for answer in one.answers)

    def record(
        self, directory: Path, groups: Sequence[ScoredGroup], num_updates: int, facts: StepFacts
    ) -> None:
        """Make a step of them; both answers of a pair are never apart."""
        record_step(
            directory,
            groups,
            num_updates,
            facts,
            self._tokenizer.decode,
            together=self._config.compares_pairs,
        )


def read_at_its_end(answer: Completion) -> Completion:
    """Return the answer for a reward model, which is read at its last token: with one token more,
    which is the only one that counts as the policy's, so that the position before it is looked
    at."""
    length = answer.num_tokens
    ids = np.append(answer.token_ids, answer.token_ids[-1:]).astype(np.int32)
    logprobs = np.full(length + 1, np.nan, np.float32)
    logprobs[-1] = -np.inf
    span = (VersionSpan(0, 0, length + 1),)
    turns = (Turn(length, length + 1),)
    return Completion(ids, logprobs, span, answer.finish_reason, answer.text, turns=turns)


def answer_ends(preferences: Preferences, tokenizer: TextTokenizer) -> list[int]:
    """Return the tokens at which a reward model reads whole answers: the last ones of those that it
    is trained on, and the tokenizer's end."""
    ends = {tokenizer.eos_token_id}
    for one in preferences.by_id.values():
        for answer in one.answers:
            ends.add(int(answer.token_ids[-1]))
    return sorted(ends)


class AnswerScorer:
    """Asks the trainer what its weights think of answers."""

    def __init__(self, recorder: PreferenceRecorder, trainer: TrainerLink, scratch: Path):
        self._recorder = recorder
        self._trainer = trainer
        self._scratch = scratch

    async def scores(
        self, preferences: Sequence[Preference], *, with_adapters: bool = True
    ) -> Scores:
        """Return sums of log-probs of both answers of each, over the trainer's present weights;
        these alone, where the policy's adapters are to be left out."""
        found: Scores = {}
        request = ScoreAnswers(self._scratch, with_adapters)
        async for part, rows in self._looked_at(preferences, request):
            for number, one in enumerate(part):
                found[one.prompt.prompt_id] = (rows[2 * number], rows[2 * number + 1])
        return found

    async def step_logits(self, preferences: Sequence[Preference]) -> Logits:
        """Return what a process reward model's present weights say of the steps of each answer."""
        found: Logits = {}
        async for part, rows in self._looked_at(preferences, ScoreSteps(self._scratch)):
            for one, logits in zip(part, rows, strict=True):
                found[one.prompt.prompt_id] = logits
        return found

    async def _looked_at(
        self, preferences: Sequence[Preference], request: Request[list[_T]]
    ) -> AsyncIterator[tuple[Sequence[Preference], list[_T]]]:
        """Yield some preferences at a time, with the trainer's answer to `request` of each row."""
        for start in range(0, len(preferences), _AT_ONCE):
            part = preferences[start : start + _AT_ONCE]
            groups = await asyncio.to_thread(self._recorder.groups, part, {})
            facts = StepFacts(domains=self._recorder.domains)
            await asyncio.to_thread(self._recorder.record, self._scratch, groups, 1, facts)
            yield part, await self._trainer.call(request)
        shutil.rmtree(self._scratch, ignore_errors=True)


class ReferenceScores:
    """The reference's log-probs, in files below `reference/` of the run: each is computed once,
    before the first step of an attempt, when the trainer has the weights that the run began with.
    """

    def __init__(
        self, config: RunConfig, run_dir: RunDir, scorer: AnswerScorer, trainer: TrainerLink
    ):
        self._config = config
        self._run_dir = run_dir
        self._scorer = scorer
        self._trainer = trainer

    async def load(self, wanted: Sequence[Preference]) -> Scores:
        """Return the scores of `wanted`; those that no file has are computed and written.

        Raises DataError: the files are of another model, or damaged."""
        known = self._read()
        missing = [one for one in wanted if one.prompt.prompt_id not in known]
        if not missing:
            return known
        show_phase("reference")
        show("message", text=f"computing the reference's log-probs of {len(missing)} preferences")
        reference = self._config.preferences.reference
        if reference is not None:
            await self._trainer.call(TakeWeights(reference))
        else:
            await self._take_first_adapters(len(missing))
        for start in range(0, len(missing), _AT_ONCE):
            part = missing[start : start + _AT_ONCE]
            # adapters are what the policy has beside its own weights, and no part of another model
            found = await self._scorer.scores(part, with_adapters=reference is None)
            known |= found
            self._write(found)
        if reference is not None:
            await self._trainer.call(TakeWeights(self._initial_model))
        return known

    async def _take_first_adapters(self, num_missing: int) -> None:
        """Let the trainer have the adapters with which the run began, if there were any: one that
        goes on with a checkpoint has not read them. Raises DataError where they are gone."""
        lora = self._config.lora
        if lora is None or lora.path is None:
            return
        if not lora.path.exists():
            raise DataError(
                f"lora.path is gone, and {num_missing} preferences have no log-probs of the "
                "reference, which is the model that the run began with, these adapters included",
                where=str(lora.path),
                remedy="put the adapters back, or resume without what asks for more preferences, "
                "such as more steps",
            )
        await self._trainer.call(TakeAdapters(lora.path))

    @property
    def _initial_model(self) -> Path:
        return self._config.model.path or self._run_dir.model

    @property
    def _model(self) -> str:
        """What the files are of."""
        return str(self._config.preferences.reference or self._initial_model)

    def _write(self, found: Scores) -> None:
        self._run_dir.reference.mkdir(exist_ok=True)
        number = 0
        while self._file(number).exists():  # one before others may have been removed
            number += 1
        values = {"model": self._model, "scores": found, "sha256": _digest_of(found)}
        write_atomically(self._file(number), json.dumps(values))

    def _file(self, number: int) -> Path:
        return self._run_dir.reference / f"{number:06d}.json"

    def _read(self) -> Scores:
        known: Scores = {}
        for file in sorted(self._run_dir.reference.glob("*.json")):
            model, scores = _read_scores(file)
            if model != self._model:
                raise DataError(
                    f"the reference's log-probs are of {model}, and the reference is {self._model}",
                    where=str(file),
                    remedy="resume with the recipe of the run, or start a new one",
                )
            known |= scores
        return known


def _read_scores(file: Path) -> tuple[str, Scores]:
    """(the model, its scores) of a file. DataError where it is damaged; files of older runs have no
    digest to tell that by."""
    with raised_as(
        DataError,
        "the reference's log-probs cannot be read",
        (OSError, ValueError, LookupError, TypeError, AttributeError),
        where=file,
        remedy="remove it: what it had is computed anew",
    ):
        values = json.loads(file.read_text(encoding="utf-8"))
        model = values["model"]
        scores: Scores = {}
        for name, (first, second) in values["scores"].items():
            scores[name] = (float(first), float(second))
        digest = _digest_of(scores)
        if values.get("sha256", digest) != digest:
            raise ValueError("they are not those that were written")
        return model, scores


def _digest_of(scores: Scores) -> str:
    """Return the sha256 of scores, hex."""
    return hashlib.sha256(json.dumps(scores, sort_keys=True).encode()).hexdigest()


class PreferenceSteps:
    """Stands in the place of `StepSampler`: draws preferences and records them.

    Attributes:
        sampler: Draws their prompts."""

    def __init__(
        self,
        config: RunConfig,
        run_dir: RunDir,
        *,
        sampler: PromptSampler,
        preferences: Preferences,
        reference: Scores,
        recorder: PreferenceRecorder,
    ):
        self._config = config
        self._run_dir = run_dir
        self.sampler = sampler
        self._preferences = preferences
        self._reference = reference
        self._recorder = recorder

    async def sample(
        self,
        step: int,
        *,
        on_drawn: Callable[[], None] = lambda: None,
        before_recording: Callable[[], Awaitable[None]] | None = None,
    ) -> RecordedStep:
        """Return step `step`, recorded (see `StepSampler.sample`)."""
        directory = self._run_dir.step_store(step)
        if is_recorded(directory):
            recorded = read_manifest(directory)
            load_sampling(recorded.sampler, self.sampler, None)
            on_drawn()
            return RecordedStep(step, directory, recorded)
        started = time.perf_counter()
        prompts = self.sampler.draw(self._config.batch.num_prompts)
        state = sampling_state(self.sampler, None)
        on_drawn()
        drawn = [self._preferences.by_id[prompt.prompt_id] for prompt in prompts]
        groups = await asyncio.to_thread(self._recorder.groups, drawn, self._reference)
        facts = StepFacts(
            kind="rl",
            step=step,
            version=step,
            domains=self._recorder.domains,
            sampler=state,
            metrics=_metrics(drawn),
            extremes=extremes(step, groups, self._config.telemetry.samples_per_step),
        )
        if before_recording is not None:
            await before_recording()
        num_updates = self._config.batch.updates_per_rollout
        await asyncio.to_thread(self._recorder.record, directory, groups, num_updates, facts)
        seconds = {"data": time.perf_counter() - started}
        return RecordedStep(step, directory, facts, seconds, fresh=True)


def _metrics(drawn: Sequence[Preference]) -> dict[str, float]:
    lengths = []
    for one in drawn:
        for answer, label in zip(one.answers, one.labels, strict=True):
            if not math.isnan(label):
                lengths.append(answer.num_tokens)
    return {
        "sampling/skipped_steps": 0.0,
        "batch/num_samples": float(len(lengths)),
        "batch/num_tokens": float(sum(lengths)),
        "response/length_mean": float(np.mean(lengths)),
        "response/length_max": float(max(lengths)),
        "prompt/length_mean": float(np.mean([len(one.prompt.token_ids) for one in drawn])),
    }


def drawn_preferences(
    config: RunConfig, preferences: Preferences, sampler: PromptSampler
) -> list[Preference]:
    """Return all that the run looks at: kept out of training, and drawn in some step. sampler: one
    that has drawn nothing; it is used up."""
    splits = preferences.splits
    ids = [prompt.prompt_id for prompt in (*splits.heldout, *splits.validation)]
    num_train = sum(len(prompts) for prompts in splits.train.values())
    if config.num_steps * config.batch.num_prompts >= num_train:
        for prompts in splits.train.values():
            ids += [prompt.prompt_id for prompt in prompts]
    else:
        for _ in range(config.num_steps):
            ids += [prompt.prompt_id for prompt in sampler.draw(config.batch.num_prompts)]
    return [preferences.by_id[name] for name in dict.fromkeys(ids)]


def results_by_domain(
    preferences: Sequence[Preference],
    measured: Callable[[Sequence[Preference]], dict[str, float]],
) -> Results:
    """Return what is measured of the preferences of each domain, and means over all as `all`."""
    by_domain: dict[str, list[Preference]] = {}
    for one in preferences:
        by_domain.setdefault(one.prompt.domain, []).append(one)
    results: Results = {}
    for domain, members in by_domain.items():
        results[domain] = measured(members)
    results["all"] = over_domains(results, len(preferences))
    return results


class PreferenceEvaluator:
    """Accuracy of the trainer's weights on preferences that are not trained, by domain: the share
    of pairs whose chosen answer has the higher score, ties count half; of answers with labels, the
    share on the right side of KTO's baseline."""

    def __init__(
        self, config: RunConfig, preferences: Preferences, reference: Scores, scorer: AnswerScorer
    ):
        self._settings = config.preferences
        self._preferences = preferences
        self._reference = reference
        self._scorer = scorer

    async def greedy_accuracy(self, prompts: Sequence[Prompt]) -> EvaluatedShare:
        """Return the accuracy over all prompts; NaN without any."""
        results = await self.evaluate(prompts)
        return share_of(results["all"], "accuracy")

    async def evaluate(self, prompts: Sequence[Prompt], num_samples: int = 0) -> Results:
        """Return results by domain, and over all prompts as `all`: `accuracy`, `loss` and, of
        pairs, `margin`."""
        if not prompts:
            return {"all": {"prompts": 0.0}}
        chosen = [self._preferences.by_id[prompt.prompt_id] for prompt in prompts]
        scores = await self._scorer.scores(chosen)
        return results_by_domain(chosen, lambda members: self._measured(members, scores))

    def _measured(self, members: Sequence[Preference], scores: Scores) -> dict[str, float]:
        """Return the metrics of one domain's preferences."""
        values = torch.tensor(
            [self._score(one, scores[one.prompt.prompt_id]) for one in members],
            dtype=torch.float64,
        )
        first, second = values.unbind(1)
        found = {"prompts": float(len(members))}
        if self._settings.is_paired:
            margins: torch.Tensor | float = 0.0
            if self._settings.use_margins:
                margins = torch.tensor([one.margin for one in members], dtype=torch.float64)
            losses = pair_losses(self._settings, first, second, margins)
            right = (first > second).double() + 0.5 * (first == second).double()
            found["margin"] = float(self._settings.reward_scale * (first - second).mean())
        else:
            labels = torch.tensor([one.labels[0] == 1 for one in members])
            baseline = kto_baseline(second)
            losses = labelled_losses(self._settings, first, labels, baseline)
            right = ((first > baseline) == labels).double()
        found["loss"] = float(losses.mean())
        found["accuracy"] = float(right.mean())
        found["accuracy_low"], found["accuracy_high"] = wilson(found["accuracy"], len(members))
        return found

    def _score(self, one: Preference, sums: tuple[float, float]) -> list[float]:
        """Return the score of each answer (`algorithms.preferences`). sums: of their log-probs."""
        found = []
        reference = self._reference.get(one.prompt.prompt_id, (0.0, 0.0))
        for total, of_reference, answer in zip(sums, reference, one.answers, strict=True):
            score = total - of_reference
            if self._settings.takes_means:
                score /= answer.num_tokens
            found.append(score)
        return found
