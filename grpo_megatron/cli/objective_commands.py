"""`objective list`, `objective show`, `objective eval`."""

import json
from pathlib import Path
from typing import Annotated

import typer

from grpo_megatron.cli.config_commands import Json, print_table

app = typer.Typer(no_args_is_help=True, help="The objectives: what they are, what they compute.")


@app.command("list")
def list_objectives(as_json: Json = False) -> None:
    """All presets, with evidence grade and use."""
    from grpo_megatron.config.objective import PRESETS

    if as_json:
        fields = {"title", "source", "use", "evidence"}
        typer.echo(json.dumps({name: p.model_dump(include=fields) for name, p in PRESETS.items()},
                              indent=2, ensure_ascii=False))
        return
    print_table(("name", "what", "evidence", "when"),
                [(name, p.title, p.evidence, p.use) for name, p in PRESETS.items()])


@app.command()
def show(name: Annotated[str, typer.Argument(help="A preset (see `objective list`).")]) -> None:
    """Formula, choices, source and evidence of one preset."""
    from grpo_megatron.algorithms.catalogue import describe
    from grpo_megatron.config.loader import load_objective

    load_objective(name)  # refuses unknown names
    typer.echo(describe(name))


@app.command("eval")
def evaluate(
    arguments: Annotated[list[str], typer.Argument(
        metavar="[KEY=VALUE]... CASE.json", show_default=False,
        help="Changes to the preset, then the file with the samples.")],
    objective: Annotated[str, typer.Option("--objective", help="Preset to start from.")],
) -> None:
    """Loss, gradient, advantages and metrics of a batch in a file, in float64."""
    from grpo_megatron.algorithms.case import read_case
    from grpo_megatron.algorithms.evaluate import evaluate_case
    from grpo_megatron.algorithms.objective import Objective
    from grpo_megatron.config.loader import load_objective
    from grpo_megatron.errors import ConfigError

    files = [text for text in arguments if "=" not in text]
    if len(files) != 1:
        raise ConfigError(f"{len(files)} case files given, exactly one is needed",
                          where="command line", remedy="end with the path of a CASE.json")
    load_objective(objective)
    case = read_case(Path(files[0]))
    config, own = load_objective(objective, [t for t in arguments if "=" in t], case.domains)
    typer.echo(json.dumps(evaluate_case(Objective(config, case.domains, own), case)))
