"""A tiny HTTP server that answers like an engine, and misbehaves on demand. Unit tests only."""

from __future__ import annotations

import asyncio
import base64
import io
from collections.abc import Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
from aiohttp import web

LAYERS, EXPERTS_PER_TOKEN = 3, 2


def answer(request: dict[str, Any], routes: bool = False) -> dict[str, Any]:
    """Tokens that depend on prompt, seed and child only, as a real engine's do."""
    sampling, prompt = request["sampling_params"], request["token_ids"]
    choices = []
    for index in range(sampling["n"]):
        base = sum(prompt) * 7 + (sampling.get("seed") or 0) + index
        tokens = [(base + i) % 100 for i in range(sampling["max_tokens"])]
        choice = {
            "index": index,
            "token_ids": tokens,
            "finish_reason": "length",
            "stop_reason": None,
            "logprobs": {
                "content": [
                    {"token_id": t, "logprob": -0.5 - t / 100, "rank": 1, "top_logprobs": []}
                    for t in tokens
                ]
            },
            "weight_versions": [{"version": "3", "start": 0, "end": len(tokens)}],
            "routed_experts": None,
        }
        if routes:
            shape = (len(prompt) + len(tokens) - 1, LAYERS, EXPERTS_PER_TOKEN)
            choice["routed_experts"] = npy(np.zeros(shape, np.uint8))
        choices.append(choice)
    return {"request_id": "r", "choices": choices, "output_mode": "tokens"}


def npy(array: np.ndarray) -> str:
    buffer = io.BytesIO()
    np.save(buffer, array, allow_pickle=False)
    return base64.b64encode(buffer.getvalue()).decode()


class FakeEngine:
    """`generate` may be replaced; `requests` counts calls, `running` those not yet answered."""

    def __init__(self) -> None:
        self.generate: Callable[[dict], Awaitable[web.Response]] = self.answer
        self.healthy, self.delay_s = True, 0.0
        self.requests: list[dict] = []
        self.cached: Callable[[dict], int | None] = lambda request: None
        self.running = self.most_running = self.cancelled = 0
        self.url = ""
        self.token = ""
        self.runner: web.AppRunner | None = None

    async def answer(self, request: dict) -> web.Response:
        await asyncio.sleep(self.delay_s)
        answered = answer(request)
        answered["usage"] = {"prompt_tokens_details": {"cached_tokens": self.cached(request)}}
        return web.json_response(answered)

    async def _generate(self, http_request: web.Request) -> web.StreamResponse:
        given = http_request.headers.get("Authorization", "")
        if self.token and given != f"Bearer {self.token}":
            return web.Response(status=401)
        request = await http_request.json()
        self.requests.append(request)
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            return await self.generate(request)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.running -= 1

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response(status=200 if self.healthy else 503)

    async def start(self) -> None:
        app = web.Application()
        app.router.add_post("/inference/v1/generate", self._generate)
        app.router.add_get("/health", self._health)
        self.runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await self.runner.setup()
        site = web.TCPSite(self.runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{self.runner.addresses[0][1]}"

    async def stop(self) -> None:
        await self.runner.cleanup()


@asynccontextmanager
async def fake_engines(count: int = 1):
    engines = [FakeEngine() for _ in range(count)]
    for engine in engines:
        await engine.start()
    try:
        yield engines
    finally:
        for engine in engines:
            await engine.stop()
