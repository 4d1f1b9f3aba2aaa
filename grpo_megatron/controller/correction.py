"""Guided error correction: wrong completions get a second try (EDGE-GRPO, arXiv:2507.21848).

A retry continues prompt, wrong attempt and a cue. Only what the policy then adds is trained;
attempt and cue are its context, so every trained token was sampled where it is trained."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from grpo_megatron.config.run import CorrectionConfig, RunConfig
from grpo_megatron.controller.group_filter import GroupFilter
from grpo_megatron.data.tokenizer import TextTokenizer
from grpo_megatron.rewards.pool import RewardPool
from grpo_megatron.rollout.chunk_dispatch import ChunkDispatcher
from grpo_megatron.rollout.seeds import derive_seed
from grpo_megatron.types import Prompt, RolloutGroup, ScoredGroup, StoredCompletion


class Correction:
    """`[correction]` of one run, `settings`."""

    def __init__(
        self,
        config: RunConfig,
        settings: CorrectionConfig,
        *,
        group_filter: GroupFilter,
        dispatcher: ChunkDispatcher,
        rewards: RewardPool,
        tokenizer: TextTokenizer,
    ):
        self._config = config
        self._settings = settings
        self._filter = group_filter
        self._dispatcher = dispatcher
        self._rewards = rewards
        self._tokenizer = tokenizer
        self._cue = tokenizer.encode(settings.cue, where="correction.cue")
        self._seen: list[float] = []  # of every retry, whether it is right; NaN: unscorable
        self._no_room = 0

    async def retry(self, step: int, groups: Sequence[ScoredGroup]) -> list[ScoredGroup]:
        """Return the groups with retries in place of some of their wrong completions."""
        prompts: dict[tuple[int, int], Prompt] = {}  # of retries, by group and sample
        for number, group in enumerate(groups):
            for sample in np.flatnonzero(self._filter.correct(group) == 0).tolist():
                prompt = self._continued(step, group.group, sample)
                if prompt is not None:
                    prompts[number, sample] = prompt
        if not prompts:
            return list(groups)

        found = await self._dispatcher.rollouts(
            step, list(prompts.values()), num_samples=1, max_tokens=self._settings.max_retry_tokens
        )
        answered = []
        for (number, _), retry in zip(prompts, found, strict=True):
            answered.append(retry.as_answers_to(groups[number].group.prompt))
        scored = await self._rewards.score(answered)
        self._seen += [float(self._filter.correct(retry)[0]) for retry in scored]

        corrected = list(groups)
        for (number, sample), rescored in zip(prompts, scored, strict=True):
            corrected[number] = _with_retry(corrected[number], sample, rescored)
        return corrected

    def take_metrics(self) -> dict[str, float]:
        """Return counts since the last call."""
        seen = np.array(self._seen)
        metrics = {
            "correction/retries": float(len(seen)),
            "correction/no_room": float(self._no_room),
        }
        if len(seen):
            metrics["correction/corrected_fraction"] = float((seen == 1).mean())
        self._seen = []
        self._no_room = 0
        return metrics

    def _continued(
        self, step: int, group: RolloutGroup[StoredCompletion], sample: int
    ) -> Prompt | None:
        """Return what the retry of a sample continues; None: it gets none."""
        settings = self._settings
        config = self._config
        prompt = group.prompt
        name = f"{prompt.prompt_id}/{sample}"
        drawn = derive_seed(config.seed, step, name, "correction") / 2**31
        if drawn >= settings.probability:
            return None
        tokenizer = self._tokenizer
        completion = group.completions[sample]
        answered_ids = prompt.token_ids
        if completion.answered_ids is not None:
            answered_ids = completion.answered_ids
        attempt = completion.token_ids.tolist()
        while attempt and attempt[-1] in tokenizer.stop_token_ids:
            attempt.pop()
        cue = self._cue
        if drawn < settings.probability * settings.answer_share:
            hint = settings.answer_cue.replace("{answer}", prompt.answer)
            cue = tokenizer.encode(hint, where="correction.answer_cue")
        context = (*answered_ids, *attempt, *cue)
        budget = min(settings.max_retry_tokens, config.max_new_tokens_of(prompt.domain))
        if len(context) + budget > config.rollout.max_model_len:
            self._no_room += 1
            return None
        return replace(prompt, prompt_id=name, token_ids=context)


def _with_retry(group: ScoredGroup, sample: int, retry: ScoredGroup) -> ScoredGroup:
    """Return the group with the retry in the place of a sample."""
    size = len(group.rewards)
    completions = list(group.group.completions)
    completions[sample] = retry.group.completions[0]
    steps = list(group.steps or [()] * size)
    steps[sample] = ()
    if retry.steps:
        steps[sample] = retry.steps[0]
    here = np.arange(size) == sample
    components = {}
    for name, values in group.components.items():
        components[name] = np.where(here, retry.components[name], values)
    return ScoredGroup(
        replace(group.group, completions=tuple(completions)),
        components,
        np.where(here, retry.rewards, group.rewards),
        tuple(steps),
    )
