"""Files of preferences, and recipes that read them."""

from __future__ import annotations

import json
from pathlib import Path

from grpo_megatron.config.run import RunConfig


def recipe(path, **changes) -> RunConfig:
    """A recipe of one domain that compares pairs, with `changes`."""
    values = {
        "name": "case",
        "kind": "preferences",
        "model": {"preset": "tiny-qwen3-moe"},
        "domains": [{"name": "sums", "source": "file", "path": str(path)}],
        "data": {"num_validation": 0, "num_heldout": 2},
        "rollout": {"max_new_tokens": 8, "max_model_len": 16},
    }
    return RunConfig.model_validate({**values, **changes})


def write(folder: Path, rows: list[dict]) -> Path:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
