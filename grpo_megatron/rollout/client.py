"""HTTP client of one engine replica: generation and control, typed and with time limits."""

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import aiohttp
import msgspec

from grpo_megatron import progress
from grpo_megatron.errors import EngineError
from grpo_megatron.rollout.generate import GenerateRequest
from grpo_megatron.rollout.prefix_cache import PrefixCacheCounts
from grpo_megatron.types import Completion

_KEEP_ALIVE_S = 60.0  # far below the server's, see `engine.toml`
_CONNECT_S = 10.0
_LOOK_S = 0.1


class EngineUnreachable(EngineError):
    """The engine did not answer, or failed inside: another one may serve the request."""


class EngineClient(contextlib.AbstractAsyncContextManager):
    """One replica, which errors call `name`. Make and use it within one event loop, `close` it when
    done (or `async with`). `request_timeout_s` limits one generation. Requests carry the server's
    `token`, if it has one.

    Attributes:
        prefix_cache: What the answers said of the engine's prefix cache."""

    def __init__(
        self,
        base_url: str,
        name: str | None = None,
        request_timeout_s: float = 600.0,
        *,
        token: str = "",
    ):
        self.base_url = base_url
        self.token = token
        self.name = name or base_url
        self.prefix_cache = PrefixCacheCounts()
        self._request_timeout_s = request_timeout_s
        # The caller bounds concurrency; a second limit here would only hide it.
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE_S)
        headers = {}
        if token:
            headers["Authorization"] = f"Bearer {token}"
        self._session = aiohttp.ClientSession(
            connector=connector,
            headers=headers,
            auto_decompress=False,
            json_serialize=lambda request: msgspec.json.encode(request).decode(),
        )

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections; the engine is not told."""
        await self._session.close()

    async def generate(
        self, prompt_token_ids: Sequence[int], *, adapter: str = "", **settings: Any
    ) -> list[Completion]:
        """Sample completions of one prompt, with fields of `GenerateRequest`, from the weights with
        the engine's adapter of that name; "": from the weights alone.

        Raises EngineError: the engine refused or answered wrongly; EngineUnreachable: it did not
        answer or failed."""
        request = GenerateRequest(prompt_token_ids, **settings)
        asked = request.body()
        if adapter:
            asked["model"] = adapter
        body = await self._call("/inference/v1/generate", asked, timeout_s=self._request_timeout_s)
        answer = request.decode(body, self.name)
        self.prefix_cache.add(request, answer)
        return answer.completions

    async def health(self) -> bool:
        """Whether the engine answers, within ten seconds, that it is healthy."""
        with contextlib.suppress(EngineError):
            await self._call("/health", method="GET", timeout_s=_CONNECT_S)
            return True
        return False

    async def wait_ready(
        self,
        timeout_s: float,
        is_alive: Callable[[], bool] = lambda: True,
        is_current: Callable[[], bool] = lambda: True,
    ) -> bool:
        """Wait until the engine is healthy; False where `is_current` says that another one has
        taken its place.

        Raises EngineError: it is not after `timeout_s`, or `is_alive` says that it has ended."""
        deadline = time.monotonic() + timeout_s
        while not await self.health():
            if not is_alive():
                raise EngineError(f"{self.name} ended before it was ready", where=self.base_url)
            if time.monotonic() > deadline:
                raise EngineError(
                    f"{self.name} was not ready after {timeout_s:.0f} s",
                    where=self.base_url,
                    remedy="look at its log, or raise rollout.startup_timeout_s",
                )
            if not is_current():
                return False
            await asyncio.sleep(_LOOK_S)
        return True

    async def set_weight_version(self, version: int) -> None:
        """Tell the engine which version the loaded weights are, without loading any."""
        await self.control("/update_weight_version", {"new_version": str(version)})

    async def weight_checksums(self) -> dict[str, str]:
        """Ask for checksums of the loaded parameters by worker and name, in the engine's layout."""
        answer = await self.control("/weight_checker", {"action": "checksum"})
        checksums: dict[str, str] = answer["checksums"]
        return checksums

    async def adapter_checksums(self) -> dict[str, str]:
        """Ask for checksums of the adapters by worker, domain and layer, in the engine's layout."""
        checksums = {}
        for worker, of_worker in enumerate(await self.call_workers("adapter_checksums")):
            for layer, checksum in of_worker.items():
                checksums[f"{worker}/{layer}"] = checksum
        return checksums

    async def reset_prefix_cache(self) -> None:
        """Drop cached keys and values, which running requests may not hold."""
        answer = await self.control("/reset_prefix_cache")
        if not answer["success"]:
            raise EngineError(
                f"{self.name} could not drop its prefix cache: it is in use", where=self.base_url
            )

    async def call_workers(self, method: str, **arguments: Any) -> list[Any]:
        """Call a method of every worker; results that are not JSON arrive as text."""
        answer = await self.control("/collective_rpc", {"method": method, "kwargs": arguments})
        results: list[Any] = answer["results"]
        return results

    async def control(self, path: str, request: Any = None, **options: Any) -> Any:
        """Make a control request (`method`, `params`); returns its answer, None if empty."""
        body = await self._call(path, request, **options)
        if not body:
            return None
        return msgspec.json.decode(body)

    async def _call(
        self,
        path: str,
        request: Any = None,
        *,
        method: str = "POST",
        params: Mapping[str, str] | None = None,
        timeout_s: float = 600.0,
    ) -> bytes:
        limits = aiohttp.ClientTimeout(total=timeout_s, sock_connect=_CONNECT_S)
        try:
            async with self._session.request(
                method, self.base_url + path, json=request, params=params, timeout=limits
            ) as response:
                body = await response.read()
                status = response.status
        except TimeoutError as error:
            raise EngineUnreachable(
                f"{self.name} did not answer {path} within {timeout_s:.0f} s", where=self.base_url
            ) from error
        except (aiohttp.ClientError, OSError) as error:
            raise EngineUnreachable(
                f"{self.name} is not reachable for {path}: {error}", where=self.base_url
            ) from error
        progress.advance()
        if status != 200:
            kind = EngineError
            if status >= 500:
                kind = EngineUnreachable
            text = body[:500].decode("utf-8", "replace")
            raise kind(f"{self.name} answered {path} with {status}: {text}", where=self.base_url)
        return body
