"""Rejection sampling: verified samples of the policy become a data set for supervised training.

Of the samples of a prompt those are kept which are correct, finished and in one language; equal
ones once, at most so many a prompt (DeepSeek-R1, arXiv:2501.12948, section 2.3.3)."""

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from grpo_megatron.config.run import DomainConfig, PairChoice, RejectionConfig, RunConfig
from grpo_megatron.config.templates import CHAT
from grpo_megatron.controller.display import show
from grpo_megatron.controller.group_filter import GroupFilter
from grpo_megatron.data.conversation import MESSAGES, TOOLS, tools_of, with_answer
from grpo_megatron.data.preference_pairs import pair_of
from grpo_megatron.data.preference_rows import CHOSEN, REJECTED
from grpo_megatron.data.prompts import Splits
from grpo_megatron.data.tokenizer import TextTokenizer
from grpo_megatron.errors import DataError
from grpo_megatron.files import write_atomically
from grpo_megatron.rewards.functions import NOT_PROSE, check_scripts, language_consistency
from grpo_megatron.rewards.pool import RewardPool
from grpo_megatron.rollout.chunk_dispatch import ChunkDispatcher
from grpo_megatron.rundir import RunDir
from grpo_megatron.types import Prompt, ScoredGroup

_PROMPTS_AT_ONCE = 256


async def sample_dataset(
    config: RunConfig,
    run_dir: RunDir,
    *,
    splits: Splits,
    dispatcher: ChunkDispatcher,
    rewards: RewardPool,
    tokenizer: TextTokenizer,
) -> dict[str, float]:
    """Write `dataset.jsonl`: question, answer, domain, responses; with the chat template also the
    conversation as `messages`, for models with another one. Returns asked and kept counts.

    Raises RewardError: `rejection.scripts` names no script; DataError: nothing is kept, so that
    there is no data set."""
    settings = config.rejection
    selection = GroupFilter(config)
    check_scripts(scripts=settings.scripts)
    prompts = _training_prompts(config, splits)
    domains = {domain.name: domain for domain in config.domains}
    lines = []
    num_kept = 0
    unfit: Counter[str] = Counter()
    for start in range(0, len(prompts), _PROMPTS_AT_ONCE):
        groups = await dispatcher.rollouts(
            0, prompts[start : start + _PROMPTS_AT_ONCE], num_samples=settings.num_samples
        )
        for group in await rewards.score(groups):
            domain = domains[group.group.prompt.domain]
            unfit.update(_unfit(group, selection))
            if settings.pairs is not None:
                row = _pair_row(group, selection, settings, settings.pairs, tokenizer, domain)
                if row:
                    num_kept += 2
            else:
                responses = _responses(group, selection, settings, tokenizer)
                num_kept += len(responses)
                row = _row(group.group.prompt, responses, domain)
            if row:
                # all samples would be lost for a value of a row's own that JSON has not
                lines.append(json.dumps(row, default=str))
    num_samples = len(prompts) * settings.num_samples
    told = _told(num_kept, num_samples, unfit)
    if not lines:
        raise DataError(
            f"{told}: there is no data set",
            where="[rejection]",
            remedy="raise rollout.max_new_tokens for truncated samples, look at rewards and "
            "accuracy_threshold of the domains for others, or raise rejection.num_samples",
        )
    show("message", text=f"{told}, for {len(lines)} of {len(prompts)} prompts")
    write_atomically(run_dir.dataset, "\n".join([*lines, ""]))
    return {
        "prompts": float(len(prompts)),
        "samples": float(num_samples),
        "kept_prompts": float(len(lines)),
        "kept_samples": float(num_kept),
    }


def _unfit(group: ScoredGroup, selection: GroupFilter) -> Counter[str]:
    """Count the samples of a group that are no right and whole answers, by why."""
    counts: Counter[str] = Counter()
    for correct, completion in zip(selection.correct(group), group.group.completions, strict=True):
        if completion.truncated:
            counts["truncated"] += 1
        elif math.isnan(correct):
            counts["unscorable"] += 1
        elif correct != 1:
            counts["incorrect"] += 1
        elif not completion.text.strip():
            counts["empty"] += 1
    return counts


def _told(num_kept: int, num_samples: int, unfit: Mapping[str, int]) -> str:
    """Say what became of the samples."""
    told = f"kept {num_kept} of {num_samples} samples"
    if not unfit:
        return told
    reasons = ", ".join(f"{count} {reason}" for reason, count in unfit.items())
    return f"{told} ({reasons})"


def _training_prompts(config: RunConfig, splits: Splits) -> list[Prompt]:
    """Return the first prompts of every domain that is trained."""
    prompts: list[Prompt] = []
    for domain in config.domains:
        if domain.weight:
            prompts += splits.train[domain.name][: config.rejection.max_prompts]
    return prompts


def _responses(
    group: ScoredGroup,
    selection: GroupFilter,
    settings: RejectionConfig,
    tokenizer: TextTokenizer,
) -> list[str]:
    """Return the first `max_per_prompt` accepted texts of a group."""
    responses: list[str] = []
    for text in _accepted(group, selection, settings.scripts):
        if len(responses) == settings.max_per_prompt:
            break
        # an empty one is left out where it is trained
        if text.strip() and _is_text(text, tokenizer):
            responses.append(text)
    return responses


def _pair_row(
    group: ScoredGroup,
    selection: GroupFilter,
    settings: RejectionConfig,
    how: PairChoice,
    tokenizer: TextTokenizer,
    domain: DomainConfig,
) -> dict[str, object]:
    """Return the group's pair as a row for kind preferences; empty where it has none.

    Texts end like finished answers when they are trained, so truncated ones are in no pair."""
    prompt = group.group.prompt
    texts = [completion.text for completion in group.group.completions]
    usable = []
    for text, completion in zip(texts, group.group.completions, strict=True):
        is_whole = not completion.truncated and bool(text.strip()) and _is_text(text, tokenizer)
        usable.append(is_whole and _has_scripts(text, settings.scripts))
    pair = pair_of(group.rewards, selection.correct(group), usable, how)
    if pair is None or texts[pair.chosen] == texts[pair.rejected]:
        return {}
    row: dict[str, object] = {"domain": prompt.domain, "margin": pair.margin}
    answers = {CHOSEN: texts[pair.chosen], REJECTED: texts[pair.rejected]}
    if domain.template != CHAT:
        return {"prompt": prompt.text, **answers, **row}
    row["prompt"] = prompt.metadata[MESSAGES]
    row.update(_tools_of(prompt))
    for name, text in answers.items():
        row[name] = with_answer(prompt, text, domain.assistant_prefix)[-1:]
    return row


def _row(prompt: Prompt, responses: Sequence[str], domain: DomainConfig) -> dict[str, object]:
    if not responses:
        return {}
    row: dict[str, object] = {
        "question": prompt.text,
        "answer": prompt.answer,
        "domain": prompt.domain,
        "responses": responses,
    }
    if domain.template == CHAT:
        row["messages"] = with_answer(prompt, responses[0], domain.assistant_prefix)
        row.update(_tools_of(prompt))
    return row


def _tools_of(prompt: Prompt) -> dict[str, object]:
    """Return the field with the tools that the chat template wrote into a prompt, if it did."""
    tools = tools_of(prompt.metadata)
    if not tools:
        return {}
    return {TOOLS: tools}


def _is_text(text: str, tokenizer: TextTokenizer) -> bool:
    """Whether it can be tokenised again: a policy may sample tokens that stand for no text."""
    try:
        tokenizer.encode(text)
    except DataError:
        return False
    return True


def _accepted(group: ScoredGroup, selection: GroupFilter, scripts: Sequence[str]) -> Iterator[str]:
    """Different texts that are correct, finished and in the scripts."""
    seen = set()
    for correct, completion in zip(selection.correct(group), group.group.completions, strict=True):
        text = completion.text
        if correct != 1 or completion.truncated or text.strip() in seen:
            continue
        if not _has_scripts(text, scripts):
            continue
        seen.add(text.strip())
        yield text


def _has_scripts(text: str, scripts: Sequence[str]) -> bool:
    """Whether a text is in the scripts, if any are asked for."""
    return not scripts or _is_in_scripts(text, scripts)


def _is_in_scripts(text: str, scripts: Sequence[str]) -> bool:
    """Whether every word of the prose is; formulas and code do not count."""
    has_prose = any(letter.isalpha() for letter in NOT_PROSE.sub(" ", text))
    if not has_prose:
        return True
    return language_consistency(text, "", scripts=scripts, think_tag=None) >= 1.0
