"""How the controller reaches the trainer: JSON lines over one TCP connection.

    -> {"token": "…", "role": "trainer"}
    <- {"request": "LoadCheckpoint", "directory": "…"}
    -> {"result": …}   or   {"error": {"type": "TrainerError", "message": "…"}}

The controller listens, rank 0 connects, every one of `requests` is answered once, in order. No
torch here."""

import json
from typing import Any

from grpo_megatron import errors


def encode(message: dict[str, Any]) -> bytes:
    """Write one message as the line that goes over the wire."""
    return json.dumps(message).encode() + b"\n"


def error_reply(error: BaseException) -> dict[str, Any]:
    """Write an error as a reply. Our own keep their class, and so the exit code; others become a
    TrainerError."""
    if not isinstance(error, errors.GrpoMegatronError):
        error = errors.TrainerError(f"{type(error).__name__}: {error}")
    return {
        "error": {
            "type": type(error).__name__,
            "message": error.message,
            "where": error.where,
            "remedy": error.remedy,
        }
    }


def raise_reply(reply: dict[str, Any]) -> Any:
    """Return the result of a reply; raise its error, of its class, where it has one."""
    if "error" not in reply:
        return reply["result"]
    error = reply["error"]
    cls = getattr(errors, error["type"], errors.TrainerError)
    raise cls(error["message"], where=error["where"], remedy=error["remedy"])
