"""An environment that a server has (`serve.py`, or any that speaks the same), as one of a run."""

from pathlib import Path
from typing import Any, TypeVar

import aiohttp
import msgspec

from grpo_megatron.environments.protocol import Observation, Reply, Step, Unscorable
from grpo_megatron.environments.registry import traits
from grpo_megatron.environments.wire import ENCODER, LONGEST_LINE, PackedObservation, PackedStep
from grpo_megatron.errors import EpisodeError
from grpo_megatron.network import Endpoint
from grpo_megatron.rewards.argument_checks import check_number, check_url
from grpo_megatron.types import Problem


class ResetRequest(msgspec.Struct, frozen=True):
    """The body of `/reset`."""

    question: str
    answer: str
    metadata: dict[str, Any]
    seed: int


class StepRequest(msgspec.Struct, frozen=True):
    """The body of `/step`."""

    episode: str
    reply: Reply


class CloseRequest(msgspec.Struct, frozen=True):
    """The body of `/close`."""

    episode: str


class ResetAnswer(msgspec.Struct, frozen=True):
    """What `/reset` answers."""

    episode: str
    observation: PackedObservation


class StepAnswer(msgspec.Struct, frozen=True):
    """What `/step` answers."""

    step: PackedStep


class RefusedAnswer(msgspec.Struct, frozen=True):
    """What an answer that is no success says."""

    reason: str = ""


class CloseAnswer(msgspec.Struct, frozen=True):
    """What `/close` answers."""


_Answer = TypeVar("_Answer")


def _check(
    *, url: str | None = None, endpoint: str | None = None, timeout_s: float = 600.0
) -> None:
    if (url is None) == (endpoint is None):
        raise EpisodeError(
            "exactly one of url and endpoint says where the server is",
            remedy='for example url = "http://127.0.0.1:8000"',
        )
    if url is not None:
        check_url("url", url)
    check_number("timeout_s", timeout_s, above=0)


class ServerLost(Unscorable):
    """The server is not there, or did not answer in time."""


@traits(check=_check, network=True)
class RemoteEnvironment:
    """An episode on a server: at `url`, or where the `endpoint` file says, with its token.

    A server that is not there, or does not answer within `timeout_s`, makes the episode unscorable.
    Nothing is asked twice: a step that was lost may have been done."""

    def __init__(
        self, *, url: str | None = None, endpoint: str | None = None, timeout_s: float = 600.0
    ):
        self._url = (url or "").rstrip("/")
        self._headers = {"Content-Type": "application/json"}
        if endpoint is not None:
            found = Endpoint.read(Path(endpoint))
            self._url = f"http://{found.host}:{found.port}"
            self._headers["Authorization"] = f"Bearer {found.token}"
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)
        self._episode = ""

    async def reset(self, problem: Problem, seed: int) -> Observation:
        """Begin an episode on the server."""
        asked = ResetRequest(problem.question, problem.answer, dict(problem.metadata), seed)
        begun = await self._ask("reset", asked, ResetAnswer)
        self._episode = begun.episode
        return begun.observation.observation

    async def step(self, reply: Reply) -> Step:
        """Reply to a turn."""
        return (await self._ask("step", StepRequest(self._episode, reply), StepAnswer)).step.step

    async def close(self) -> None:
        """End the episode on the server, which would end it by itself after a while."""
        if self._episode:
            episode = self._episode
            self._episode = ""
            await self._ask("close", CloseRequest(episode), CloseAnswer)

    async def _ask(self, path: str, body: Any, kind: type[_Answer]) -> _Answer:
        where = f"{self._url}/{path}"
        try:
            # No connection is kept: thousands of episodes wait.
            connector = aiohttp.TCPConnector(force_close=True)
            async with (
                aiohttp.ClientSession(connector=connector, timeout=self._timeout) as session,
                session.post(where, data=ENCODER.encode(body), headers=self._headers) as response,
            ):
                content = await _content(response)
                if response.status != 200:
                    raise Unscorable(_refusal(where, response.status, content))
                return msgspec.json.decode(content, type=kind)
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            raise ServerLost(f"{where}: {error or 'it did not answer in time'}") from error
        except msgspec.MsgspecError as error:
            raise Unscorable(f"{where} answered something else: {error}") from error
        except UnicodeDecodeError as error:
            raise Unscorable(f"{where} answered what is no UTF-8") from error


async def _content(response: aiohttp.ClientResponse) -> bytes:
    content = bytearray()
    async for piece in response.content.iter_chunked(1 << 16):
        content += piece
        if len(content) > LONGEST_LINE:
            raise Unscorable(f"{response.url} answered with more than {LONGEST_LINE >> 20} MiB")
    return bytes(content)


def _refusal(where: str, status: int, content: bytes) -> str:
    try:
        reason = msgspec.json.decode(content, type=RefusedAnswer).reason
    except ValueError:
        reason = content[:200].decode(errors="replace")
    if status == 422:
        return reason
    return f"{where} answered {status}: {reason}"
