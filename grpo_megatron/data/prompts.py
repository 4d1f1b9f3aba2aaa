"""From a recipe to the prompts of a run: sources, templates, tokens, splits by a hash of the text.

The hash depends on nothing but the text, so neither the seed nor the order of the source moves a
prompt between splits, and equal prompts cannot be on both sides."""

import hashlib
import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import compress

from grpo_megatron.config.run import DomainConfig, RunConfig
from grpo_megatron.data.conversation import RESPONSES
from grpo_megatron.data.dataset_answers import refuse_bad_responses, with_answers
from grpo_megatron.data.prompt_images import (
    MARK,
    ImageReader,
    SeenProblem,
    lack_of_images,
    refuse_images,
)
from grpo_megatron.data.prompt_text import PromptRenderer
from grpo_megatron.data.sources import load_problems
from grpo_megatron.data.tokenizer import TextTokenizer
from grpo_megatron.errors import DataError
from grpo_megatron.types import Problem, Prompt, PromptImage, content_of

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Splits:
    """Disjoint by prompt text; every split is in hash order within a domain."""

    train: Mapping[str, tuple[Prompt, ...]]  # by domain
    validation: tuple[Prompt, ...]
    heldout: tuple[Prompt, ...]
    num_duplicates: int  # prompts dropped because an earlier one has the same text
    num_refused: Mapping[str, int] = field(default_factory=dict)
    """By domain, of a model that sees: rows that were left out because of an image."""


def load_splits(
    config: RunConfig, tokenizer: TextTokenizer, images: ImageReader | None = None
) -> Splits:
    """Return every prompt of the recipe, rendered, tokenised, deduplicated and split.

    images: of a model that sees.

    Prompts that leave no room for their domain's `max_new_tokens` are dropped with a warning; where
    the answers of rows are trained, others say which are longer than that, and which are empty and
    left out, and equal prompts of a domain are one with all of their answers. The log says which
    prompts are dropped because an earlier one is equal. Raises DataError for a row that cannot be
    read, or whose responses cannot be trained."""
    longest = config.rollout.max_model_len
    prompts = []
    for domain in config.domains:
        limit = longest - config.max_new_tokens_of(domain.name)
        prompts += _fitting(config, domain, tokenizer, limit, images)
    splits = make_splits(
        prompts, num_heldout=config.data.num_heldout, num_validation=config.data.num_validation
    )
    _tell_duplicates(prompts)
    if images is None:
        return splits
    return replace(splits, num_refused=dict(images.num_refused))


def _tell_duplicates(prompts: Sequence[Prompt]) -> None:
    """Log how many prompts of which domains are dropped because an earlier one is equal; as a
    warning, where that has another answer."""
    first: dict[str, Prompt] = {}
    num_dropped: Counter[tuple[str, str]] = Counter()
    num_other: Counter[tuple[str, str]] = Counter()
    for prompt in prompts:
        earlier = first.setdefault(prompt.content, prompt)
        if earlier is prompt:
            continue
        domains = (prompt.domain, earlier.domain)
        num_dropped[domains] += 1
        if _answers_of(prompt) != _answers_of(earlier):
            num_other[domains] += 1
    for domains, count in num_dropped.items():
        level = logging.INFO
        told = f"domain {domains[0]!r}: dropped {count} prompts that are before in {domains[1]!r}"
        if num_other[domains]:
            level = logging.WARNING
            told += f"; {num_other[domains]} of them have another answer than the one that is kept"
        logger.log(level, "%s", told)


def _answers_of(prompt: Prompt) -> tuple[str, object]:
    return prompt.answer, prompt.metadata.get(RESPONSES)


def load_prompts(
    domain: DomainConfig,
    seed: int,
    tokenizer: TextTokenizer,
    images: ImageReader | None = None,
) -> list[Prompt]:
    """Return the prompts of one domain in the source's order. Ids are stable: domain + text
    hash."""
    return tokenised(domain, load_problems(domain, seed), tokenizer, images)


def tokenised(
    domain: DomainConfig,
    problems: Iterable[Problem],
    tokenizer: TextTokenizer,
    images: ImageReader | None = None,
) -> list[Prompt]:
    """Return prompts of `problems` in their order, by the domain's template.

    images: of a model that sees; problems whose images it cannot see are left out."""
    problems = list(problems)
    if images is not None:
        return with_tokens(domain, list(images.fit(domain, problems)), tokenizer, images)
    refuse_images(domain, problems)
    return with_tokens(domain, [(problem, ()) for problem in problems], tokenizer, None)


def with_tokens(
    domain: DomainConfig,
    seen: Sequence[SeenProblem],
    tokenizer: TextTokenizer,
    images: ImageReader | None,
) -> list[Prompt]:
    """Return the prompts of problems whose images `images` has read; None: the model sees none."""
    problems = [problem for problem, _ in seen]
    images_of = [of_problem for _, of_problem in seen]
    renderer = PromptRenderer(domain, tokenizer.chat_template)
    rendered = []
    texts = []
    where = f"[[domains]] {domain.name}"
    for problem, of_row in zip(problems, images_of, strict=True):
        rendered.append(renderer.render(problem))
        texts.append(rendered[-1].text)
        if of_row and MARK in texts[-1]:
            raise DataError(
                f"the template or the system prompt adds {MARK}, which would stay as text",
                where=problem.where or where,
                remedy=f"write {MARK} into the questions of rows, which a template has as "
                "{question}, and nowhere else",
            )
    token_ids = _encoded(tokenizer, problems, texts, where)
    prompts = []
    for problem, of_problem, ids, of_row in zip(
        problems, rendered, token_ids, images_of, strict=True
    ):
        text, answer, metadata = of_problem
        all_ids = tuple(ids)
        places: tuple[PromptImage, ...] = ()
        if images is not None:
            all_ids, places = images.expanded(ids, of_row, problem.where or where)
        prompt = Prompt(
            prompt_id=f"{domain.name}-{text_hash(content_of(text, places))[:16]}",
            domain=domain.name,
            text=text,
            token_ids=all_ids,
            answer=answer,
            metadata=metadata,
            question=problem.question,
            images=places,
        )
        prompts.append(prompt)
    return prompts


def _encoded(
    tokenizer: TextTokenizer, problems: Sequence[Problem], texts: Sequence[str], where: str
) -> list[list[int]]:
    """Return the token ids of the prompts of problems. DataError names the row, if there is one."""
    try:
        return tokenizer.encode_batch(texts, where=where)
    except DataError:
        for problem, text in zip(problems, texts, strict=True):
            tokenizer.encode(text, where=problem.where or where)
        raise


def _fitting(
    config: RunConfig,
    domain: DomainConfig,
    tokenizer: TextTokenizer,
    limit: int,
    images: ImageReader | None,
) -> list[Prompt]:
    problems = load_problems(domain, config.seed)
    refuse_bad_responses(config, domain, problems)
    if images is not None:
        warning = lack_of_images(domain, problems)
        if warning is not None:
            logger.warning("%s", warning)
    prompts = tokenised(domain, problems, tokenizer, images)
    fits = [0 < len(prompt.token_ids) <= limit for prompt in prompts]
    fitting = list(compress(prompts, fits))
    if len(fitting) < len(prompts):
        longest = max(len(prompt.token_ids) for prompt in prompts)
        message = (
            f"domain {domain.name!r}: {len(prompts) - len(fitting)} of {len(prompts)} "
            f"prompts are empty or longer than {limit} tokens "
            f"(max_model_len - max_new_tokens); the longest has {longest}"
        )
        if not fitting:
            raise DataError(
                message,
                where="[rollout] max_model_len, max_new_tokens",
                remedy=f"set max_model_len to at least {longest} + max_new_tokens",
            )
        logger.warning("%s; they are dropped", message)
    if not config.uses_dataset or not domain.weight:
        return fitting
    # a model that sees is trained by RL alone: no problem is left out because of an image here
    rows = compress(zip(problems, prompts, strict=True), fits)
    return with_answers(config, domain, tokenizer, list(rows))


def text_hash(text: str) -> str:
    """Return the sort key of splits and the stem of prompt ids: sha256, hex."""
    return hashlib.sha256(text.encode("utf-8", errors="surrogatepass")).hexdigest()


def make_splits(prompts: Sequence[Prompt], *, num_heldout: int, num_validation: int) -> Splits:
    """Drop duplicates (first wins), then take exactly `num_heldout` and `num_validation` prompts by
    hash, in proportion to the domains' numbers of distinct prompts.

    Raises DataError where there are no prompts, or a domain has none left for training."""
    if not prompts:
        raise DataError("no prompts", remedy="check [[domains]]")
    distinct: dict[str, Prompt] = {}
    train: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        distinct.setdefault(prompt.content, prompt)
        train.setdefault(prompt.domain, [])
    for prompt in sorted(distinct.values(), key=lambda prompt: text_hash(prompt.content)):
        train[prompt.domain].append(prompt)
    sizes = {name: len(members) for name, members in train.items()}
    num_duplicates = len(prompts) - len(distinct)
    num_heldout_of = share(num_heldout, sizes)
    num_validation_of = share(num_validation, sizes)
    heldout = []
    validation = []
    kept = {}
    for name, members in train.items():
        first = num_heldout_of[name]
        second = num_validation_of[name]
        heldout += members[:first]
        validation += members[first : first + second]
        kept[name] = tuple(members[first + second :])
        if not kept[name]:
            _refuse_prompts_of_others(name, prompts, distinct, sizes[name])
            others = list(sizes)
            others.remove(name)
            scope = ""
            if others:
                scope = f" (its share beside {', '.join(others)})"
            raise DataError(
                f"domain {name!r} has {sizes[name]} distinct prompts, but {first} held-out and "
                f"{second} validation prompts{scope} leave none for training; {num_duplicates} "
                "duplicates were dropped",
                where="[data] num_heldout, num_validation",
                remedy="raise num_problems of the domain, or lower num_heldout or num_validation",
            )
    return Splits(kept, tuple(validation), tuple(heldout), num_duplicates)


def _refuse_prompts_of_others(
    name: str, prompts: Sequence[Prompt], distinct: Mapping[str, Prompt], num_left: int
) -> None:
    """DataError where a domain has too few prompts because earlier domains have the same ones.

    distinct: by content, the first prompt that has it. num_left: prompts of the domain in it."""
    found = {prompt.content for prompt in prompts if prompt.domain == name}
    owners = Counter(distinct[content].domain for content in found)
    del owners[name]
    if not owners:
        return
    first, _ = owners.most_common(1)[0]
    raise DataError(
        f"{owners.total()} of the {len(found)} distinct prompts of domain {name!r} are those of "
        f"{', '.join(map(repr, owners))}, which comes first and keeps them; {num_left} are left, "
        "and none for training",
        where=f"[[domains]] {name}",
        remedy=f"give it another template or other rows than {first!r}, or make one domain of both",
    )


def share(total: int, sizes: Mapping[str, int]) -> dict[str, int]:
    """Return parts of `total` in proportion to `sizes`: largest remainder, each at least one if it
    can."""
    floor = int(total >= len(sizes))
    rest = total - floor * len(sizes)
    size = max(1, sum(sizes.values()))
    parts = {}
    remainders = {}
    for name, count in sizes.items():
        parts[name] = floor + rest * count // size
        remainders[name] = rest * count % size
    by_remainder = sorted(sizes, key=lambda name: (-remainders[name], name))
    for name in by_remainder[: total - sum(parts.values())]:
        parts[name] += 1
    return parts
