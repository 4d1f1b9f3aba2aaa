"""An environment behind HTTP: `python -m grpo_megatron.environments.serve NAME [options]`.

    POST /reset  {"question", "answer", "metadata", "seed"} -> {"episode", "observation"}
    POST /step   {"episode", "reply": {"text", "tool_calls", "error"}} -> {"step"}
    POST /close  {"episode"} -> {}
    GET /health  -> {"environment", "episodes"}

422 is an episode that cannot be scored, with `reason`; 404 one that is not known; 400 a body that
is no request; 401 a missing token. Environments run in processes as in a run (`host.py`): one that
crashes or hangs leaves the server as it is. It listens on loopback, in a Slurm job on the network
of the job, with a token that stands in the endpoint's file (`network.Endpoint`)."""

import argparse
import asyncio
import contextlib
import secrets
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from aiohttp import web

from grpo_megatron.config.environment import EnvironmentConfig
from grpo_megatron.config.run import DomainConfig
from grpo_megatron.data.json_bodies import read_json
from grpo_megatron.environments.command_line import (
    finite_seconds,
    keyword_arguments,
    seconds,
    whole_number,
)
from grpo_megatron.environments.host import EnvironmentHost
from grpo_megatron.environments.protocol import Environment, Unscorable
from grpo_megatron.environments.python import refuse_long_programs
from grpo_megatron.environments.registry import bind
from grpo_megatron.environments.remote import CloseRequest, ResetRequest, StepRequest
from grpo_megatron.environments.wire import ENCODER, LONGEST_LINE, PackedObservation, PackedStep
from grpo_megatron.errors import (
    EpisodeError,
    GrpoMegatronError,
    SetupError,
    as_own_error,
    raised_as,
)
from grpo_megatron.network import LOOPBACK, Endpoint, carries_token, own_address
from grpo_megatron.types import Problem

_DOMAIN = "served"
_LOOK_S = 10.0
_HIGHEST_PORT = 65535

_Body = TypeVar("_Body", ResetRequest, StepRequest, CloseRequest)
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(slots=True)
class _Episode:
    environment: Environment
    used: float = field(default_factory=time.monotonic)
    busy: asyncio.Lock = field(default_factory=asyncio.Lock)


class Server:
    """Serves episodes of one environment, by ids that cannot be guessed. An episode that is not
    asked for anything for `idle_s` seconds is ended."""

    def __init__(self, config: EnvironmentConfig, *, token: str, idle_s: float, log_path: Path):
        domain = DomainConfig.model_validate(
            {
                "name": _DOMAIN,
                "source": "file",
                "rewards": [{"function": "environment"}],
                "environment": config.model_dump(),
            }
        )
        self._name = config.name
        self._token = token
        self._idle_s = idle_s
        self._host = EnvironmentHost([domain], log_path=log_path)
        self._episodes: dict[str, _Episode] = {}

    def application(self) -> web.Application:
        """Return what aiohttp runs."""
        application = web.Application(middlewares=[self._guard], client_max_size=LONGEST_LINE)
        application.router.add_post("/reset", self._reset)
        application.router.add_post("/step", self._step)
        application.router.add_post("/close", self._close)
        application.router.add_get("/health", self._health)
        application.cleanup_ctx.append(self._alive)
        return application

    async def _alive(self, _: web.Application) -> Any:
        async with self._host:
            idle = asyncio.create_task(self._end_idle())
            yield
            idle.cancel()

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        given = request.headers.get("Authorization", "")
        if self._token and not carries_token(given, self._token):
            return _json({"reason": "the token is missing or wrong"}, 401)
        try:
            return await handler(request)
        except Unscorable as error:
            return _json({"reason": error.reason}, 422)
        except msgspec.MsgspecError as error:
            return _json({"reason": f"the body is no request: {error}"}, 400)
        except KeyError:
            return _json({"reason": "there is no such episode (any more)"}, 404)
        except EpisodeError as error:  # it fails for ever: the client sees why
            print(error, file=sys.stderr, flush=True)
            return _json({"reason": error.message}, 422)

    async def _reset(self, request: web.Request) -> web.Response:
        asked = await _body(request, ResetRequest)
        environment = self._host.environment(_DOMAIN)
        problem = Problem(asked.question, asked.answer, asked.metadata)
        try:
            observation = await environment.reset(problem, asked.seed)
        except BaseException:
            await environment.close()
            raise
        number = secrets.token_hex(16)
        self._episodes[number] = _Episode(environment)
        return _json({"episode": number, "observation": PackedObservation.of(observation)})

    async def _step(self, request: web.Request) -> web.Response:
        acted = await _body(request, StepRequest)
        episode = self._episodes[acted.episode]
        async with episode.busy:
            if acted.episode not in self._episodes:  # ended while this request waited
                raise KeyError(acted.episode)
            step = await episode.environment.step(acted.reply)
        episode.used = time.monotonic()
        return _json({"step": PackedStep.of(step)})

    async def _close(self, request: web.Request) -> web.Response:
        ended = await _body(request, CloseRequest)
        episode = self._episodes.pop(ended.episode)
        await episode.environment.close()
        return _json({})

    async def _health(self, _: web.Request) -> web.Response:
        return _json({"environment": self._name, "episodes": len(self._episodes)})

    async def _end_idle(self) -> None:
        while True:
            await asyncio.sleep(min(_LOOK_S, self._idle_s))
            now = time.monotonic()
            for number, episode in list(self._episodes.items()):
                if now - episode.used > self._idle_s and not episode.busy.locked():
                    del self._episodes[number]
                    await episode.environment.close()


async def _body(request: web.Request, kind: type[_Body]) -> _Body:
    """Return the body of a request. Raises MsgspecError where it is none."""
    try:
        return msgspec.convert(read_json(await request.read()), kind)
    except (UnicodeError, RecursionError) as error:
        raise msgspec.DecodeError(str(error)) from error


def _json(value: Any, status: int = 200) -> web.Response:
    return web.Response(body=ENCODER.encode(value), status=status, content_type="application/json")


async def serve(
    config: EnvironmentConfig,
    *,
    address: str,
    port: int = 0,
    endpoint: Path | None = None,
    idle_s: float = 3600.0,
    log_path: Path,
    said: Callable[[str], None] = print,
) -> None:
    """Serve until cancelled. The token is made here, and stands in the endpoint's file; without a
    file there is none, which only loopback takes: EpisodeError elsewhere. SetupError where the
    address and port cannot be had, or the endpoint's file not be written."""
    token = ""
    if endpoint is not None:
        token = secrets.token_hex(16)
    elif address != LOOPBACK:
        raise EpisodeError(
            f"a server at {address} needs a token",
            remedy="name a file for address and token: --endpoint FILE",
        )
    refuse_long_programs(bind(config.name, config.arguments), config.step_s)
    server = Server(config, token=token, idle_s=idle_s, log_path=log_path)
    runner = web.AppRunner(
        server.application(), access_log=None, handler_cancellation=True, shutdown_timeout=2.0
    )
    try:
        await runner.setup()
        site = web.TCPSite(runner, address, port)
        with raised_as(
            SetupError,
            f"cannot listen at {address}:{port}",
            OSError,
            remedy="name another --port, or none for a free one, and an --address of this machine",
        ):
            await site.start()
        bound = runner.addresses[0][1]
        if endpoint is not None:
            with raised_as(
                SetupError, "the endpoint's file cannot be written", OSError, where=endpoint
            ):
                Endpoint(address, bound, token).write(endpoint)
        said(f"{config.name} at http://{address}:{bound}")
        await asyncio.Event().wait()
    finally:
        await runner.cleanup()


async def _until_signalled(serving: Coroutine[Any, Any, None]) -> None:
    """Serve until SIGINT, which shells let their background jobs ignore, or SIGTERM."""
    task = asyncio.ensure_future(serving)
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    with contextlib.suppress(asyncio.CancelledError):
        await task


def _port(text: str) -> int:
    """Read a port. Raises ArgumentTypeError where it is none."""
    if not text.isdecimal() or int(text) > _HIGHEST_PORT:
        raise argparse.ArgumentTypeError(f"{text!r} is no port from 0 to {_HIGHEST_PORT}")
    return int(text)


def main() -> None:
    """Serve what the command line names; SIGINT and SIGTERM end it."""
    parser = argparse.ArgumentParser(prog="python -m grpo_megatron.environments.serve")
    parser.add_argument("name", help="as in a recipe: calculator, module:Class, ...")
    parser.add_argument(
        "--arguments", type=keyword_arguments, default={}, help="keyword arguments, as JSON"
    )
    parser.add_argument("--address", help="default: loopback, in a job its network")
    parser.add_argument("--port", type=_port, default=0, help="default: a free one")
    parser.add_argument("--endpoint", type=Path, help="file for address and token")
    parser.add_argument("--processes", type=whole_number(1), default=1)
    parser.add_argument("--memory-mib", type=whole_number(128), default=2048, help="of each")
    parser.add_argument(
        "--observation-characters",
        type=whole_number(16),
        default=16384,
        help="longest message; of a longer one the middle is left out",
    )
    parser.add_argument("--step-s", type=finite_seconds, default=30.0, help="seconds of one step")
    parser.add_argument(
        "--idle-s", type=seconds, default=3600.0, help="of an episode, then it ends"
    )
    parser.add_argument("--log", type=Path, default=Path("/dev/null"), help="what it prints")
    given = parser.parse_args()
    try:
        config = EnvironmentConfig(
            name=given.name,
            arguments=given.arguments,
            processes=given.processes,
            memory_mib=given.memory_mib,
            observation_characters=given.observation_characters,
            step_s=given.step_s,
        )
        address = given.address or own_address()
        serving = serve(
            config,
            address=address,
            port=given.port,
            endpoint=given.endpoint,
            idle_s=given.idle_s,
            log_path=given.log,
            said=lambda text: print(text, flush=True),
        )
        asyncio.run(_until_signalled(serving))
    except GrpoMegatronError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)
    except OSError as error:  # a log that cannot be opened, no room for another process
        own = as_own_error(error, SetupError)
        print(own, file=sys.stderr)
        sys.exit(own.exit_code)
    except ValueError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
