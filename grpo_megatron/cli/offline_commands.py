"""`replay` and `mismatch`: compute recorded steps again, at any layout, and say what differs."""

from pathlib import Path
from typing import Annotated

import typer

from grpo_megatron.cli.run_commands import Overrides, check_run

Target = Annotated[str, typer.Argument(
    metavar="RUN[@STEP]", help="Run directory and recorded step, for example runs/demo@200; "
                               "default: the newest that can be computed again.")]


def replay(target: Target, overrides: Overrides = None) -> None:
    """Train a recorded step again from its checkpoint and compare with what was recorded.

    Follows the recorded samples, routes, clip and mask decisions, at the layout that overrides
    ask for. Exit code 7 if loss or gradient norm differ by more than rounding explains.
    """
    from grpo_megatron.launch.replay import replay_step

    run, step = _parse(target)
    for line in replay_step(run, step, overrides or []):
        typer.echo(line)


def mismatch(
    target: Target, overrides: Overrides = None,
    html: Annotated[Path | None, typer.Option(
        help="Where the page with heat maps goes; default: RUN/mismatch-STEP.html.")] = None,
    by_layer: Annotated[bool, typer.Option(
        help="One pass more per MoE layer, to split the routing part by layer.")] = True,
) -> None:
    """Split the log-prob gap between trainer and engine into its causes."""
    from grpo_megatron.launch.mismatch import report_mismatch

    run, step = _parse(target)
    for line in report_mismatch(run, step, overrides or [], html, by_layer=by_layer):
        typer.echo(line)


def _parse(target: str) -> tuple[Path, int | None]:
    from grpo_megatron.errors import ConfigError

    run, at, step = target.rpartition("@")
    if at and not step.isdecimal():
        raise ConfigError(f"{step!r} is not a step number", where=target,
                          remedy=f"for example {run}@100")
    check_run(path := Path(run if at else target))
    return path, int(step) if at else None
