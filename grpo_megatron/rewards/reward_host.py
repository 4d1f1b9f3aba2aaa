"""Reward processes on a node: `python -m grpo_megatron.rewards.reward_host RUN_DIR ATTEMPT INDEX`.

The controller connects once for each process that it wants. The host starts one, passes bytes on
both ways, and kills it with the connection. So processes of many nodes are one pool."""

import asyncio
import contextlib
import secrets
import sys
from pathlib import Path

from grpo_megatron import progress
from grpo_megatron.network import Endpoint, own_address
from grpo_megatron.rewards.places import WELCOME, LocalPlace
from grpo_megatron.rundir import RunDir

_BLOCK = 1 << 16
_HELLO_S = 10.0


class RewardHost:
    """Starts a reward process for each connection that begins with `token`."""

    def __init__(self, token: str, log_path: Path):
        self._token = token
        self._log_path = log_path

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, until either end closes it."""
        try:
            async with asyncio.timeout(_HELLO_S):
                hello = await reader.readline()
            if secrets.compare_digest(hello.strip(), self._token.encode()):
                writer.write(WELCOME)
                await self._pass_on(reader, writer)
        except (OSError, TimeoutError):
            pass  # the controller has gone
        finally:
            writer.close()

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # not before there is something to do: a controller may only look whether the host is there
        first = await reader.read(_BLOCK)
        if not first:
            return
        place = LocalPlace(self._log_path)
        opened = await place.open()
        opened.writer.write(first)
        directions = [
            asyncio.ensure_future(_copy(reader, opened.writer)),
            asyncio.ensure_future(_copy(opened.reader, writer)),
        ]
        try:
            await asyncio.wait(directions, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await place.kill()
            for direction in directions:
                direction.cancel()
            await asyncio.gather(*directions, return_exceptions=True)


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """All bytes until the end."""
    with contextlib.suppress(OSError):
        while block := await reader.read(_BLOCK):
            writer.write(block)
            await writer.drain()


async def serve(address: str, endpoint: Path, log_path: Path) -> None:
    """Listen at a free port of `address`, publish it, and serve until cancelled."""
    token = secrets.token_hex(16)
    host = RewardHost(token, log_path)
    server = await asyncio.start_server(host.serve, address, 0)
    Endpoint(address, server.sockets[0].getsockname()[1], token).write(endpoint)
    progress.enter("waiting", is_waiting=True)
    async with server:
        await server.serve_forever()


def main(run_path: str, attempt: str, index: int) -> None:
    """Serve as host `index` until the supervisor ends this process."""
    run_dir = RunDir(Path(run_path), attempt)
    endpoint = run_dir.endpoints / f"reward-host-{index}.json"
    name = f"reward-host-{index}"
    progress.start_progress(run_dir.role_progress(name), name)
    asyncio.run(serve(own_address(), endpoint, run_dir.logs / f"rewards-{index}.log"))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
