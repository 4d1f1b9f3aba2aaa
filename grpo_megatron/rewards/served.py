"""Requests to the servers behind learned rewards."""

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
