"""Which engines a run has now: the supervisor writes it, the controller follows.

    {"0": "present", "2": "leaving"}     endpoints/ATTEMPT/engines.json

The recipe says with how many a run begins (`rollout.num_replicas`); `grpo-megatron engines` adds
and removes some. An engine that has ended for good is no member."""

import json
from collections.abc import Mapping
from typing import Literal

from grpo_megatron.config.run import RunConfig
from grpo_megatron.files import write_atomically
from grpo_megatron.rundir import RunDir
from grpo_megatron.telemetry.events import read_events

Membership = Literal["present", "leaving"]
"""Whether an engine takes requests, or only ends those that it has."""

_FILE = "engines.json"


def write_members(run_dir: RunDir, members: Mapping[int, Membership]) -> None:
    """Say which engines the run has, by number."""
    named = {str(index): membership for index, membership in sorted(members.items())}
    write_atomically(run_dir.endpoints / _FILE, json.dumps(named))


def read_members(run_dir: RunDir, config: RunConfig) -> dict[int, Membership]:
    """Return which engines the run has, by number; those of the recipe where no file says it."""
    try:
        named = json.loads((run_dir.endpoints / _FILE).read_text())
    except (OSError, ValueError):
        return dict.fromkeys(range(config.num_replicas), "present")
    return {int(index): membership for index, membership in named.items()}


def read_unjoined(run_dir: RunDir) -> set[str]:
    """Return the names of engines and workers that were started after the controller, and that it
    has not said to have joined."""
    unjoined: set[str] = set()
    for event in read_events(run_dir.events):
        role = str(event.get("role", ""))
        match event["kind"]:
            case "started" | "restarted" if role == "controller":
                unjoined.clear()  # it waits for all that there are
            case "added" | "restarted":
                unjoined.add(role)
            case "joined" | "started" | "removed":
                unjoined.discard(role)
    return unjoined
