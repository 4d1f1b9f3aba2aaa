"""One root error; every failure class has its own exit code, so that scripts can tell them apart.
A message says what is wrong, where it was set, the nearest valid value and the remedy."""

import errno
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn


class GrpoMegatronError(Exception):
    """Root of all errors that a user can act on. `where` is a file, line, flag or process."""

    exit_code = 1

    def __init_subclass__(cls, exit_code: int | None = None):
        cls.exit_code = exit_code or cls.exit_code

    def __init__(self, message: str, *, where: str | None = None, remedy: str | None = None):
        super().__init__(message)
        self.message = message
        self.where = where
        self.remedy = remedy

    def __str__(self) -> str:
        text = self.message
        if self.where:
            text += "\n" + row_of("  where:  ", self.where)
        if self.remedy:
            text += "\n" + row_of("  remedy: ", self.remedy)
        return text


def row_of(label: str, text: str) -> str:
    """Return `text` behind `label`, with its further lines under the first."""
    return label + text.replace("\n", "\n" + " " * len(label))


@contextmanager
def raised_as(
    kind: type[GrpoMegatronError],
    what: str,
    causes: type[BaseException] | tuple[type[BaseException], ...] = Exception,
    *,
    where: object = None,
    remedy: str | None = None,
) -> Iterator[None]:
    """What the block raises of `causes` becomes a `kind`: "what: cause"."""
    try:
        yield
    except causes as error:
        place = None
        if where:
            place = str(where)
        raise kind(f"{what}: {_message_of(error)}", where=place, remedy=remedy) from error


@contextmanager
def placed_at(place: str) -> Iterator[None]:
    """Put a place, for example a file and a line, before that of an error that the block raises;
    empty: it stays as it is."""
    try:
        yield
    except GrpoMegatronError as error:
        if place:
            error.where = ", ".join(filter(None, (place, error.where)))
        raise


def as_own_error(error: BaseException, other: type[GrpoMegatronError]) -> GrpoMegatronError:
    """Return the error itself, if it is ours; a SetupError for a full disk, wherever it was met;
    for anything else an `other`."""
    if isinstance(error, GrpoMegatronError):
        return error
    if isinstance(error, OSError) and error.errno in _FULL:
        return SetupError(
            f"cannot write: {error.strerror}",
            where=error.filename,
            remedy="make room and resume: what was recorded is whole",
        )
    return other(f"{type(error).__name__}: {error}")


def describe_error(error: BaseException, other: type[GrpoMegatronError]) -> dict[str, Any]:
    """Put an error into JSON values, for another process; see `as_own_error`."""
    error = as_own_error(error, other)
    return {
        "type": type(error).__name__,
        "message": error.message,
        "where": error.where,
        "remedy": error.remedy,
    }


def raise_described(described: Mapping[str, Any], other: type[GrpoMegatronError]) -> NoReturn:
    """Raise what `describe_error` described, of its class, or of `other` where it is not known."""
    cls = globals().get(described["type"])
    if not (isinstance(cls, type) and issubclass(cls, GrpoMegatronError)):
        cls = other
    raise cls(described["message"], where=described["where"], remedy=described["remedy"])


def _message_of(error: BaseException) -> str:
    """Return what an error says, without its place and remedy."""
    if isinstance(error, GrpoMegatronError):
        return error.message
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error) or repr(error)


class ConfigError(GrpoMegatronError, ValueError, exit_code=2):
    """A recipe, an override or a combination of them is invalid. Nothing was started."""


class SetupError(GrpoMegatronError, exit_code=3):
    """The machine lacks something: a package, a library, disk, a free port."""


class DataError(GrpoMegatronError, ValueError, exit_code=4):
    """A data set, tokenizer, template or stored sample is unreadable or inconsistent."""


class EngineError(GrpoMegatronError, exit_code=5):
    """A rollout engine died, hung or answered nonsense, and no other could take over."""


class TransferError(EngineError):
    """An engine died, hung or gave up while weights were on their way to it."""


class TrainerError(GrpoMegatronError, exit_code=6):
    """A trainer rank died or refused a command."""


class MismatchError(GrpoMegatronError, exit_code=7):
    """Two sides that must agree do not: weights, log-probs, routes or digests."""


class CheckpointError(GrpoMegatronError, exit_code=8):
    """A checkpoint is missing, incomplete, corrupt or of another model."""


class RunLockedError(GrpoMegatronError, exit_code=9):
    """Another process is writing this run directory."""


class RewardError(GrpoMegatronError, exit_code=10):
    """A reward function cannot be imported, or raised on every sample."""


class EpisodeError(GrpoMegatronError, exit_code=12):
    """An environment cannot be imported or made, or spoils every episode."""


class GateError(GrpoMegatronError, exit_code=11):
    """A run has finished and missed a gate of its recipe."""


CRASHED_EXIT_CODE = 1
"""Of a process that ended by an error without a name here: of a library, of the machine."""
_FULL = (errno.ENOSPC, errno.EDQUOT)
INTERRUPTED_EXIT_CODE = 130  # after Ctrl-C, as shells report it
