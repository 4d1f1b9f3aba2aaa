"""What `data show` prints: prompts of every domain, and its rewards' verdict on the answers; of
preferences the answers themselves."""

import asyncio
import contextlib
import dis
import json
import logging
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path

import numpy as np

from grpo_megatron.cli.preference_show import first_rows, show_answers
from grpo_megatron.config.run import DomainConfig, RunConfig
from grpo_megatron.config.templates import CHAT
from grpo_megatron.data.chat_template import ChatTemplate
from grpo_megatron.data.conversation import MESSAGES, RESPONSES
from grpo_megatron.data.dataset_answers import (
    DatasetAnswers,
    end_of_turn,
    refuse_bad_responses,
)
from grpo_megatron.data.prompt_images import ImageReader, lack_of_images
from grpo_megatron.data.prompt_text import (
    PromptRenderer,
    arguments_of,
    messages_of,
    name_of_preset,
    tokenizer_directory,
)
from grpo_megatron.data.prompts import tokenised
from grpo_megatron.data.sources import iterate_problems
from grpo_megatron.data.tokenizer import TextTokenizer, load_tokenizer
from grpo_megatron.data.tool_calls import other_format
from grpo_megatron.errors import ConfigError, DataError
from grpo_megatron.rewards.boxes import box_iou
from grpo_megatron.rewards.functions import math_verify
from grpo_megatron.rewards.pool import Component, RewardPool, components_of, raised_at
from grpo_megatron.rewards.time_limits import refuse_long_rewards
from grpo_megatron.types import Completion, Problem, Prompt, RolloutGroup, VersionSpan

Say = Callable[[str], None]

_NUM_PROMPTS = 3
_NUM_IDS = 8
"""Ids shown of each end of a prompt."""
_LONGEST_TEXT = 4000
_OF_COMPLETIONS = ("num_tokens", "truncated", "token_ids")
_NOT_JUDGED = "cannot be judged without a completion; --completion TEXT gives one"


def show_domains(
    config: RunConfig, run_model: Path, say: Say, *, completion: str | None = None
) -> None:
    """Print the first prompts of every domain, and what its rewards say of the reference answers,
    or of a `completion`; of preferences the answers and their labels. Without the model's tokenizer
    prompts are text only.

    Raises DataError and RewardError as a run would when it starts, ConfigError for a `completion`
    that no reward would judge.

    run_model: where a run of this recipe has its model, if it made one."""
    if config.trains_preferences and completion is not None:
        raise ConfigError(
            f"a run of kind {config.kind} has no rewards that could judge a completion",
            where="--completion",
            remedy="leave it out",
        )
    with _quiet_rewards(), tokenizer_directory(config.model) as directory:
        if config.model.path is None and run_model.is_dir():
            directory = run_model
        elif config.model.path is None and directory is not None:
            say = _naming(directory, name_of_preset(config.model), say)
        tokenizer = None
        images = None
        if directory is not None:
            tokenizer = load_tokenizer(directory)
            images = ImageReader.of_model(directory, tokenizer)
        else:
            say(f"{_absent_model(config)}: prompts are shown as text only")
            say("")
        first: dict[str, str] = {}
        for domain in config.domains:
            if config.trains_preferences:
                _show_preferences(domain, config, tokenizer, say)
                continue
            prompts = _show_domain(domain, config, tokenizer, images, completion, say)
            _warn_of_equal_prompts(prompts, first, say)


@contextlib.contextmanager
def _quiet_rewards() -> Iterator[None]:
    """Keep tracebacks of rewards from the screen: verdicts and errors say what they raised."""
    logger = logging.getLogger(RewardPool.__module__)
    handler = logging.NullHandler()
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


def _naming(folder: Path, name: str, say: Say) -> Say:
    """Return a `say` that says `name` in the place of a temporary folder."""
    return lambda text: say(text.replace(str(folder), name))


def _absent_model(config: RunConfig) -> str:
    if config.model.path is not None:
        return f"the model {config.model.path} is not on this machine"
    return f"the recipe has the preset {config.model.preset}, and no model.path of its checkpoint"


def _show_domain(
    domain: DomainConfig,
    config: RunConfig,
    tokenizer: TextTokenizer | None,
    images: ImageReader | None,
    completion: str | None,
    say: Say,
) -> Sequence[Prompt]:
    """Show the first prompts of a domain, and return them."""
    say(f"domain {domain.name}, from {domain.path or domain.dataset or domain.source}")
    if images is None:
        problems = list(islice(iterate_problems(domain, config.seed), _NUM_PROMPTS))
    else:
        _warn_of_no_images(domain, config, say)
        problems = _first_seen(domain, config, images, say)
    refuse_bad_responses(config, domain, problems, are_all=False)
    if tokenizer is None:
        prompts = _text_only(domain, problems)
    else:
        prompts = tokenised(domain, problems, tokenizer, images)
        if domain.template == CHAT:
            _show_chat_template(domain, config, prompts[0], tokenizer, say)
    budget = config.max_new_tokens_of(domain.name)
    components = components_of(domain, budget)
    timeout_s = config.data.reward_timeout_s
    refuse_long_rewards(components, timeout_s)
    judged = "answer"
    if completion is None:
        verdicts = asyncio.run(_verdicts(domain, components, prompts, timeout_s))
    else:
        judged = "completion"
        given = _completion(completion, tokenizer)
        verdicts = asyncio.run(_verdicts_of_completion(domain, given, prompts, timeout_s, budget))
    longest = config.rollout.max_model_len - budget
    for number, (prompt, verdict) in enumerate(zip(prompts, verdicts, strict=True), start=1):
        say("")
        say(f"prompt {number}")
        _show_text(prompt.text, say)
        if tokenizer is not None:
            _show_tokens(prompt.token_ids, tokenizer, longest, say)
        for image in prompt.images:
            say(f"image {image.digest[:16]}: {image.rows} x {image.columns} tokens")
        say(f"answer: {_shortened(prompt.answer, 200) or '(empty)'}")
        if tokenizer is not None:
            _show_what_is_not_trained(domain, config, prompt, tokenizer, say)
        for name, words in verdict.items():
            say(f"reward {name} of the {judged}: {words}")
    say("")
    return prompts


def _warn_of_no_images(domain: DomainConfig, config: RunConfig, say: Say) -> None:
    warning = lack_of_images(domain, iterate_problems(domain, config.seed))
    if warning is not None:
        say(f"warning: {warning}")


def _first_seen(
    domain: DomainConfig, config: RunConfig, images: ImageReader, say: Say
) -> list[Problem]:
    """Return the first problems whose images can be seen; say which are left out before these.

    Raises DataError where there are none."""
    seen: list[Problem] = []
    refusals: list[DataError] = []
    for problem in iterate_problems(domain, config.seed):
        (found,) = images.read(domain, [problem])
        if isinstance(found, DataError):
            refusals.append(found)
            continue
        seen.append(problem)
        if len(seen) == _NUM_PROMPTS:
            break
    if not seen:
        raise refusals[0]
    for refusal in refusals[:_NUM_PROMPTS]:
        say(f"left out: {refusal.where}: {refusal.message}")
    num_more = len(refusals) - _NUM_PROMPTS
    if num_more > 0:
        say(f"left out: {num_more} more rows")
    return seen


def _warn_of_equal_prompts(prompts: Sequence[Prompt], first: dict[str, str], say: Say) -> None:
    """Say which of a domain's prompts an earlier domain has. first: by content, the domain that has
    it first; those of `prompts` are added."""
    owners = Counter(first[prompt.content] for prompt in prompts if prompt.content in first)
    for owner, count in owners.items():
        say(
            f"warning: {count} of these {len(prompts)} prompts of domain {prompts[0].domain} are "
            f"prompts of {owner} too, which comes first: a run leaves them out here"
        )
        say("")
    for prompt in prompts:
        first.setdefault(prompt.content, prompt.domain)


def _show_preferences(
    domain: DomainConfig, config: RunConfig, tokenizer: TextTokenizer | None, say: Say
) -> None:
    say(f"domain {domain.name}, from {domain.path}")
    if domain.source == "run":
        say("what this run samples is compared: `report` and its samples show it")
        say("")
        return
    rows = first_rows(config, domain, _NUM_PROMPTS)
    problems = [row.problem for row in rows]
    if tokenizer is None:
        prompts = _text_only(domain, problems)
    else:
        prompts = tokenised(domain, problems, tokenizer)
        if domain.template == CHAT:
            _show_chat_template(domain, config, prompts[0], tokenizer, say)
    for number, (row, prompt) in enumerate(zip(rows, prompts, strict=True), start=1):
        say("")
        say(f"prompt {number}")
        _show_text(prompt.text, say)
        if tokenizer is not None:
            _show_tokens(prompt.token_ids, tokenizer, config.longest_preference, say)
        show_answers(config, domain, row, prompt, tokenizer, say)
    say("")


# --- prompts


def _text_only(domain: DomainConfig, problems: Sequence[Problem]) -> list[Prompt]:
    """Render problems by a plain template; for a chat template that is not there, show the messages
    that it would get."""
    prompts = []
    for problem in problems:
        if domain.template == CHAT:
            messages = messages_of(problem, domain)
            text = "\n".join(f"{message['role']}: {message['content']}" for message in messages)
        else:
            text = PromptRenderer(domain, None).render(problem).text
        prompts.append(Prompt("", domain.name, text, (), problem.answer, problem.metadata))
    return prompts


def _show_chat_template(
    domain: DomainConfig, config: RunConfig, prompt: Prompt, tokenizer: TextTokenizer, say: Say
) -> None:
    template = tokenizer.chat_template
    assert template is not None  # the prompt was rendered by it
    say(f"chat template: {template.where}")
    if not _has_generation_prompt(domain, template, prompt):
        say("note: it writes no generation prompt, so that the answer has to begin its own turn")
    if domain.episodes is not None:
        name = domain.episodes.tool_format
        found = other_format(name, template)
        if found is not None:
            say(f'note: tool_format is "{name}", and it writes calls in the format "{found}"')
    trains_answers = config.trains_preferences or config.uses_dataset or config.cold_start
    if trains_answers:
        _show_beginning(domain, template, say)
    end = end_of_turn(domain, tokenizer)
    say(f"an answer ends with: {' '.join(map(tokenizer.token_text, end))}")
    if end[-1] not in tokenizer.stop_token_ids:
        say(
            "note: that is no end of a completion; add it to eos_token_id of "
            "generation_config.json, or engines sample beyond it"
        )


def _show_beginning(domain: DomainConfig, template: ChatTemplate, say: Say) -> None:
    """Say what the template would write before an answer of a row, which is not trained."""
    before = template.before_answer(
        domain.template_arguments, day=domain.template_date, system_prompt=domain.system_prompt
    )
    if before and before != domain.assistant_prefix:
        say(
            f"note: between prompt and answer the template itself writes {before!r} where the "
            "answer does not begin so; rows are trained as they are, without it"
        )


def _has_generation_prompt(domain: DomainConfig, template: ChatTemplate, prompt: Prompt) -> bool:
    return template.writes_generation_prompt(
        prompt.metadata[MESSAGES],
        arguments_of(domain, prompt.metadata),
        day=domain.template_date,
    )


def _show_text(text: str, say: Say) -> None:
    for line in _shortened(text, _LONGEST_TEXT).split("\n"):
        say(f"  | {line}")


def _shortened(text: str, longest: int) -> str:
    if len(text) <= longest:
        return text
    half = longest // 2
    left_out = len(text) - 2 * half
    return f"{text[:half]} … {left_out:,} characters … {text[-half:]}"


def _show_tokens(ids: Sequence[int], tokenizer: TextTokenizer, longest: int, say: Say) -> None:
    shown = " ".join(map(str, ids))
    if len(ids) > 2 * _NUM_IDS:
        first = " ".join(map(str, ids[:_NUM_IDS]))
        last = " ".join(map(str, ids[-_NUM_IDS:]))
        shown = f"{first} … {last}"
    say(f"{len(ids)} tokens: {shown}")
    special: Counter[str] = Counter()
    special_ids = tokenizer.special_token_ids
    for token in ids:
        if token in special_ids:
            special[tokenizer.token_text(token)] += 1
    counted = ", ".join(f"{text} ({count})" for text, count in special.items())
    say(f"special tokens: {counted or 'none'}")
    if len(ids) > longest:
        say(f"note: a run drops it: {longest} tokens leave room for max_new_tokens")


def _show_what_is_not_trained(
    domain: DomainConfig, config: RunConfig, prompt: Prompt, tokenizer: TextTokenizer, say: Say
) -> None:
    """Say which answers of a row a run leaves out or cuts, where it trains those of rows."""
    if not domain.weight:
        return
    if config.uses_dataset:
        budget = config.max_new_tokens_of(domain.name)
        answers = DatasetAnswers([domain], tokenizer, budget)
        num_kept = len(answers.texts(prompt))
        num_empty = len(prompt.metadata.get(RESPONSES) or [prompt.answer]) - num_kept
        if num_empty:
            what = f"{num_empty} of its answers"
            if not num_kept:
                what = "it"
            say(f"note: a run leaves {what} out: empty, or no more than the prompt says already")
        (num_cut,) = answers.num_cut([prompt])
        if num_cut:
            say(
                f"note: a run cuts {num_cut} of its answers: longer than max_new_tokens ({budget}) "
                "with the end, which is then not trained"
            )
    elif config.cold_start is not None and domain.environment is None:
        longest = config.rollout.max_model_len
        answers = DatasetAnswers([domain], tokenizer, longest)
        if not answers.has_first(prompt):
            say("note: the cold start leaves it out: its answer is empty")
        elif answers.num_cut([prompt], of_first=True) == [1]:
            say(
                f"note: the cold start cuts its answer: longer than max_model_len ({longest}) with "
                "the end, which is then not trained"
            )


# --- rewards


async def _verdicts(
    domain: DomainConfig,
    components: Sequence[Component],
    prompts: Sequence[Prompt],
    timeout_s: float,
) -> list[dict[str, str]]:
    """What each reward says where the completion is the reference answer, by component, of every
    prompt."""
    judging = []
    rewards = []
    for reward, component in zip(domain.rewards, components, strict=True):
        if _judges_answers(component):
            judging.append(component)
            rewards.append(reward)
    not_judged = {component.name: _NOT_JUDGED for component in components}
    verdicts = [dict(not_judged) for _ in prompts]
    if not judging:
        return verdicts
    alone = domain.model_copy(update={"rewards": tuple(rewards), "accuracy": None})
    async with RewardPool([alone], timeout_s=timeout_s) as pool:
        for prompt, verdict in zip(prompts, verdicts, strict=True):
            if _is_specification(prompt.answer):
                continue
            verdict.update(await _judge(pool, prompt, judging))
    return verdicts


async def _verdicts_of_completion(
    domain: DomainConfig,
    completion: Completion,
    prompts: Sequence[Prompt],
    timeout_s: float,
    budget: int,
) -> list[dict[str, str]]:
    """What each reward says of one completion of every prompt, by component."""
    verdicts = []
    budgets = {domain.name: budget}
    async with RewardPool([domain], timeout_s=timeout_s, budgets=budgets) as pool:
        for prompt in prompts:
            [scored] = await pool.score([RolloutGroup(prompt, (completion,), 0)])
            raised = _raised(pool)
            words = {}
            for name, rewards in scored.components.items():
                words[name] = _words(float(rewards[0]), raised.get(name))
            verdicts.append(words)
    return verdicts


def _raised(pool: RewardPool) -> dict[str, str]:
    """What components raised since the last call, by name; the first of each."""
    metrics = pool.take_metrics()
    found = {}
    for component in pool.components:
        if metrics[f"reward/{component.domain}.{component.name}/raised"]:
            found[component.name] = raised_at(component.trace)
    return found


def _words(reward: float, raised: str | None) -> str:
    if not math.isnan(reward):
        return f"{reward:g}"
    if raised:
        return f"none: it raised {raised}"
    return "none: it cannot score this answer"


async def _judge(pool: RewardPool, prompt: Prompt, judging: Sequence[Component]) -> dict[str, str]:
    """The components' values of the answer, within their tags: alone, and in a box as of MATH."""
    completions = []
    for component in judging:
        completions.append(_completion(_tagged(prompt.answer, component)))
        completions.append(_completion(_tagged(f"$\\boxed{{{prompt.answer}}}$", component)))
    [scored] = await pool.score([RolloutGroup(prompt, tuple(completions), 0)])
    raised = _raised(pool)
    words = {}
    for number, component in enumerate(judging):
        name = component.name
        alone = float(scored.components[name][2 * number])
        boxed = float(scored.components[name][2 * number + 1])
        words[name] = _words(alone, raised.get(name))
        if boxed > alone:
            words[name] = f"{boxed:g}, as \\boxed{{…}}"
        elif component.reward.function is math_verify and boxed < 1:
            words[name] += f"\nnote: as \\boxed{{…}} it gets {boxed:g}; is its LaTeX whole?"
    return words


def _judges_answers(component: Component) -> bool:
    """Whether a reward compares the completion with the answer, by itself: not one that looks at
    the completion alone or asks a server. A box in pixels of the file is no completion where those
    of the image as the model sees it are scaled."""
    reward = component.reward
    if reward.function is box_iou and "size_fields" in reward.arguments:
        return False
    needs_a_completion = any(name in reward.context for name in _OF_COMPLETIONS)
    return not (needs_a_completion or reward.is_async) and _reads_answer(reward.function)


def _reads_answer(function: Callable[..., object]) -> bool:
    """Whether a function's code uses its argument `answer`, else its second one; True where its
    code cannot be seen."""
    code = getattr(function, "__code__", None)
    if code is None:
        return True
    name = "answer"
    if name not in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]:
        if code.co_argcount < 2:
            return True
        name = code.co_varnames[1]
    if name in code.co_cellvars:  # an inner function has it
        return True
    used = (instruction.argval for instruction in dis.get_instructions(code))
    return any(value == name or (isinstance(value, tuple) and name in value) for value in used)


def _is_specification(answer: str) -> bool:
    """Whether the answer is a table for the reward, such as tests of programs, and nothing that a
    policy would write."""
    try:
        return isinstance(json.loads(answer), dict)
    except ValueError:
        return False


def _tagged(answer: str, component: Component) -> str:
    """Return the answer where the component looks for it."""
    arguments = component.reward.arguments
    tag = arguments.get("answer_tag")
    if tag is not None:
        answer = f"<{tag}>{answer}</{tag}>"
    think_tag = arguments.get("think_tag")
    if think_tag is not None:
        answer = f"</{think_tag}>{answer}"
    return answer


def _completion(text: str, tokenizer: TextTokenizer | None = None) -> Completion:
    """Return a text as a completion; without a tokenizer it has no tokens."""
    ids: list[int] = []
    if tokenizer is not None:
        ids = tokenizer.encode(text, where="--completion")
    length = len(ids)
    return Completion(
        np.asarray(ids, np.int32),
        np.zeros(length, np.float32),
        (VersionSpan(0, length, 0),),
        "stop",
        text,
    )
