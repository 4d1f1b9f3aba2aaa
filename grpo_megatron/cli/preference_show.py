"""What `data show` prints of preferences: the first rows of a domain with their answers."""

from collections.abc import Callable, Sequence
from itertools import islice

from grpo_megatron.config.preferences import PreferencesConfig
from grpo_megatron.config.run import DomainConfig, RunConfig
from grpo_megatron.data.dataset_answers import DatasetAnswers
from grpo_megatron.data.preference_rows import PreferenceRow
from grpo_megatron.data.preferences import read_preferences, why_dropped
from grpo_megatron.data.step_rows import StepRow, bare_step, marked_answer
from grpo_megatron.data.tokenizer import TextTokenizer
from grpo_megatron.types import Prompt

Say = Callable[[str], None]

_NAMES = {True: ("rejected", "chosen"), False: ("undesirable", "desirable")}
"""Of answers with the labels 0 and 1, by whether they are compared in pairs."""


def first_rows(
    config: RunConfig, domain: DomainConfig, count: int
) -> list[PreferenceRow | StepRow]:
    """Return the first rows of a domain's file. DataError where they are no preferences."""
    return list(islice(read_preferences(domain, config.preferences), count))


def show_answers(
    config: RunConfig,
    domain: DomainConfig,
    row: PreferenceRow | StepRow,
    prompt: Prompt,
    tokenizer: TextTokenizer | None,
    say: Say,
) -> None:
    """Print the answers of a row with their labels, and their tokens where a tokenizer is there.

    Raises DataError where the tokenizer cannot write one."""
    dropped = why_dropped(row, config.preferences)
    if isinstance(row, StepRow):
        _show_steps(config.preferences, row, say)
    else:
        _show_labelled(config.preferences, row, say)
    if dropped:
        say(f"note: a run leaves it out: {dropped}")
    elif tokenizer is not None:
        _show_tokens(config, domain, row, prompt, tokenizer, say)


def _show_steps(settings: PreferencesConfig, row: StepRow, say: Say) -> None:
    for number, (step, label) in enumerate(zip(row.steps, row.labels, strict=True), start=1):
        marked = bare_step(step, settings.step_token) + settings.step_token
        say(f"step {number}, label {label:g}: {marked}")


def _show_labelled(settings: PreferencesConfig, row: PreferenceRow, say: Say) -> None:
    names = _NAMES[settings.is_paired]
    for text, label in zip(row.answers, row.labels, strict=True):
        say(f"{names[int(label)]}: {text}")
    if settings.use_margins:
        say(f"margin: {row.margin:g}")


def _show_tokens(
    config: RunConfig,
    domain: DomainConfig,
    row: PreferenceRow | StepRow,
    prompt: Prompt,
    tokenizer: TextTokenizer,
    say: Say,
) -> None:
    counts: Sequence[int]
    if isinstance(row, StepRow):
        answer = marked_answer(row, prompt, tokenizer, config.preferences.step_token)
        if isinstance(answer, str):
            say(f"note: a run leaves it out: {answer}")
            return
        counts = [answer.num_tokens - 1]  # the last step token stands twice
    else:
        encoder = DatasetAnswers([domain], tokenizer, config.rollout.max_model_len + 1)
        counts = [encoder.completion(0, prompt, text).num_tokens for text in row.answers]
    say(f"tokens of the answers: {', '.join(map(str, counts))}, with their ends")
    longest = config.longest_preference
    if len(prompt.token_ids) + max(counts) > longest:
        say(f"note: a run leaves it out: it is longer than {longest} tokens")
