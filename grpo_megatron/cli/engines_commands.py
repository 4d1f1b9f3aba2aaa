"""`grpo-megatron engines`: the rollout servers of a run that is running."""

from typing import Annotated

import typer

from grpo_megatron.cli.run_commands import Run, check_run

app = typer.Typer(
    no_args_is_help=True,
    help="The engines of a running run: list, add, remove.",
)


@app.command("list")
def list_engines(run: Run) -> None:
    """Say which engines the run has, and what each does."""
    from grpo_megatron.launch.engine_requests import engine_lines, running

    check_run(run)
    for line in engine_lines(running(run)):
        typer.echo(line)


@app.command()
def add(run: Run) -> None:
    """Start one more engine; it gets the present weights alone, is verified, and joins."""
    from grpo_megatron.launch.engine_requests import EngineRequest, ask, running

    check_run(run)
    typer.echo(ask(running(run), EngineRequest("add")))


@app.command()
def remove(
    run: Run, engine: Annotated[int, typer.Argument(help="Its number: 1 is rollout-1.")]
) -> None:
    """Give an engine no more requests, and end it when it has answered those that it has."""
    from grpo_megatron.launch.engine_requests import EngineRequest, ask, running

    check_run(run)
    typer.echo(ask(running(run), EngineRequest("remove", engine)))
