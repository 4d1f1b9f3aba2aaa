"""Procedural problems from reasoning-gym (https://github.com/open-thought/reasoning-gym)."""

import dataclasses
from typing import Any

from grpo_megatron.config.data import DomainConfig
from grpo_megatron.config.suggest import did_you_mean
from grpo_megatron.errors import DataError
from grpo_megatron.types import Problem


def load_reasoning_gym(domain: DomainConfig, seed: int) -> list[Problem]:
    """Draw `domain.num_problems` problems, or as many as the data set does by itself.
    `arguments.seed` wins over `seed`, so that a recipe can pin its problems."""
    where = f"[[domains]] {domain.name}"
    dataset = _create(domain, seed, where)
    problems = []
    for index in range(len(dataset)):
        item = dataset[index]
        if domain.prompt_field not in item:
            raise DataError(f"reasoning-gym items have no field {domain.prompt_field!r}",
                            where=where, remedy=f"fields: {', '.join(item)}")
        question = str(item[domain.prompt_field])
        # Data sets with many right answers have none of their own; their scorer decides.
        answer = item.get(domain.answer_field)
        metadata = {**item.get("metadata", {}), "question": item["question"]}  # for the scorers
        problems.append(Problem(question, "" if answer is None else str(answer), metadata))
    return problems


def _create(domain: DomainConfig, seed: int, where: str) -> Any:
    from reasoning_gym.factory import DATASETS, create_dataset

    if domain.dataset not in DATASETS:
        raise DataError(f"reasoning-gym has no data set {domain.dataset!r}", where=where,
                        remedy=did_you_mean(domain.dataset, sorted(DATASETS)))
    fields = [f.name for f in dataclasses.fields(DATASETS[domain.dataset][1])]
    for key in domain.arguments:
        if key not in fields or key == "size":
            raise DataError(
                f"reasoning-gym data set {domain.dataset!r} has no argument {key!r}", where=where,
                remedy="use num_problems" if key == "size" else did_you_mean(key, sorted(fields)))
    arguments = {"seed": seed, **domain.arguments}
    if domain.num_problems is not None:
        arguments["size"] = domain.num_problems
    try:
        return create_dataset(domain.dataset, **arguments)
    except (AssertionError, TypeError, ValueError) as error:
        raise DataError(f"reasoning-gym data set {domain.dataset!r} refuses its arguments: "
                        f"{error or type(error).__name__}", where=where,
                        remedy=f"arguments given: {dict(domain.arguments)}") from error
