"""How a rule between keys is written, registered and checked."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from grpo_megatron.config.keys import value_at


@dataclass(frozen=True, slots=True)
class Violation:
    """A rule between keys that does not hold. Knows nothing of files and flags.

    A rule gives `key` and `message`, and at least one of `nearest` and `remedy`; the rule's name
    and the key's value are filled in by the `RuleSet`."""

    key: str
    """The dotted key to change."""
    message: str
    """The rule in words, with every number that takes part."""
    nearest: Sequence[Any] = ()
    """Valid values of the key close to its value."""
    remedy: str = ""
    """What to do; empty: use a nearest value."""
    related: Sequence[str] = ()
    """Other keys that take part."""
    rule: str = ""
    """The rule's short fixed name."""
    value: Any = None
    """What the key is now."""
    hides_value: bool = False
    """Whether the value may not be shown."""


Check = Callable[..., Violation | Sequence[Violation] | None]
"""Takes the subject of a `RuleSet`; returns what is broken: nothing, one, or one for each place."""


class RuleSet:
    """Rules that take the same arguments, in the order in which their violations are reported."""

    def __init__(self) -> None:
        self._checks: list[tuple[str, Check]] = []

    def rule(self, name: str) -> Callable[[Check], Check]:
        """Register the decorated check under a rule's name; several checks may share one."""

        def register(check: Check) -> Check:
            self._checks.append((name, check))
            return check

        return register

    @property
    def names(self) -> list[str]:
        """The rules' names, each once."""
        names = dict.fromkeys(name for name, _ in self._checks)
        return list(names)

    def violations(self, *subject: Any, config: Any) -> Iterator[Violation]:
        """Yield everything that `subject`, the checks' arguments, breaks; values are read in
        `config`."""
        for name, check in self._checks:
            for violation in _as_sequence(check(*subject)):
                value = value_at(config, violation.key)
                yield replace(violation, rule=name, value=value)

    def broken_names(self, *subject: Any) -> Iterator[str]:
        """Yield names of the rules that `subject` breaks, without their details."""
        for name, check in self._checks:
            if check(*subject):
                yield name


def _as_sequence(found: Violation | Sequence[Violation] | None) -> Sequence[Violation]:
    if found is None:
        return ()
    if isinstance(found, Violation):
        return (found,)
    return found
