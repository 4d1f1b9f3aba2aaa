"""A reward process: `python -m grpo_megatron.rewards.worker BOARD_FD PARENT_PID`.

It reads chunks of calls from its standard input and notes results on the board. It ends when the
input ends, and with its parent even while a reward hangs.
"""

from __future__ import annotations

import asyncio
import math
import operator
import os
import pickle
import signal
import struct
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, BinaryIO

from grpo_megatron.errors import RewardError
from grpo_megatron.rewards.board import FINISHED, RAISED, SCORED, Board
from grpo_megatron.rewards.coroutines import score_all
from grpo_megatron.rewards.registry import BoundReward, bind, to_float

HEADER = struct.Struct("<Q")
"""Every message is its length and a pickle."""

Call = tuple[int, str, str, Mapping[str, Any]]
"""Index of the function, completion, answer, the context that the function takes."""


def main() -> None:
    """Serve until the input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's business
    board_fd, parent = int(sys.argv[1]), int(sys.argv[2])
    _die_with(parent)
    requests, replies = _private_streams()
    board = Board(board_fd)
    os.close(board_fd)
    specifications, limits = receive(requests) or ((), {})
    rewards = _bind_all(specifications, replies)
    if rewards is None:
        return
    known_failures: set[int] = set()
    send(replies, ("ready",))
    with asyncio.Runner() as loop:  # one for all chunks, so that rewards may keep connections
        while (calls := receive(requests)) is not None:
            raised = partial(_raised, calls, board, replies, known_failures)
            waiting = _run(calls, rewards, board, raised, partial(send, replies))
            if waiting:
                loop.run(score_all(waiting, board, raised=raised, **limits))
            board.begin(FINISHED)
            send(replies, ("done",))


def send(stream: BinaryIO, message: Any) -> None:
    """Write one message."""
    stream.write(encode(message))
    stream.flush()


def encode(message: Any) -> bytes:
    """One message as bytes."""
    body = pickle.dumps(message, protocol=5)
    return HEADER.pack(len(body)) + body


def receive(stream: BinaryIO) -> Any:
    """Read one message; None at the end."""
    header = stream.read(HEADER.size)
    if len(header) < HEADER.size:
        return None
    return pickle.loads(stream.read(HEADER.unpack(header)[0]))


def _run(calls: Sequence[Call], rewards: Sequence[BoundReward], board: Board,
         raised: Callable[[int], None],
         tell: Callable[[tuple], None]) -> dict[int, Callable[[], Any]]:
    """Make the plain calls; returns the async ones by index. Step rewards are told apart."""
    waiting = {}
    for index, (function, *arguments) in enumerate(calls):
        call = partial(rewards[function], *arguments)
        if rewards[function].is_async:
            waiting[index] = call
            continue
        board.begin(index)
        try:
            value = call()
            if isinstance(value, list):
                steps = [(operator.index(end), to_float(reward)) for end, reward in value]
                tell(("steps", index, steps))
                value = sum(reward for _, reward in steps)
            board.record(index, SCORED, to_float(value))
        except BaseException:  # SystemExit of a reward must not end the worker either
            raised(index)
    return waiting


def _raised(calls: Sequence[Call], board: Board, replies: BinaryIO, known_failures: set[int],
            index: int) -> None:
    board.record(index, RAISED, math.nan)
    function = calls[index][0]
    if function not in known_failures:
        known_failures.add(function)
        send(replies, ("error", function, traceback.format_exc()))


def _bind_all(specifications: Any, replies: BinaryIO) -> list[BoundReward] | None:
    try:
        return [bind(reference, arguments) for reference, arguments in specifications]
    except RewardError as error:
        send(replies, ("failed", str(error)))
        return None


def _private_streams() -> tuple[BinaryIO, BinaryIO]:
    """Move the pipes away from descriptors 0 and 1, where a reward's own print would land."""
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    return requests, replies


def _die_with(parent: int) -> None:
    """Linux: be killed when the parent ends. A pipe's end cannot stop a reward that hangs."""
    if sys.platform == "linux":
        import ctypes

        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit(0)


if __name__ == "__main__":
    main()
