"""Requests to the servers behind learned rewards."""

import math
from typing import Any

import aiohttp

from grpo_megatron.errors import RewardError


async def post(
    url: str, body: dict[str, Any], timeout_s: float | None, api_key: str | None = None
) -> Any:
    """Return the reply's JSON. Raises RewardError where there is none within `timeout_s` (None: as
    long as the reward's process waits), or another status than 200: the sample is unscorable
    then."""
    limit = aiohttp.ClientTimeout(total=timeout_s)
    headers = {}
    if api_key:
        headers["Authorization"] = f"Bearer {api_key}"
    try:
        async with (
            aiohttp.ClientSession(timeout=limit) as session,
            session.post(url, json=body, headers=headers) as response,
        ):
            if response.status != 200:
                raise RewardError(f"{response.status}: {(await response.text())[:200]}", where=url)
            return await response.json()
    except (TimeoutError, aiohttp.ClientError, OSError) as error:
        raise RewardError(f"no answer: {type(error).__name__} {error}", where=url) from error


def finite_score(score: Any, url: str) -> float:
    """Return a score of a reply as a number. Raises RewardError where it is no finite one: NaN of a
    reward says that the sample cannot be scored, and its other rewards would train it."""
    try:
        number = float(score)
    except (OverflowError, TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise RewardError(
            f"the score {str(score)[:80]!r} is no finite number",
            where=url,
            remedy="look for the server's overflow (half precision), or for a broken checkpoint",
        )
    return number
