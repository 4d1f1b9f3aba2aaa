"""From a recipe to the prompts of a run: sources, templates, tokens, splits."""

import logging
from collections.abc import Iterator

from grpo_megatron.config.data import DomainConfig
from grpo_megatron.config.run import RunConfig
from grpo_megatron.config.templates import PromptTemplate
from grpo_megatron.data.file_source import load_file
from grpo_megatron.data.reasoning_gym_source import load_reasoning_gym
from grpo_megatron.data.splits import Splits, make_splits, text_hash
from grpo_megatron.data.tokenizer import TextTokenizer
from grpo_megatron.errors import DataError
from grpo_megatron.types import Problem, Prompt

logger = logging.getLogger(__name__)


def load_splits(config: RunConfig, tokenizer: TextTokenizer) -> Splits:
    """Every prompt of the recipe, rendered, tokenised, deduplicated and split.

    A prompt that leaves no room for its domain's `max_new_tokens` within `rollout.max_model_len` is
    dropped with a warning, before the split."""
    longest = config.rollout.max_model_len
    prompts = (prompt for domain in config.domains for prompt in _fitting(
        domain, config.seed, tokenizer, longest - config.max_new_tokens_of(domain.name)))
    splits = make_splits(prompts, num_heldout=config.data.num_heldout,
                         num_validation=config.data.num_validation)
    if splits.num_duplicates:
        logger.info("dropped %d prompts whose text occurs before", splits.num_duplicates)
    return splits


def load_problems(domain: DomainConfig, seed: int) -> list[Problem]:
    """The problems of one domain in the source's order; `seed` is for procedural sources."""
    return load_file(domain) if domain.source == "file" else load_reasoning_gym(domain, seed)


def load_prompts(domain: DomainConfig, seed: int, tokenizer: TextTokenizer) -> list[Prompt]:
    """The prompts of one domain in the source's order. Ids are stable: domain + text hash."""
    where = f"[[domains]] {domain.name}"
    template = PromptTemplate(domain.template, where=where)
    problems = load_problems(domain, seed)
    texts = [template.render(problem.question, problem.metadata) for problem in problems]
    token_ids = tokenizer.encode_batch(texts, where=where)
    return [Prompt(f"{domain.name}-{text_hash(text)[:16]}", domain.name, text, tuple(ids),
                   problem.answer, problem.metadata)
            for problem, text, ids in zip(problems, texts, token_ids, strict=True)]


def _fitting(domain: DomainConfig, seed: int, tokenizer: TextTokenizer,
             limit: int) -> Iterator[Prompt]:
    prompts = load_prompts(domain, seed, tokenizer)
    fitting = [prompt for prompt in prompts if 0 < len(prompt.token_ids) <= limit]
    if len(fitting) < len(prompts):
        longest = max(len(prompt.token_ids) for prompt in prompts)
        message = (f"domain {domain.name!r}: {len(prompts) - len(fitting)} of {len(prompts)} "
                   f"prompts are empty or longer than {limit} tokens "
                   f"(max_model_len - max_new_tokens); the longest has {longest}")
        if not fitting:
            raise DataError(message, where="[rollout] max_model_len, max_new_tokens",
                            remedy=f"set max_model_len to at least {longest} + max_new_tokens")
        logger.warning("%s; they are dropped", message)
    yield from fitting
