"""vLLM servers of random teachers, for recipes that ask teachers at a `url`."""

import asyncio
import socket
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from grpo_megatron.config.run import RolloutConfig
from grpo_megatron.errors import EngineError
from grpo_megatron.launch.processes import ChildProcess, stop_all
from grpo_megatron.network import LOOPBACK, reserve_port
from grpo_megatron.rehearsal.scale_down import MAX_CACHE_GIB, MAX_MODEL_LEN, MAX_TOP_K
from grpo_megatron.rollout.client import EngineClient
from grpo_megatron.rollout.replica import scoring_command


@dataclass
class _Server:
    url: str
    process: ChildProcess
    reserved: socket.socket
    """Keeps the port: the server binds beside it, nobody else is given it."""


class TeacherServers:
    """One server on the loopback device for each model that teaches; they end with the context.

    Addresses are known before anything is started, because recipes are written with them."""

    def __init__(self, logs: Path) -> None:
        self._logs = logs
        self._servers: dict[tuple[Path, str], _Server] = {}

    def __enter__(self) -> "TeacherServers":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        stop_all([server.process for server in self._servers.values()])
        for server in self._servers.values():
            server.reserved.close()

    def __len__(self) -> int:
        return len(self._servers)

    def url_of(self, model: Path, dtype: str) -> str:
        """Say where the checkpoint `model` will be served, as `dtype`."""
        key = (model, dtype)
        if key not in self._servers:
            self._servers[key] = self._planned(model, dtype)
        return self._servers[key].url

    def _planned(self, model: Path, dtype: str) -> _Server:
        reserved = reserve_port(LOOPBACK)
        port = int(reserved.getsockname()[1])
        settings: dict[str, Any] = {
            "dtype": dtype,
            "max_model_len": MAX_MODEL_LEN,
            "max_num_seqs": 16,
            "kv_cache_gib": MAX_CACHE_GIB,
        }
        argv, env = scoring_command(RolloutConfig(**settings), str(model), port, MAX_TOP_K)
        name = f"teacher-{len(self._servers)}"
        process = ChildProcess(name, argv, self._logs / f"{name}.log", env)
        return _Server(f"http://{LOOPBACK}:{port}", process, reserved)

    def start(self, timeout_s: float) -> None:
        """Start all servers and wait until they answer.

        Raises EngineError, with the last lines of its log, where one does not."""
        for server in self._servers.values():
            server.process.start()
        for server in self._servers.values():
            asyncio.run(_wait(server, timeout_s))


async def _wait(server: _Server, timeout_s: float) -> None:
    process = server.process
    async with EngineClient(server.url, process.name) as client:
        try:
            await client.wait_ready(timeout_s, lambda: process.alive)
        except EngineError as error:
            what = error.message
            if not process.alive:
                what = str(process.end())
            raise EngineError(
                f"a teacher cannot be served: {what}",
                where=str(process.log),
                remedy="its log says why",
            ) from error
