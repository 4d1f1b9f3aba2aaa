"""Rejection sampling: verified samples of the policy become a data set for supervised training.

Of the samples of a prompt those are kept which are correct, finished and in one language; equal
ones once, at most so many a prompt (DeepSeek-R1, arXiv:2501.12948, section 2.3.3)."""

import json
from collections.abc import Iterator, Sequence
from itertools import islice

from grpo_megatron.controller.group_filter import GroupFilter
from grpo_megatron.controller.session import Session
from grpo_megatron.data.tokenizer import TextTokenizer
from grpo_megatron.errors import DataError
from grpo_megatron.files import write_atomically
from grpo_megatron.rewards.functions import NOT_PROSE, check_scripts, language_consistency
from grpo_megatron.types import ScoredGroup

_PROMPTS_AT_ONCE = 256


async def sample_dataset(session: Session) -> dict[str, float]:
    """Write `dataset.jsonl`: question, answer, domain, responses. Returns asked and kept counts."""
    settings = session.config.rejection
    selection = GroupFilter(session.config)
    check_scripts(scripts=settings.scripts)
    prompts = [
        prompt
        for domain in session.config.domains
        if domain.weight
        for prompt in session.splits.train[domain.name][: settings.max_prompts]
    ]
    lines = []
    kept = 0
    for start in range(0, len(prompts), _PROMPTS_AT_ONCE):
        groups = await session.worker.rollouts(
            0, prompts[start : start + _PROMPTS_AT_ONCE], num_samples=settings.num_samples
        )
        for group in await session.rewards.score(groups):
            accepted = (
                text
                for text in _accepted(group, selection, settings.scripts)
                if _is_text(text, session.tokenizer)
            )
            responses = list(islice(accepted, settings.max_per_prompt))
            kept += len(responses)
            if responses:
                prompt = group.group.prompt
                lines.append(
                    json.dumps(
                        {
                            "question": prompt.text,
                            "answer": prompt.answer,
                            "domain": prompt.domain,
                            "responses": responses,
                        }
                    )
                )
    write_atomically(session.run_dir.dataset, "\n".join([*lines, ""]))
    return {
        "prompts": float(len(prompts)),
        "samples": float(len(prompts) * settings.num_samples),
        "kept_prompts": float(len(lines)),
        "kept_samples": float(kept),
    }


def _is_text(text: str, tokenizer: TextTokenizer) -> bool:
    """Whether it can be tokenised again: a policy may sample tokens that stand for no text."""
    try:
        tokenizer.encode(text)
    except DataError:
        return False
    return True


def _accepted(group: ScoredGroup, selection: GroupFilter, scripts: Sequence[str]) -> Iterator[str]:
    seen = set()
    for correct, completion in zip(selection.correct(group), group.group.completions, strict=True):
        text = completion.text
        if correct != 1 or completion.truncated or text.strip() in seen:
            continue
        if (
            scripts
            and any(map(str.isalpha, NOT_PROSE.sub(" ", text)))
            and language_consistency(text, "", scripts=scripts, think_tag=None) < 1.0
        ):
            continue
        seen.add(text.strip())
        yield text
