"""`stages run`, `submit`, `status`, `resume`: graphs of stages."""

import math
import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from grpo_megatron.cli.inspect_commands import print_table
from grpo_megatron.cli.run_commands import (
    Site,
    SkipRewardCheck,
    flag,
    print_advice,
    warn_unchecked_rewards,
)
from grpo_megatron.config.evaluated_share import share_of
from grpo_megatron.config.suggest import did_you_mean
from grpo_megatron.errors import ConfigError

if TYPE_CHECKING:
    from grpo_megatron.stages.graph import Graph as LoadedGraph

app = typer.Typer(
    no_args_is_help=True,
    help=(
        "Several runs that build on each other (one TOML graph): experts "
        "for domains, distillation, merges."
    ),
)
Graph = Annotated[
    str,
    typer.Argument(metavar="GRAPH", help="Path of a graph's file, or the name of a shipped one."),
]
Anew = Annotated[
    list[str] | None,
    typer.Option(
        "--anew",
        metavar="STAGE",
        help="Make this stage anew although it is done, and what builds on it; may be repeated.",
    ),
]


@app.command()
@app.command("resume", help="The same as run: stages that are done and unchanged are not repeated.")
def run(
    graph: Graph,
    only: Annotated[
        str | None, flag("only", "This stage alone; what it builds on must be done.")
    ] = None,
    anew: Anew = None,
    in_job: Annotated[bool, typer.Option("--in-job", hidden=True)] = False,
) -> None:
    """Run what is not done, on this machine. A stage that fails stops what builds on it."""
    from grpo_megatron.stages.loading import load_graph
    from grpo_megatron.stages.runner import run_graph

    loaded = load_graph(graph)
    named = list(anew or [])
    if only is not None:
        named.append(only)
    _refuse_unknown(named, loaded)
    code = run_graph(loaded, lambda text: typer.echo(f"=== {text}"), only, anew=anew or [])
    if only is None:
        status(graph)
    raise typer.Exit(code)


@app.command()
def submit(
    graph: Graph,
    site: Site,
    anew: Anew = None,
    skip_reward_check: SkipRewardCheck = False,
) -> None:
    """Submit every stage that is not done as a Slurm job after those that it builds on."""
    from grpo_megatron.stages.loading import load_graph
    from grpo_megatron.stages.runner import submit_graph

    if skip_reward_check:
        warn_unchecked_rewards()
    loaded = load_graph(graph)
    _refuse_unknown(anew or [], loaded)
    _print_advice(loaded, anew or [])
    submit_graph(loaded, site, typer.echo, check_rewards=not skip_reward_check, anew=anew or [])


def _print_advice(graph: "LoadedGraph", anew: Sequence[str]) -> None:
    """Say on stderr what is unusual in the recipes of the stages that are to be run."""
    from grpo_megatron.stages.records import Records, State

    records = Records(graph, anew)
    for name in graph.order:
        stage = graph.table.stages[name]
        if stage.recipe is None or records.state(name) is State.DONE:
            continue
        coming = any(records.state(parent) is not State.DONE for parent in stage.parents)
        with graph.errors_of(name):
            print_advice(graph.resolve(name).config, stage=name, coming=coming)


def _refuse_unknown(names: Sequence[str], graph: "LoadedGraph") -> None:
    """ConfigError for a name that no stage has."""
    for name in names:
        if name not in graph.table.stages:
            raise ConfigError(
                f"no stage is called {name!r}",
                where=graph.file.display,
                remedy=did_you_mean(name, graph.order),
            )


@app.command()
def status(graph: Graph) -> None:
    """Stages in order: state, accuracy, gates, what has changed since they began; then how they
    build on each other."""
    from grpo_megatron.launch.slurm import JobStates, job_of
    from grpo_megatron.stages.loading import load_graph
    from grpo_megatron.stages.records import Records

    loaded = load_graph(graph)
    records = Records(loaded)
    states = JobStates()
    rows = []
    to_make_anew: list[str] = []
    for name in loaded.order:
        result = records.result(name)
        notes = records.closed_gates(name)
        changed = records.changed_since(name)
        if changed:
            notes.append(changed)
        of_making = records.notes(name)
        if of_making:
            notes += of_making
            to_make_anew.append(name)
        job = job_of(loaded.run_dir(name))
        if job and not result:
            notes.append(f"job {job} {states.words(job)}")
        accuracy = ""
        share = share_of(result.get("eval", {}).get("all", {}), "accuracy")
        if share.num_unscorable or not math.isnan(share.value):
            accuracy = str(share)
        seconds = ""
        if result:
            seconds = f"{result['seconds']:.0f}"
        state = records.state(name).value
        rows.append((name, loaded.kind(name), state, accuracy, seconds, "; ".join(notes)))
    print_table(
        ("stage", "kind", "state", "accuracy", "seconds", "gates, changes, job"),
        rows,
        labelled=True,
    )
    if to_make_anew:
        flags = " ".join(f"--anew {name}" for name in to_make_anew)
        typer.echo(
            "what other code or other settings made stays done; to make it anew, with what builds "
            f"on it: grpo-megatron stages run {shlex.quote(graph)} {flags}"
        )
    for level in loaded.levels():
        shown = []
        for name in level:
            parents = loaded.table.stages[name].parents
            if parents:
                shown.append(f"{name} <- {', '.join(parents)}")
            else:
                shown.append(name)
        typer.echo("   ".join(shown))
    if states.error is not None:
        raise states.error
