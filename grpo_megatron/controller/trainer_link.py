"""The controller's end of the connection to the trainer, and its part of a checkpoint."""

import asyncio
import contextlib
import json
import secrets
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from grpo_megatron import progress
from grpo_megatron.errors import TrainerError
from grpo_megatron.network import Endpoint, own_address
from grpo_megatron.trainer.protocol import encode, raise_reply
from grpo_megatron.trainer.requests import Answer, Request, Stop, read_answer, to_json_values

_HELLO_S = 10.0


@dataclass(frozen=True, slots=True)
class RunState:
    """Saved with every checkpoint, in `complete.json`."""

    step: int  # RL steps done
    updates: int  # optimizer steps done in RL, which fixes the learning rate
    sampler: dict[str, Any]  # from which the next step draws its prompts
    heldout_before: float  # held-out accuracy before RL
    seconds: float  # wall time of the run so far, over all attempts
    objective: dict[str, Any] = field(default_factory=dict)  # see `Objective.state`
    bound: int = 0  # steps that rollouts may run ahead; 0: as the recipe says
    heldout_before_unscorable: int = 0  # prompts that `heldout_before` leaves out


class TrainerLink:
    """Requests go out one at a time, in the order of the calls."""

    def __init__(self, timeout_s: float):
        self._timeout_s = timeout_s
        self._token = secrets.token_hex(16)
        self._connected: asyncio.Future = asyncio.get_running_loop().create_future()
        self._lock = asyncio.Lock()
        self._unanswered = 0

    async def listen(self, path: Path) -> None:
        """Listen for rank 0, and publish the address as the file `path`."""
        host = own_address()
        self._server = await asyncio.start_server(self._accept, host, 0, limit=1 << 28)
        Endpoint(host, self._server.sockets[0].getsockname()[1], self._token).write(path)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if await self._is_trainer(reader) and not self._connected.done():
            self._connected.set_result((reader, writer))
        else:
            writer.close()

    async def _is_trainer(self, reader: asyncio.StreamReader) -> bool:
        """Whether who connected says the token, within ten seconds."""
        try:
            async with asyncio.timeout(_HELLO_S):
                hello = json.loads(await reader.readline())
            given = str(hello["token"])
        except (OSError, TimeoutError, ValueError, LookupError, TypeError):
            return False
        return secrets.compare_digest(given.encode(errors="replace"), self._token.encode())

    async def call(self, request: Request[Answer]) -> Answer:
        """Have all ranks execute `request`. Raises what rank 0 reports; TrainerError when it has
        gone."""
        async with self._lock:
            reader, writer = await self._connected
            try:
                writer.write(encode(to_json_values(request)))
                self._unanswered += 1
                await writer.drain()
                while self._unanswered:  # also by a call that was cancelled
                    line = await asyncio.wait_for(reader.readline(), self._timeout_s)
                    if not line:
                        raise ConnectionError("end of the connection")
                    self._unanswered -= 1
            except TimeoutError as error:
                raise TrainerError(
                    f"no answer to {request.name!r} within {self._timeout_s:.0f} s",
                    where="trainer.command_timeout_s",
                ) from error
            except ConnectionError as error:
                raise TrainerError(f"the trainer went away during {request.name!r}") from error
        progress.advance()
        values = raise_reply(json.loads(line))
        try:
            return read_answer(request, values)
        except msgspec.ValidationError as error:
            raise TrainerError(f"no answer to {request.name!r}: {error}") from error

    async def close(self) -> None:
        """Tell the ranks to end, where they are connected, and stop listening."""
        if self._connected.done():
            with contextlib.suppress(TrainerError, TimeoutError):
                await asyncio.wait_for(self.call(Stop()), 10)
        self._server.close()
