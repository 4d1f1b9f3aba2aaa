"""Requests to the servers behind learned rewards."""

import asyncio
import json
import math
import time
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any

import aiohttp

from grpo_megatron.errors import RewardError
from grpo_megatron.rewards.argument_checks import (
    check_number,
    check_text,
    check_url,
    check_whole_number,
)

_BUSY = (429, 500, 502, 503, 504)
"""Statuses of a server that may do the next time what it could not do now."""
_FIRST_PAUSE_S = 0.25
"""Before the second request; twice as long before each further one."""
_LONGEST_PAUSE_S = 60.0
"""A server that wants a longer one is given up."""


class Attempts:
    """How many more requests may be made for one reward, and until when.

    timeout_s: for all of them and the pauses between, from now on; None: as long as the reward's
    process waits."""

    def __init__(self, left: int, timeout_s: float | None = None):
        self.left = left
        self.deadline = math.inf
        if timeout_s is not None:
            self.deadline = time.monotonic() + timeout_s

    @property
    def has_more(self) -> bool:
        """Whether one more request may be made."""
        return self.left > 0 and time.monotonic() < self.deadline


class _BusyError(RewardError):
    """The server asks to be asked later: in `pause_s` seconds, None where it does not say when."""

    pause_s: float | None = None


class UnreadableError(RewardError):
    """A reply came, and it does not say what was asked."""


async def post(
    url: str,
    body: dict[str, Any],
    api_key: str | None = None,
    *,
    attempts: Attempts,
) -> Any:
    """Return the reply's JSON. A busy server (429, 500, 502, 503, 504) is asked again while
    `attempts` are left, after the pause of its `Retry-After`, else after a short one.

    Raises RewardError where there is no reply in the time of `attempts`, or it has another status
    than 200, and UnreadableError where it is no JSON: the sample is unscorable then."""
    pause_s = _FIRST_PAUSE_S
    while True:
        attempts.left -= 1
        try:
            return await _post_once(url, body, attempts.deadline, api_key)
        except _BusyError as error:
            if error.pause_s is not None:
                pause_s = error.pause_s
            ends_too_late = time.monotonic() + pause_s >= attempts.deadline
            if attempts.left <= 0 or ends_too_late or pause_s > _LONGEST_PAUSE_S:
                raise
        await asyncio.sleep(pause_s)
        pause_s = max(2 * pause_s, _FIRST_PAUSE_S)


async def _post_once(url: str, body: dict[str, Any], deadline: float, api_key: str | None) -> Any:
    """Make one request that ends at `deadline`, in the seconds of time.monotonic. Raises
    RewardError as `post` does, _BusyError where another request may be answered."""
    limit = aiohttp.ClientTimeout(total=None)
    if deadline < math.inf:
        limit = aiohttp.ClientTimeout(total=max(deadline - time.monotonic(), 1e-3))
    headers = {}
    if api_key:
        headers["Authorization"] = f"Bearer {api_key}"
    try:
        async with (
            aiohttp.ClientSession(timeout=limit) as session,
            session.post(url, json=body, headers=headers) as response,
        ):
            if response.status in _BUSY:
                busy = _BusyError(await _told(response), where=url)
                busy.pause_s = _pause_of(response.headers.get("Retry-After"))
                raise busy
            if response.status != 200:
                raise RewardError(await _told(response), where=url)
            read = await response.read()
    except (TimeoutError, aiohttp.ClientError, OSError) as error:
        raise RewardError(f"no answer: {type(error).__name__} {error}", where=url) from error
    try:
        return json.loads(read)
    except (ValueError, RecursionError) as error:
        raise UnreadableError(f"the reply is no JSON: {read[:200]!r}", where=url) from error


def part_of(reply: Any, *keys: str | int, url: str, remedy: str) -> Any:
    """Return what stands in a reply at `keys`, names and places from outside to inside. Raises
    UnreadableError where the reply has nothing there; it says how the reply begins."""
    part = reply
    try:
        for key in keys:
            part = part[key]
    except (LookupError, TypeError) as error:
        path = ""
        for key in keys:
            if isinstance(key, int):
                path += f"[{key}]"
            else:
                path += f".{key}"
        raise UnreadableError(
            f"the reply has no {path.removeprefix('.')}: {repr(reply)[:200]}",
            where=url,
            remedy=remedy,
        ) from error
    return part


async def _told(response: aiohttp.ClientResponse) -> str:
    """Return the status of a response, and how its text begins."""
    text = await response.text(errors="replace")
    return f"{response.status}: {text[:200]}"


def _pause_of(retry_after: str | None) -> float | None:
    """Return the seconds of a `Retry-After`, which is a number of them or a date; None where it is
    neither."""
    if retry_after is None:
        return None
    try:
        seconds = float(retry_after)
    except ValueError:
        try:
            date = parsedate_to_datetime(retry_after)
        except ValueError:
            return None
        if date.tzinfo is None:  # "-0000": in UTC
            date = date.replace(tzinfo=UTC)
        seconds = (date - datetime.now(UTC)).total_seconds()
        return max(seconds, 0.0)
    if math.isnan(seconds) or seconds < 0:
        return None
    return seconds


def address_of(url: str, route: str) -> str:
    """Return where a server has a route, such as `/pooling`."""
    return url.rstrip("/") + route


def check_server(
    *,
    url: Any,
    model: Any,
    api_key: Any = None,
    timeout_s: Any = None,
    attempts: Any = 2,
) -> None:
    """Raise RewardError unless these arguments, which all rewards of served models have, can be
    used."""
    check_url("url", url)
    check_text("model", model)
    is_key = isinstance(api_key, str) and bool(api_key)
    if api_key is not None and not is_key:
        raise RewardError(
            "api_key is no text that has something",
            remedy='write api_key = "$NAME", with the name of a variable of the environment',
        )
    if timeout_s is not None:
        check_number("timeout_s", timeout_s, above=0)
    check_whole_number("attempts", attempts, least=1)


def check_scale(*, scale: Any = 1.0, shift: Any = 0.0) -> None:
    """Raise RewardError unless both are finite numbers: a reward of NaN would say that the sample
    cannot be scored, and its other rewards would train it."""
    check_number("scale", scale)
    check_number("shift", shift)


def finite_score(score: Any, url: str) -> float:
    """Return a score of a reply, a number of JSON, as a float. Raises RewardError where it is
    another value, such as a string or a boolean, which would be read as 0.7 or 1; and where it is
    no finite number: NaN of a reward says that the sample cannot be scored, and its other rewards
    would train it."""
    is_number = isinstance(score, int | float) and not isinstance(score, bool)
    if not is_number:
        raise RewardError(
            f"the score {json.dumps(score)[:80]} is no number",
            where=url,
            remedy="let the server give scores as numbers of JSON",
        )
    try:
        number = float(score)
    except OverflowError:  # a whole number beyond all floats
        number = math.inf
    if not math.isfinite(number):
        raise RewardError(
            f"the score {str(score)[:80]!r} is no finite number",
            where=url,
            remedy="look for the server's overflow (half precision), or for a broken checkpoint",
        )
    return number
