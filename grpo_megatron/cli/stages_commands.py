"""`stages run`, `submit`, `status`, `resume`: graphs of stages."""

from typing import Annotated

import typer

from grpo_megatron.cli.run_commands import Site
from grpo_megatron.config.suggest import did_you_mean
from grpo_megatron.errors import ConfigError

app = typer.Typer(no_args_is_help=True, help="Several runs that build on each other (one TOML "
                  "graph): experts for domains, distillation, merges.")
Graph = Annotated[str, typer.Argument(
    metavar="GRAPH", help="Path of a graph's file, or the name of a shipped one.")]


@app.command()
@app.command("resume", help="The same as run: stages that are done and unchanged are not repeated.")
def run(graph: Graph,
        only: Annotated[str | None, typer.Option(
            help="This stage alone; what it builds on must be done.")] = None,
        in_job: Annotated[bool, typer.Option("--in-job", hidden=True)] = False) -> None:
    """Run what is not done, on this machine. A stage that fails stops what builds on it."""
    from grpo_megatron.stages.graph import load_graph
    from grpo_megatron.stages.runner import run_graph

    loaded = load_graph(graph)
    if only is not None and only not in loaded.table.stages:
        raise ConfigError(f"no stage is called {only!r}", where=loaded.file.display,
                          remedy=did_you_mean(only, loaded.order))
    code = run_graph(loaded, lambda text: typer.echo(f"=== {text}"), only)
    if only is None:
        status(graph)
    raise typer.Exit(code)


@app.command()
def submit(graph: Graph, site: Site) -> None:
    """Submit every stage that is not done as a Slurm job after those that it builds on."""
    from grpo_megatron.stages.graph import load_graph
    from grpo_megatron.stages.runner import submit_graph

    submit_graph(load_graph(graph), site, typer.echo)


@app.command()
def status(graph: Graph) -> None:
    """Stages in order: state, accuracy, gates; then how they build on each other."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    from grpo_megatron.launch.slurm import job_of, state_of
    from grpo_megatron.stages.graph import load_graph
    from grpo_megatron.stages.records import Records

    loaded = load_graph(graph)
    records, table = Records(loaded), Table(box=box.SIMPLE_HEAD)
    for column in ("stage", "kind", "state", "accuracy", "seconds", "gates, job"):
        table.add_column(column, overflow="fold")
    for name in loaded.order:
        result, notes = records.result(name), records.closed_gates(name)
        if (job := job_of(loaded.run_dir(name))) and not result:
            notes.append(f"job {job} {state_of(job).get('JobState', 'unknown to Slurm')}")
        accuracy = result.get("eval", {}).get("all", {}).get("accuracy")
        table.add_row(name, loaded.kind(name), records.state(name).value,
                      "" if accuracy is None else f"{accuracy:.3f}",
                      f"{result['seconds']:.0f}" if result else "", "; ".join(notes))
    console = Console(width=None if Console().is_terminal else 160)
    console.print(table)
    for level in loaded.levels():
        console.print("   ".join(
            name + (f" <- {', '.join(parents)}" if (parents := loaded.table.stages[name].parents)
                    else "") for name in level), markup=False, highlight=False, soft_wrap=True)
