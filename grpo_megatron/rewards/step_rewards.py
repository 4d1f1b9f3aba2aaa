"""Process supervision by a served model: one reward for each step of a solution."""

from typing import Any, NamedTuple

from grpo_megatron.errors import RewardError
from grpo_megatron.rewards.argument_checks import check_whole_number
from grpo_megatron.rewards.registry import needs
from grpo_megatron.rewards.served import Attempts, finite_score, post


class Step(NamedTuple):
    """A part of a completion that is scored by itself."""

    end: int
    """Place in the completion behind its last character."""
    text: str
    """Without white space at its ends, and without any step token of the policy's own."""


def steps_of(completion: str, separator: str, step_token: str = "") -> list[Step]:
    """Return the parts between separators that are more than white space, in order.

    step_token: what the model that scores steps is asked at. Where the policy writes it, it is no
    text: a part with nothing else is no step, which would get the score of the one before."""
    steps = []
    start = 0
    for part in completion.split(separator):
        text = _without(step_token, part).strip()
        if text:
            steps.append(Step(start + len(part.rstrip()), text))
        start += len(part) + len(separator)
    return steps


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
    step_token: str = "<extra_0>",
    separator: str = "\n\n",
    attempts: Any = 2,
    **_: object,
) -> None:
    """Raise RewardError where a step would have no end, or no token to be scored at, or `attempts`
    is no number of requests."""
    check_whole_number("attempts", attempts, least=1)
    for name, value in {"step_token": step_token, "separator": separator}.items():
        if value == "":
            raise RewardError(f"{name} is empty", remedy=f"leave {name} out for its default")


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
    requests = Attempts(attempts)
    reply = await post(f"{url}/pooling", body, timeout_s, api_key, attempts=requests)
    scores = reply["data"][0]["data"]
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
