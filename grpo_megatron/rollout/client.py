"""HTTP client of one engine replica: generation and control, typed and with time limits."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import aiohttp
import msgspec

from grpo_megatron.errors import EngineError
from grpo_megatron.rollout.decode import Decoder, decode_response
from grpo_megatron.types import Completion

if TYPE_CHECKING:  # imports torch, which a client need not wait for
    from grpo_megatron.weights.transfer_plan import TransferPlan

_KEEP_ALIVE_S = 60.0  # far below the server's, see `engine.serve_command`
_CONNECT_S = 10.0


class EngineUnreachable(EngineError):
    """The engine did not answer, or failed inside: another one may serve the request."""


class EngineClient:
    """One replica. Use within one event loop; `close` when done (or `async with`).

    Args:
        base_url: For example `http://127.0.0.1:8000`.
        name: How errors call it.
        request_timeout_s: Limit of one generation request.
        control_timeout_s: Limit of one control request.
    """

    def __init__(
        self, base_url: str, *, name: str | None = None, request_timeout_s: float = 600.0,
        control_timeout_s: float = 600.0,
    ) -> None:
        self.base_url = base_url.rstrip("/")
        self.name = name or self.base_url
        self._request_timeout_s, self._control_timeout_s = request_timeout_s, control_timeout_s
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> EngineClient:
        return self

    async def __aexit__(self, *_) -> None:
        await self.close()

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    # -- generation ------------------------------------------------------------------------------

    async def generate(
        self, prompt_token_ids: Sequence[int], *, max_tokens: int, n: int = 1,
        temperature: float = 1.0, stop_token_ids: Sequence[int] = (), seed: int | None = None,
        record_routes: bool = False, require_routes: bool = True, routes_from: int = 0,
        may_abort: bool = False, truncation: Mapping[str, float] | None = None,
        decode: Decoder | None = None,
    ) -> list[Completion]:
        """Sample `n` completions of one prompt.

        Args:
            prompt_token_ids: The prompt.
            max_tokens: Longest completion, the stop token included.
            n: Completions; with a seed, child i uses seed + i.
            temperature: 0 is greedy; log-probs are then those of temperature 1.
            stop_token_ids: A completion ends after any of these, and of no other token.
            seed: Makes the request reproducible.
            record_routes: Ask for the experts of every token.
            require_routes: Refuse an answer without them, or with others than asked for.
            routes_from: First row of `Completion.routes`; rows before are not sent.
            may_abort: Accept what a pause ended early (finish reason `abort`, maybe no tokens).
            truncation: See `RolloutConfig.truncation`; completions then tell which ids were kept.
            decode: Token ids to text, for `Completion.text`.

        Raises:
            EngineUnreachable: No answer, or an error inside the engine.
            EngineError: The engine refused the request, or its answer is not what was asked for.
        """
        sampling: dict[str, Any] = {
            "n": n, "max_tokens": max_tokens, "temperature": temperature, "logprobs": 0,
            "detokenize": False, "stop_token_ids": list(stop_token_ids),
            "ignore_eos": True,  # else generation_config.json of the checkpoint ends them as well
        }
        if seed is not None:
            sampling["seed"] = seed
        if truncation:
            sampling |= truncation
        if routes_from:
            sampling["routed_experts_prompt_start"] = routes_from
        request = {"token_ids": list(prompt_token_ids), "sampling_params": sampling}
        body = await self._call(
            "POST", "/inference/v1/generate", request, timeout_s=self._request_timeout_s
        )
        return decode_response(
            body, where=self.name, num_prompt_tokens=len(prompt_token_ids), num_completions=n,
            max_tokens=max_tokens, record_routes=record_routes, require_routes=require_routes,
            routes_from=routes_from, may_abort=may_abort, truncated=bool(truncation),
            decode=decode,
        )

    # -- health ----------------------------------------------------------------------------------

    async def health(self) -> bool:
        """Whether the engine answers and its core is alive."""
        try:
            await self._call("GET", "/health", timeout_s=_CONNECT_S)
        except EngineError:
            return False
        return True

    async def wait_ready(
        self, timeout_s: float, is_alive: Callable[[], bool] = lambda: True,
    ) -> None:
        """Wait until the server answers.

        Args:
            timeout_s: Limit.
            is_alive: Whether the server's process still runs.

        Raises:
            EngineError: The process ended, or the limit passed.
        """
        deadline = time.monotonic() + timeout_s
        while not await self.health():
            if not is_alive():
                raise EngineError(f"{self.name} ended before it was ready", where=self.base_url)
            if time.monotonic() > deadline:
                raise EngineError(
                    f"{self.name} was not ready after {timeout_s:.0f} s", where=self.base_url,
                    remedy="look at its log, or raise rollout.startup_timeout_s",
                )
            await asyncio.sleep(0.1)

    # -- weights ---------------------------------------------------------------------------------

    async def pause(self, mode: str = "wait") -> None:
        """Stop scheduling and drop all cached keys and values.

        Args:
            mode: `wait` drains, `abort` ends requests where they are, `keep` holds them.
        """
        await self._control("/pause", params={"mode": mode, "clear_cache": "true"})

    async def resume(self) -> None:
        await self._control("/resume")

    async def init_weight_transfer(
        self, senders: Sequence[tuple[str, int]], *, rank_offset: int, world_size: int,
        timeout_s: float,
    ) -> None:
        """Join every sender's group; they must be joining at the same time."""
        await self._control("/init_weight_transfer_engine", {"init_info": {
            "senders": [list(sender) for sender in senders], "rank_offset": rank_offset,
            "world_size": world_size, "timeout_s": timeout_s,
        }})

    async def start_weight_update(self) -> None:
        await self._control("/start_weight_update")

    async def update_weights(self, plan: TransferPlan, *, publish: int) -> None:
        """Receive and load; the senders must be sending at the same time."""
        info = {"plan": plan.to_json(), "publish": publish}
        await self._control("/update_weights", {"update_info": info})

    async def finish_weight_update(self, version: int) -> None:
        await self._control("/finish_weight_update", {"weight_version": str(version)})

    async def set_weight_version(self, version: int) -> None:
        """Say which version the loaded weights are, without loading any."""
        await self._control("/update_weight_version", {"new_version": str(version)})

    async def reload_from_path(self, path: str, *, version: int) -> None:
        """Load a Hugging Face checkpoint directory in place. The engine must be paused."""
        await self.call_workers("reload_from_path", path=str(path))
        await self.reset_prefix_cache()
        await self.set_weight_version(version)

    async def received_digests(self) -> list[dict[str, str]]:
        """Per worker: name to digest of what the last publish delivered."""
        return await self.call_workers("received_digests")

    async def weight_checksums(self) -> dict[str, str]:
        """Checksums of the loaded parameters by worker and name, in the engine's own layout."""
        answer = await self._control("/weight_checker", {"action": "checksum"})
        return answer["checksums"]

    async def get_world_size(self) -> int:
        """Worker processes of this replica."""
        return (await self._control("/get_world_size", method="GET"))["world_size"]

    async def reset_prefix_cache(self) -> None:
        """Drop cached keys and values.

        Raises:
            EngineError: Running requests still hold some.
        """
        if not (await self._control("/reset_prefix_cache"))["success"]:
            raise EngineError(f"{self.name} could not drop its prefix cache: it is in use",
                              where=self.base_url)

    async def call_workers(self, method: str, **arguments: Any) -> list[Any]:
        """Call a method of every worker; results that are not JSON arrive as text."""
        answer = await self._control("/collective_rpc", {"method": method, "kwargs": arguments})
        return answer["results"]

    # -- transport -------------------------------------------------------------------------------

    async def _control(
        self, path: str, request: Any = None, *, method: str = "POST",
        params: Mapping[str, str] | None = None,
    ) -> Any:
        body = await self._call(
            method, path, request, params=params, timeout_s=self._control_timeout_s
        )
        return msgspec.json.decode(body) if body else None

    async def _call(
        self, method: str, path: str, request: Any = None, *, timeout_s: float,
        params: Mapping[str, str] | None = None,
    ) -> bytes:
        if self._session is None:
            self._session = _new_session()
        data = msgspec.json.encode(request) if request is not None else None
        headers = {"Content-Type": "application/json"} if data is not None else None
        try:
            async with self._session.request(
                method, self.base_url + path, data=data, params=params, headers=headers,
                timeout=aiohttp.ClientTimeout(total=timeout_s, sock_connect=_CONNECT_S),
            ) as response:
                body, status = await response.read(), response.status
        except TimeoutError as error:
            raise EngineUnreachable(f"{self.name} did not answer {path} within {timeout_s:.0f} s",
                                    where=self.base_url) from error
        except (aiohttp.ClientError, OSError) as error:
            raise EngineUnreachable(f"{self.name} is not reachable for {path}: {error}",
                                    where=self.base_url) from error
        if status != 200:
            kind = EngineUnreachable if status >= 500 else EngineError
            text = body[:500].decode("utf-8", "replace")
            raise kind(f"{self.name} answered {path} with {status}: {text}", where=self.base_url)
        return body


def _new_session() -> aiohttp.ClientSession:
    # The caller bounds concurrency; a second limit here would only hide it.
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE_S)
    return aiohttp.ClientSession(connector=connector, auto_decompress=False)
