"""How the controller reaches the trainer: JSON lines over one TCP connection.

    -> {"token": "…", "role": "trainer"}
    <- {"request": "LoadCheckpoint", "directory": "…"}
    -> {"result": …}   or   {"error": {"type": "TrainerError", "message": "…"}}

The controller listens, rank 0 connects, every one of `requests` is answered once, in order. No
torch here."""

import json
from typing import Any

from grpo_megatron.errors import TrainerError, describe_error, raise_described


def encode(message: dict[str, Any]) -> bytes:
    """Write one message as the line that goes over the wire."""
    return json.dumps(message).encode() + b"\n"


def error_reply(error: BaseException) -> dict[str, Any]:
    """Write an error as a reply. Our own keep their class, and so the exit code; others become a
    TrainerError."""
    return {"error": describe_error(error, TrainerError)}


def raise_reply(reply: dict[str, Any]) -> Any:
    """Return the result of a reply; raise its error, of its class, where it has one."""
    if "error" not in reply:
        return reply["result"]
    raise_described(reply["error"], TrainerError)
