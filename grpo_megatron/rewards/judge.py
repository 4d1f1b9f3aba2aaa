"""Learned rewards behind an OpenAI-compatible server: a judge that writes, a model that scores. One
that fails, takes longer than `timeout_s` (default: what `data.reward_timeout_s` leaves it) or gives
no score makes the sample unscorable."""

import math
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from grpo_megatron.config.suggest import did_you_mean
from grpo_megatron.errors import RewardError, raised_as
from grpo_megatron.rewards.argument_checks import (
    check_switch,
    check_tags,
    check_text,
    check_whole_number,
)
from grpo_megatron.rewards.registry import needs
from grpo_megatron.rewards.served import (
    Attempts,
    UnreadableError,
    address_of,
    check_scale,
    check_server,
    finite_score,
    part_of,
    post,
)
from grpo_megatron.rewards.verdict import scores_of, verdict_of

_RUBRIC = Path(__file__).with_suffix(".txt").read_text(encoding="utf-8").removesuffix("\n")
_DEFAULT_CRITERIA = ("The response is correct.",)


class Criterion(NamedTuple):
    """One line of a rubric, and its share of the score."""

    criterion: str
    weight: float = 1.0


def check_judge(
    *,
    criteria: Sequence[Any] | None = None,
    criteria_field: Any = None,
    think_tag: Any = None,
    template: str = _RUBRIC,
    max_tokens: Any = 512,
    **others: Any,
) -> None:
    """Raise RewardError unless the recipe's `criteria` are a rubric, `template` has no other fields
    than are filled in, and each of the others is what it has to be."""
    check_server(**others)
    check_tags(think_tag=think_tag)
    check_whole_number("max_tokens", max_tokens, least=1)
    if criteria_field is not None:
        check_text("criteria_field", criteria_field)
    if criteria is not None:
        read_criteria(criteria, "criteria")
    with raised_as(
        RewardError,
        "template cannot be filled in",
        (AttributeError, LookupError, TypeError, ValueError),
        remedy="its fields are {criteria}, {prompt}, {answer} and {completion}; write literal "
        "braces as {{ and }}",
    ):
        template.format(criteria="", prompt="", answer="", completion="")


def check_reward_model(
    *,
    scale: Any = 1.0,
    shift: Any = 0.0,
    think_tag: Any = None,
    end: Any = "",
    label: Any = None,
    add_special_tokens: Any = False,
    **others: Any,
) -> None:
    """Raise RewardError unless each argument of the recipe is what it has to be."""
    check_server(**others)
    check_scale(scale=scale, shift=shift)
    check_tags(think_tag=think_tag)
    check_text("end", end, may_be_empty=True)
    if label is not None:
        check_whole_number("label", label, least=0)
    check_switch("add_special_tokens", add_special_tokens)


@needs(check=check_judge)
async def judge(
    completion: str,
    answer: str,
    *,
    prompt: str,
    metadata: Mapping[str, Any],
    url: str,
    model: str,
    api_key: str | None = None,
    criteria: Sequence[Any] | None = None,
    criteria_field: str | None = None,
    think_tag: str | None = None,
    template: str = _RUBRIC,
    timeout_s: float | None = None,
    attempts: int = 2,
    max_tokens: int = 512,
) -> float:
    """A rubric-based generative reward in [0, 1]: the weighted mean over criteria of what a chat
    model says. A criterion is a text or `{criterion, weight}`.

    criteria_field: the field of the row with the prompt's own criteria (DeepSeek-V3.2,
    arXiv:2512.02556); rows without it are judged by `criteria`. think_tag: only what stands behind
    the thought is judged, 0 where nothing does. `template` has the fields criteria, prompt, answer
    and completion; the reply has to score every criterion.

    A judge may think before it scores; what counts stands behind its `</think>`. A reply without
    that end which `max_tokens` has cut is no verdict.

    RewardError after `attempts` requests without such a reply, whether the server was busy or the
    judge unclear, and where nothing says by what to judge."""
    rubric = _rubric(metadata, criteria_field, criteria)
    if think_tag is not None:
        prompt, completion = without_thought(prompt, completion, think_tag)
        if not completion.strip():
            return 0.0
    listed = "\n".join(f"{number}. {line.criterion}" for number, line in enumerate(rubric, 1))
    text = template.format(criteria=listed, prompt=prompt, answer=answer, completion=completion)
    body = {
        "model": model,
        "temperature": 0.0,
        "max_tokens": max_tokens,
        "messages": [{"role": "user", "content": text}],
    }
    requests = Attempts(attempts, timeout_s)
    address = address_of(url, "/v1/chat/completions")
    while True:
        try:
            reply = await post(address, body, api_key, attempts=requests)
            scores = _scores_in(reply, len(rubric), max_tokens, url)
        except UnreadableError:
            if not requests.has_more:
                raise
            continue
        return _weighted_mean(scores, rubric) / 10


def _scores_in(reply: Any, num_criteria: int, max_tokens: int, url: str) -> list[float]:
    """Return the scores of a chat model's reply, one for each criterion. Raises UnreadableError
    where it is no such reply, or leaves a criterion without a score."""
    remedy = "let url be that of a chat model's server, which answers as OpenAI's API has it"
    said = part_of(reply, "choices", 0, "message", "content", url=url, remedy=remedy)
    if said is None:  # all of it was thought, or was cut before it began
        said = ""
    if not isinstance(said, str):
        raise UnreadableError(
            f"the content of the reply is no text: {repr(said)[:200]}", where=url, remedy=remedy
        )
    is_cut = reply["choices"][0].get("finish_reason") == "length"
    scores = scores_of(verdict_of(said, is_cut=is_cut), num_criteria)
    if scores:
        return scores
    longer = None
    if is_cut:
        longer = f"max_tokens = {max_tokens} has cut its reply; raise it"
    raise UnreadableError(
        f"the judge did not score every criterion: {said[:200]!r}", where=url, remedy=longer
    )


def _rubric(
    metadata: Mapping[str, Any], field: str | None, criteria: Sequence[Any] | None
) -> list[Criterion]:
    """Return the row's criteria, else the recipe's. Raises RewardError where there are none, or
    they are no criteria."""
    if field is None:
        return read_criteria(criteria or _DEFAULT_CRITERIA, "criteria")
    own = metadata.get(field)
    if not _is_missing(own):
        return read_criteria(own, f"field {field!r} of the row")
    if criteria is not None:
        return read_criteria(criteria, "criteria")
    raise RewardError(
        f"the row has no criteria in {field!r}; it has: {', '.join(metadata) or 'nothing'}",
        remedy=f"add {field!r} to the row, or set `criteria` of the reward for rows without",
    )


def _is_missing(own: Any) -> bool:
    """Whether a row's field says nothing: null, NaN (an empty cell of a table), or no entry."""
    if isinstance(own, float):
        return math.isnan(own)
    return own is None or (isinstance(own, Collection) and len(own) == 0)


def read_criteria(given: Any, where: str) -> list[Criterion]:
    """Criteria of a list of texts or of tables `{criterion, weight}`. RewardError names the first
    that is neither, has another key, or a weight that is no positive number."""
    remedy = 'for example ["It is true."], or [{criterion = "It is true.", weight = 2.0}]'
    is_list = isinstance(given, Collection) and not isinstance(given, str | Mapping)
    if not is_list or len(given) == 0:
        raise RewardError(f"{given!r} is no list of criteria", where=where, remedy=remedy)
    found = []
    for number, entry in enumerate(given, 1):
        criterion = _criterion_of(entry, number, where)
        if criterion is None:
            raise RewardError(f"{entry!r} is no criterion", where=where, remedy=remedy)
        found.append(criterion)
    return found


def _criterion_of(entry: Any, number: int, where: str) -> Criterion | None:
    """Return a criterion of a list, None where the entry is none. RewardError names an unknown
    key."""
    fields = entry
    if isinstance(entry, str):
        fields = {"criterion": entry}
    if not isinstance(fields, Mapping):
        return None
    for key, value in fields.items():
        if key not in Criterion._fields and value is not None:  # Parquet has nulls of other rows
            raise RewardError(
                f"criterion {number} has an unknown {key!r}",
                where=where,
                remedy=did_you_mean(key, Criterion._fields),
            )
    text = fields.get("criterion")
    weight = fields.get("weight")
    if weight is None:
        weight = 1.0
    if not isinstance(text, str) or not text.strip() or not _is_positive(weight):
        return None
    return Criterion(text, weight)


def _is_positive(weight: Any) -> bool:
    is_number = isinstance(weight, int | float) and not isinstance(weight, bool)
    return is_number and math.isfinite(weight) and weight > 0


def _weighted_mean(scores: Sequence[float], rubric: Sequence[Criterion]) -> float:
    total = 0.0
    for score, criterion in zip(scores, rubric, strict=True):
        total += score * criterion.weight
    return total / sum(criterion.weight for criterion in rubric)


def without_thought(prompt: str, completion: str, think_tag: str) -> tuple[str, str]:
    """Prompt and answer as if nothing had been thought: the prompt without a block that it opens,
    of the completion what stands behind the last block, "" where none is closed."""
    before, opened, rest = prompt.rpartition(f"<{think_tag}>")
    if opened and not rest.strip():
        prompt = before
    _, closed, behind = completion.rpartition(f"</{think_tag}>")
    if not closed:
        return prompt, ""
    return prompt, behind.lstrip()


@needs(check=check_reward_model)
async def reward_model(
    completion: str,
    answer: str,
    *,
    prompt: str,
    url: str,
    model: str,
    api_key: str | None = None,
    scale: float = 1.0,
    shift: float = 0.0,
    think_tag: str | None = None,
    end: str = "",
    label: int | None = None,
    add_special_tokens: bool = False,
    timeout_s: float | None = None,
    attempts: int = 2,
) -> float:
    """`(score - shift) * scale` of a reward model's scalar, by a vLLM server's `/pooling` route.
    label: the number of the scalar, of a model that has several (its config.json names them).
    think_tag: it reads only what stands behind the thought (DeepSeek-R1, arXiv:2501.12948).
    end: what ended the answers that it was trained on, such as `<|im_end|>`; it is read there.
    add_special_tokens: whether the server adds those of the reward model's tokenizer: a prompt of
    a chat template has them, but an encoder wants its `[CLS]` and `[SEP]`.
    attempts: requests to a server that is busy."""
    if think_tag is not None:
        prompt, completion = without_thought(prompt, completion, think_tag)
    text = prompt + completion + end
    body = {"model": model, "input": text, "add_special_tokens": add_special_tokens}
    requests = Attempts(attempts, timeout_s)
    reply = await post(address_of(url, "/pooling"), body, api_key, attempts=requests)
    remedy = "let url be that of a reward model's server, such as vLLM's --runner pooling"
    scores = part_of(reply, "data", 0, "data", url=url, remedy=remedy)
    if not isinstance(scores, list):
        scores = [scores]
    return (_chosen(scores, label, url) - shift) * scale


def _chosen(scores: list[Any], label: int | None, url: str) -> float:
    """Return one of a reward model's scalars."""
    while len(scores) == 1 and isinstance(scores[0], list):
        scores = scores[0]
    if not scores:
        raise RewardError(
            "the server gives no scalar",
            where=url,
            remedy="serve a reward model, which has one at least (num_labels of its config.json)",
        )
    if any(isinstance(score, list) for score in scores):
        raise RewardError(
            "the server gives scores of every token",
            where=url,
            remedy="serve the reward model without a pooler of tokens",
        )
    if label is None and len(scores) == 1:
        return finite_score(scores[0], url)
    if label is None or not 0 <= label < len(scores):
        raise RewardError(
            f"the reward model gives {len(scores)} scalars, and `label` is {label}",
            where=url,
            remedy=f"set `label` to one of 0 to {len(scores) - 1}; id2label of its config.json "
            "names them",
        )
    return finite_score(scores[label], url)
