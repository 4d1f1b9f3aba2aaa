"""A recipe holds no secret: `config.json`, reports and mirrors show all of it."""

from collections.abc import Iterator
from typing import Any

from grpo_megatron.config.keys import KeyPath, dotted, leaves
from grpo_megatron.config.rules.rule_set import RuleSet, Violation
from grpo_megatron.config.run import RunConfig
from grpo_megatron.config.secret_values import holds_secret, is_reference, is_secret_name

SECRET_RULES = RuleSet()
"""Their checks take the run."""


@SECRET_RULES.rule("secrets")
def secrets_are_in_the_environment(run: RunConfig) -> list[Violation]:
    """Refuse values that are secrets, by their names or by how they look."""
    found = []
    for path, value in leaves(run.model_dump(mode="json")):
        if _is_secret(path, value):
            found.append(
                Violation(
                    dotted(path),
                    "a secret in a recipe is shown to whoever reads config.json or lists processes",
                    remedy=_remedy(path),
                    hides_value=True,
                )
            )
    return found


def _is_secret(path: KeyPath, value: Any) -> bool:
    if is_reference(value):
        return False
    if isinstance(value, str) and value and is_secret_name(str(path[-1])):
        return True
    return any(holds_secret(text) for text in _texts(value))


def _texts(value: Any) -> Iterator[Any]:
    if isinstance(value, list):
        for item in value:
            yield from _texts(item)
    else:
        yield value


def _remedy(path: KeyPath) -> str:
    if is_secret_name(str(path[-1])):
        return 'export it as a variable of the environment, and name that here: "$NAME"'
    return "leave it out: what the run starts has the variables of its environment"
