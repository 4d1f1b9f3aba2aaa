"""Guided error correction: wrong completions get a second try (EDGE-GRPO, arXiv:2507.21848).

A retry continues prompt, wrong attempt and a cue. Only what the policy then adds is trained;
attempt and cue are its context, so every trained token was sampled where it is trained."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from grpo_megatron.controller.selection import Selection
from grpo_megatron.controller.session import Session
from grpo_megatron.rollout.seeds import derive_seed
from grpo_megatron.types import Prompt, RolloutGroup, ScoredGroup


class Correction:
    """`[correction]` of one run. `seen`: per retry whether it is right (NaN: unscorable)."""

    def __init__(self, session: Session, selection: Selection):
        self._session, self._selection = session, selection
        self._settings = settings = session.config.correction
        self._cue = session.tokenizer.encode(settings.cue, where="correction.cue")
        self._seen: list[float] = []
        self._no_room = 0

    async def __call__(self, step: int, groups: Sequence[ScoredGroup]) -> list[ScoredGroup]:
        """The groups with retries in place of some of their wrong completions."""
        session, retries = self._session, {}
        for number, group in enumerate(groups):
            for sample in np.flatnonzero(self._selection.correct(group) == 0).tolist():
                if prompt := self._retry(step, group.group, sample):
                    retries[number, sample] = prompt
        if not retries:
            return list(groups)
        found = await session.worker.rollouts(
            step, list(retries.values()), num_samples=1, max_tokens=self._settings.max_retry_tokens
        )
        scored = await session.rewards.score(
            [
                replace(retry, prompt=groups[number].group.prompt)
                for (number, _), retry in zip(retries, found, strict=True)
            ]
        )
        self._seen += [float(self._selection.correct(retry)[0]) for retry in scored]
        corrected = list(groups)
        for ((number, sample), prompt), retry in zip(retries.items(), scored, strict=True):
            corrected[number] = _with_retry(corrected[number], sample, prompt, retry)
        return corrected

    def take_metrics(self) -> dict[str, float]:
        seen, no_room, self._seen, self._no_room = np.array(self._seen), self._no_room, [], 0
        metrics = {"correction/retries": float(len(seen)), "correction/no_room": float(no_room)}
        if len(seen):
            metrics["correction/corrected_fraction"] = float((seen == 1).mean())
        return metrics

    def _retry(self, step: int, group: RolloutGroup, sample: int) -> Prompt | None:
        """What the retry of a sample continues; None: it gets none."""
        settings, config, prompt = self._settings, self._session.config, group.prompt
        name = f"{prompt.prompt_id}/{sample}"
        drawn = derive_seed(config.seed, step, name, "correction") / 2**31
        if drawn >= settings.probability:
            return None
        tokenizer, attempt = self._session.tokenizer, group.completions[sample]
        ids, cue = attempt.token_ids.tolist(), self._cue
        while ids and ids[-1] in tokenizer.stop_token_ids:
            ids.pop()
        if drawn < settings.probability * settings.answer_share:
            hint = settings.answer_cue.replace("{answer}", prompt.answer)
            cue = tokenizer.encode(hint, where="correction.answer_cue")
        context = (*prompt.token_ids, *ids, *cue)
        budget = min(settings.max_retry_tokens, config.max_new_tokens_of(prompt.domain))
        if len(context) + budget > config.rollout.max_model_len:
            self._no_room += 1
            return None
        return replace(prompt, prompt_id=name, token_ids=context)


def _with_retry(group: ScoredGroup, sample: int, prompt: Prompt, retry: ScoredGroup) -> ScoredGroup:
    size, before = len(group.rewards), len(group.group.prompt.token_ids)
    completions, steps = list(group.group.completions), list(group.steps or [()] * size)
    completions[sample] = replace(retry.group.completions[0], context=prompt.token_ids[before:])
    steps[sample] = (retry.steps or [()])[0]
    here = np.arange(size) == sample
    components = {
        name: np.where(here, retry.components[name], values)
        for name, values in group.components.items()
    }
    return ScoredGroup(
        replace(group.group, completions=tuple(completions)),
        components,
        np.where(here, retry.rewards, group.rewards),
        tuple(steps),
    )
