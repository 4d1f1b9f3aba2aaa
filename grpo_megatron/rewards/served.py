"""Requests to the servers behind learned rewards."""

import asyncio
import json
import math
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any

import aiohttp

from grpo_megatron.errors import RewardError

_BUSY = (429, 500, 502, 503, 504)
"""Statuses of a server that may do the next time what it could not do now."""
_FIRST_PAUSE_S = 0.25
"""Before the second request; twice as long before each further one."""
_LONGEST_PAUSE_S = 60.0
"""A server that wants a longer one is given up."""


@dataclass
class Attempts:
    """How many more requests may be made for one reward."""

    left: int


class _BusyError(RewardError):
    """The server asks to be asked later: in `pause_s` seconds, None where it does not say when."""

    pause_s: float | None = None


async def post(
    url: str,
    body: dict[str, Any],
    timeout_s: float | None,
    api_key: str | None = None,
    *,
    attempts: Attempts,
) -> Any:
    """Return the reply's JSON. A busy server (429, 500, 502, 503, 504) is asked again while
    `attempts` are left, after the pause of its `Retry-After`, else after a short one.

    Raises RewardError where there is no reply within `timeout_s` for all requests and pauses (None:
    as long as the reward's process waits), it is no JSON, or has another status than 200: the
    sample is unscorable then."""
    deadline = math.inf
    if timeout_s is not None:
        deadline = time.monotonic() + timeout_s
    pause_s = _FIRST_PAUSE_S
    while True:
        attempts.left -= 1
        try:
            return await _post_once(url, body, deadline, api_key)
        except _BusyError as error:
            if error.pause_s is not None:
                pause_s = error.pause_s
            ends_too_late = time.monotonic() + pause_s >= deadline or pause_s > _LONGEST_PAUSE_S
            if attempts.left <= 0 or ends_too_late:
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
        raise RewardError(f"the reply is no JSON: {read[:200]!r}", where=url) from error


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
