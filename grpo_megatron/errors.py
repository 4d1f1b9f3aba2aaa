"""One root error; every failure class has its own exit code, so that scripts can tell them apart.

A message says what is wrong, where it was set, the nearest valid value and the remedy.
"""

from functools import partial


class GrpoMegatronError(Exception):
    """Root of all errors that a user can act on.

    Args:
        message: What is wrong, with the offending value.
        where: File, line, flag or process that the message is about.
        remedy: What to do about it.
    """

    exit_code = 1

    def __init__(self, message: str, *, where: str | None = None, remedy: str | None = None):
        super().__init__(message)
        self.message, self.where, self.remedy = message, where, remedy

    def __reduce__(self):
        return partial(type(self), where=self.where, remedy=self.remedy), (self.message,)

    def __str__(self) -> str:
        parts = [self.message]
        if self.where:
            parts.append(f"  where:  {self.where}")
        if self.remedy:
            parts.append(f"  remedy: {self.remedy}")
        return "\n".join(parts)


class ConfigError(GrpoMegatronError, ValueError):
    """A recipe, an override or a combination of them is invalid. Nothing was started."""

    exit_code = 2


class SetupError(GrpoMegatronError):
    """The machine lacks something: a package, a library, disk, a free port."""

    exit_code = 3


class DataError(GrpoMegatronError, ValueError):
    """A data set, tokenizer, template or stored sample is unreadable or inconsistent."""

    exit_code = 4


class EngineError(GrpoMegatronError):
    """A rollout engine died, hung or answered nonsense, and no other could take over."""

    exit_code = 5


class TrainerError(GrpoMegatronError):
    """A trainer rank died or refused a command."""

    exit_code = 6


class MismatchError(GrpoMegatronError):
    """Two sides that must agree do not: weights, log-probs, routes or digests."""

    exit_code = 7


class CheckpointError(GrpoMegatronError):
    """A checkpoint is missing, incomplete, corrupt or of another model."""

    exit_code = 8


class RunLockedError(GrpoMegatronError):
    """Another process is writing this run directory."""

    exit_code = 9


class RewardError(GrpoMegatronError):
    """A reward function cannot be imported, or raised on every sample."""

    exit_code = 10


INTERRUPTED_EXIT_CODE = 130
"""Exit code after Ctrl-C, as shells report it."""
