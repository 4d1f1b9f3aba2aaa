"""A small HTTP server in the place of judges, reward models and servers that share devices.

It speaks what those are asked in (`rewards/judge.py`, `rewards/step_rewards.py`,
`rollout/client.py`): a chat reply that scores every criterion, or that has
a lesson for who asks for a JSON list, a scalar or scores of steps for
`/pooling`, "yes" to requests to sleep, pause and wake."""

import asyncio
import threading
import zlib
from types import TracebackType

from aiohttp import web

_MOST_CRITERIA = 32
STEP_TOKEN = "<extra_0>"
"""With which the steps of a rehearsal end for process reward models."""
_LESSON = '[{"operation": "add", "experience": "look twice"}]'


class LocalServer:
    """Serves on a free port of the loopback device while the context is open."""

    def __init__(self) -> None:
        self.num_judged = 0
        """Replies of the judge and scores of the reward model."""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._runner: web.AppRunner | None = None
        self.url = ""

    def __enter__(self) -> "LocalServer":
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._start(), self._loop).result()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _start(self) -> None:
        app = web.Application()
        app.router.add_post("/v1/chat/completions", self._judge)
        app.router.add_post("/pooling", self._score)
        app.router.add_route("*", "/{anything:.*}", self._agree)
        self._runner = web.AppRunner(app, shutdown_timeout=1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        host, port = self._runner.addresses[0][:2]
        self.url = f"http://{host}:{port}"

    async def _stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    async def _judge(self, request: web.Request) -> web.Response:
        self.num_judged += 1
        body = await request.read()
        if b"JSON list" in body:
            return _reply(_LESSON)
        said = zlib.crc32(body)
        scores = [f"{number}: {(said + number) % 11}" for number in range(1, _MOST_CRITERIA + 1)]
        return _reply("\n".join(scores))

    async def _score(self, request: web.Request) -> web.Response:
        """Return a scalar; where the text marks steps, the scores of two classes for each."""
        self.num_judged += 1
        body = await request.read()
        score = zlib.crc32(body) % 1000 / 1000
        num_steps = body.decode().count(STEP_TOKEN)
        if not num_steps:
            return web.json_response({"data": [{"data": [2 * score - 1]}]})
        right = [(score + step / 7) % 1 for step in range(num_steps)]
        return web.json_response({"data": [{"data": [[1 - p, p] for p in right]}]})

    async def _agree(self, request: web.Request) -> web.Response:
        return web.json_response({})


def _reply(text: str) -> web.Response:
    """Return a reply in the form of OpenAI's API."""
    message = {"role": "assistant", "content": text}
    return web.json_response({"choices": [{"index": 0, "message": message}]})
