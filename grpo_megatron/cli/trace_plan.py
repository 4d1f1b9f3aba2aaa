"""`plan --trace`: the trainer's own step of a recipe, in a process that has torch."""

import subprocess
import sys

from grpo_megatron.cli.inspect_commands import resolve_any
from grpo_megatron.cli.run_commands import print_advice
from grpo_megatron.errors import ConfigError
from grpo_megatron.plan.memory import offloads_optimizer
from grpo_megatron.plan.vision import require_text_model

_PROGRAM = "grpo_megatron.trace"


def trace(source: str, overrides: list[str], *, as_json: bool) -> int:
    """Print the report of a recipe or a run; return the exit code of the process that made it."""
    config = resolve_any(source, overrides).config  # refuses before torch is imported
    print_advice(config)
    if not config.trains:
        raise ConfigError(
            f"a run of kind {config.kind!r} has no training step to trace",
            where="kind",
            remedy="name a recipe of kind rl, sft, distil, preferences or reward_model",
        )
    if config.critic is not None:
        raise ConfigError(
            "a trace follows log-probs and their loss, and the recipe has a critic",
            where="critic",
            remedy="trace the recipe without [critic] and with an objective that needs none: "
            "critic=null objective.preset=grpo",
        )
    if offloads_optimizer(config):
        raise ConfigError(
            "a trace has no host that could update weights",
            where="trainer.offload_optimizer",
            remedy="trace the recipe with trainer.offload_optimizer=false; all but the optimizer "
            "is the same",
        )
    require_text_model(config, "a trace")
    command = [sys.executable, "-m", _PROGRAM, source, *overrides]
    if as_json:
        command.append("--json")
    return subprocess.run(command, check=False).returncode
