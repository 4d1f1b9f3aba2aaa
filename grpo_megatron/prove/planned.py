"""What `plan` says of a model that a part is about to train."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from grpo_megatron.config.run import RunConfig
from grpo_megatron.plan.memory import RankMemory, plan_of
from grpo_megatron.prove.requests import TrainerTable
from grpo_megatron.prove.shapes import with_layers


def planned_memory(
    folder: Path,
    hf: Mapping[str, Any],
    trainer: TrainerTable,
    *,
    num_samples: int,
    longest: int,
    num_gpus: int,
) -> RankMemory:
    """Return the memory of the fullest rank, by component, in an update of `num_samples` samples of
    `longest` tokens. folder: for config.json; num_gpus: 0 on a CPU."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(hf), encoding="utf-8")
    domain = {
        "name": "made",
        "source": "file",
        "path": "made-up",
        "rewards": [{"function": "made:up", "name": "made"}],
    }
    config = RunConfig.model_validate(
        {
            "name": "prove",
            "model": {"path": str(folder)},
            "trainer": trainer,
            "batch": {"num_prompts": 1, "num_samples_per_prompt": num_samples},
            "rollout": {"max_model_len": longest, "max_new_tokens": max(longest // 2, 1)},
            "placement": {"gpus_per_node": num_gpus},
            "domains": [domain],
        }
    )
    return plan_of(config).worst


def layers_that_fit(
    folder: Path,
    hf: Mapping[str, Any],
    trainer: TrainerTable,
    *,
    num_samples: int,
    longest: int,
    num_gpus: int,
    memory_bytes: int,
) -> int:
    """Find how many of the model's layers can be trained: all, or a half, a quarter, ... of them.

    Returns 0 where not even one layer fits."""
    num_layers = int(hf["num_hidden_layers"])
    while num_layers > 0:
        memory = planned_memory(
            folder,
            with_layers(hf, num_layers),
            trainer,
            num_samples=num_samples,
            longest=longest,
            num_gpus=num_gpus,
        )
        if memory.total <= memory_bytes:
            return num_layers
        num_layers //= 2
    return 0
