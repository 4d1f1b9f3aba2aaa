"""A run whose trainer ranks share rows of 4,096 tokens: what it computes is what the engine did."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from tests.e2e import runs
from tests.e2e.family_models import write_checkpoint

pytestmark = [pytest.mark.engine, pytest.mark.matrix]

TOKENS = 4096
COMPLETION = 200
# of two answers to a question, with an eighth of the keys that each of them gathers
ROOM = TOKENS + COMPLETION + TOKENS // 4


def write_long_problems(file: Path) -> None:
    """Questions of which each is as long as a row has room for, a token a character."""
    generator = random.Random(3)
    rows = []
    for _ in range(40):
        length = TOKENS - COMPLETION - generator.randrange(64)
        question = "".join(generator.choices("0123456789+-= ", k=length))
        rows.append(json.dumps({"question": question, "answer": "7"}))
    file.write_text("\n".join(rows) + "\n")


def test_log_probs_of_long_rows_are_the_engines(tmp_path):
    """Two ranks share every row, in which the answers to a question share it; routes are
    replayed."""
    write_checkpoint(
        tmp_path / "model",
        "qwen3_moe_all_sparse",
        config_of_transformers=False,
        max_position_embeddings=TOKENS,
    )
    write_long_problems(tmp_path / "long.jsonl")
    text = Path(runs.RECIPE).read_text()
    text = text.replace('preset = "tiny-qwen3-moe"', f'path = "{tmp_path / "model"}"')
    domain = f'[[domains]]\nname = "long"\nsource = "file"\npath = "{tmp_path / "long.jsonl"}"\n'
    start, _, rest = text.partition("[[domains]]")
    rest = rest[rest.index("rewards = [") :]
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(start + domain + 'template = "{question}"\n' + rest)
    done = runs.command(
        "train",
        str(recipe),
        f"runs_dir={tmp_path}",
        "name=long",
        "num_steps=2",
        "batch.num_prompts=4",
        "batch.num_samples_per_prompt=2",
        "trainer.context_parallel_size=2",
        f"trainer.max_tokens_per_microbatch={ROOM}",
        f"rollout.max_model_len={TOKENS}",
        f"rollout.max_new_tokens={COMPLETION}",
        "rollout.kv_cache_gib=0.5",
        "rollout.max_num_seqs=8",
        "routing.replay=r3",
        "routing.on_missing=fail",
    )
    assert done.returncode == 0, done.stdout + done.stderr
    records = runs.metrics(tmp_path / "long")
    assert len(records) == 2
    for record in records:
        assert record["batch/computed_token_fraction"] < 0.7
        assert record["canary/abs_max"] < 1e-4
        assert record["routing/rollout_slot_flip_rate"] < 0.01
        assert record["grad/norm"] > 0
    again = runs.command("replay", f"{tmp_path / 'long'}@1", "trainer.context_parallel_size=1")
    assert again.returncode == 0, again.stdout + again.stderr
    assert "the step is reproduced" in again.stdout
    assert runs.no_survivors(tmp_path / "long")
