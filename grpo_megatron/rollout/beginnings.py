"""How episodes begin: those of a group alike, for they are compared with each other."""

import json
from collections import OrderedDict

import xxhash

from grpo_megatron.environments.protocol import Observation, Unscorable

_GROUPS_KEPT = 4096
_REMEDY = (
    "have the environment take the seed, or set environment.same_beginning = false where they may "
    "differ"
)


class Beginnings:
    """What the policy has read first in the episodes of the newest groups."""

    def __init__(self) -> None:
        self._of_group: OrderedDict[tuple[str, int], str] = OrderedDict()

    def require_same(self, group: tuple[str, int], observation: Observation) -> None:
        """Raise Unscorable where an episode of the group (question, seed) has begun otherwise."""
        read = json.dumps([observation.messages, observation.tools], sort_keys=True)
        own = xxhash.xxh3_128_hexdigest(read.encode())
        first = self._of_group.setdefault(group, own)
        if len(self._of_group) > _GROUPS_KEPT:
            self._of_group.popitem(last=False)
        if own != first:
            raise Unscorable(
                "it begins otherwise than an episode with the same seed before, and the episodes "
                f"of a group are compared: {_REMEDY}"
            )
