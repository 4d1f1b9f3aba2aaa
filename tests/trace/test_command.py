"""`plan --trace` refuses what it cannot do before it imports torch."""

from __future__ import annotations

import pytest

from grpo_megatron.cli.main import main


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["moe/qwen3-300b"], "no recipe"),
        (["demo/gspo-moe-cpu", "trainer.num_rank=2"], "num_ranks"),
        (["demo/gspo-moe-cpu", "model.preset=null", "model.path=/nowhere"], "config.json"),
        (["demo/gspo-moe-cpu", "--search", "1x8"], "--trace and --search exclude each other"),
        (["demo/gspo-moe-cpu", "--compare", "ppo"], "--trace and --compare exclude each other"),
        (["demo/gspo-moe-cpu", "--lengths", "x"], "--trace and --lengths exclude each other"),
        (["stages/deepseek-r1-samples"], "has no training step"),
        (["demo/ppo-moe-cpu"], "critic=null objective.preset=grpo"),
    ],
)
def test_wrong_arguments(capfd, arguments, words):
    assert main(["plan", *arguments, "--trace"]) == 2
    error = capfd.readouterr().err
    assert words in error
    assert "Traceback" not in error
