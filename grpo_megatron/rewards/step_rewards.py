"""Process supervision by a served model: one reward for each step of a solution."""

import re
from typing import Any, NamedTuple

from grpo_megatron.errors import RewardError
from grpo_megatron.rewards.argument_checks import check_text, check_whole_number
from grpo_megatron.rewards.registry import needs
from grpo_megatron.rewards.served import (
    Attempts,
    address_of,
    check_scale,
    check_server,
    finite_score,
    part_of,
    post,
)


class Step(NamedTuple):
    """A part of a completion that is scored by itself."""

    end: int
    """Place in the completion behind its last character."""
    text: str
    """Without white space at its ends, and without any step token of the policy's own."""


def steps_of(completion: str, separator: str, step_token: str = "") -> list[Step]:
    """Return the parts between separators that are more than white space, in order. A line of the
    completion may also end with a carriage return and a newline.

    step_token: what the model that scores steps is asked at. Where the policy writes it, it is no
    text: a part with nothing else is no step, which would get the score of the one before."""
    steps = []
    start = 0
    for begin, end in _separators_in(completion, separator):
        part = completion[start:begin]
        text = _without(step_token, part).strip()
        if text:
            steps.append(Step(start + len(part.rstrip()), text))
        start = end
    return steps


def _separators_in(completion: str, separator: str) -> list[tuple[int, int]]:
    """Return where each separator begins and ends, and the end of the completion as the last."""
    pattern = re.escape(separator).replace("\\\n", "\r?\n")
    places = [found.span() for found in re.finditer(pattern, completion)]
    places.append((len(completion), len(completion)))
    return places


def _without(token: str, text: str) -> str:
    """Return a text without a token, also where that is made of what is left around another:
    `<ext<extra_0>ra_0>`. One pass, however deep they are nested."""
    if not token or token not in text:
        return text
    kept: list[str] = []
    for character in text:
        kept.append(character)
        if character == token[-1] and "".join(kept[-len(token) :]) == token:
            del kept[-len(token) :]
    return "".join(kept)


def check_marks(
    *,
    step_token: Any = "<extra_0>",
    separator: Any = "\n\n",
    label: Any = 1,
    scale: Any = 1.0,
    shift: Any = 0.0,
    **others: Any,
) -> None:
    """Raise RewardError unless each argument of the recipe is what it has to be: a step needs an
    end, and a token to be scored at."""
    check_server(**others)
    check_scale(scale=scale, shift=shift)
    check_whole_number("label", label, least=0)
    check_text("step_token", step_token)
    check_text("separator", separator)


@needs(check=check_marks)
async def process_reward_model(
    completion: str,
    answer: str,
    *,
    prompt: str,
    url: str,
    model: str,
    api_key: str | None = None,
    separator: str = "\n\n",
    step_token: str = "<extra_0>",
    label: int = 1,
    scale: float = 1.0,
    shift: float = 0.0,
    timeout_s: float | None = None,
    attempts: int = 2,
) -> list[tuple[int, float]]:
    """`(score - shift) * scale` of each step as (its end in the completion, reward), by a process
    reward model behind a vLLM server's `/pooling` route (Qwen2.5-Math-PRM, arXiv:2501.07301;
    Math-Shepherd, arXiv:2312.08935), for process supervision (DeepSeekMath, arXiv:2402.03300).

    Steps are what `separator` divides; the model reads prompt and steps, with `step_token` behind
    each, and the server scores these tokens only (its pooler is STEP). `label`: which of the
    scores of a step is that for a right one. A `step_token` that the policy wrote itself, or that
    stands in the prompt, is not passed on, so that each step has one score. `attempts`: requests
    to a server that is busy. RewardError where the scores are not one finite number a step."""
    steps = steps_of(completion, separator, step_token)
    if not steps:
        return []
    solution = "".join(step.text + step_token for step in steps)
    text = _without(step_token, prompt) + solution
    body = {"model": model, "input": text, "add_special_tokens": False}
    requests = Attempts(attempts, timeout_s)
    reply = await post(address_of(url, "/pooling"), body, api_key, attempts=requests)
    remedy = "let url be that of a process reward model's server, such as vLLM's --runner pooling"
    scores = part_of(reply, "data", 0, "data", url=url, remedy=remedy)
    if not isinstance(scores, list) or len(scores) != len(steps):
        raise RewardError(
            f"{_number_of(scores)} scores for {len(steps)} steps",
            where=url,
            remedy=f"serve a process reward model that scores {step_token!r} alone: of another "
            "family than Qwen2.5-Math-PRM with --pooler-config "
            '\'{"tok_pooling_type": "STEP", "step_tag_id": …}\'',
        )
    rewards = []
    for step, score in zip(steps, scores, strict=True):
        rewards.append((step.end, (_of_label(score, label, url) - shift) * scale))
    return rewards


def _number_of(scores: Any) -> int:
    if isinstance(scores, list):
        return len(scores)
    return 1


def _of_label(score: Any, label: int, url: str) -> float:
    """Return the score of one class; of a model with one output, that."""
    if not isinstance(score, list):
        return finite_score(score, url)
    if len(score) == 1:
        return finite_score(score[0], url)
    if not 0 <= label < len(score):
        raise RewardError(
            f"a step has {len(score)} scores, none of number {label}",
            where=url,
            remedy=f"set `label` to one of 0 to {len(score) - 1}",
        )
    return finite_score(score[label], url)
