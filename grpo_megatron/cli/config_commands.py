"""`config show`, `config diff`, `config schema`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from grpo_megatron.cli.run_commands import Overrides

if TYPE_CHECKING:
    from grpo_megatron.config.resolved import ResolvedConfig

app = typer.Typer(no_args_is_help=True, help="Look at resolved configurations.")
Json = Annotated[bool, typer.Option("--json", help="Machine-readable.")]
Source = Annotated[str, typer.Argument(help="Recipe or run directory.")]


@app.command()
def show(recipe: Source, overrides: Overrides = None, as_json: Json = False) -> None:
    """Every value of a recipe or a run, and where it comes from."""
    from grpo_megatron.config.resolved import to_json

    resolved = resolve_any(recipe, overrides or [])
    if as_json:
        typer.echo(to_json(resolved), nl=False)
        return
    rows = [(key, value, str(resolved.provenance[key])) for key, value in _values(resolved).items()]
    print_table(("key", "value", "set at"), rows, dim="default")


@app.command()
def diff(first: Source, second: Source, as_json: Json = False) -> None:
    """Keys that differ between two recipes or runs, with both values and their origins."""
    left, right = resolve_any(first, []), resolve_any(second, [])
    before, after = _values(left), _values(right)
    keys = [key for key in dict.fromkeys((*before, *after)) if before.get(key) != after.get(key)]
    if as_json:
        typer.echo(json.dumps({key: {"first": before.get(key), "second": after.get(key)}
                               for key in keys}, indent=2))
    elif keys:
        print_table(("key", first, second), [
            (key, _cell(left, before, key), _cell(right, after, key)) for key in keys])
    else:
        typer.echo("no differences")


@app.command()
def schema() -> None:
    """JSON schema of a recipe, for editors."""
    from grpo_megatron.config.schema import json_schema

    typer.echo(json.dumps(json_schema(), indent=2))


def resolve_any(source: str, overrides: list[str]) -> ResolvedConfig:
    """A run directory or its config.json as stored, anything else as a recipe."""
    from grpo_megatron.plan.resolve import resolve, resolve_run

    path = Path(source)
    is_run = path.is_dir() or path.suffix == ".json"
    return resolve_run(path, overrides) if is_run else resolve(source, overrides)


def _values(resolved: ResolvedConfig) -> dict[str, str]:
    from grpo_megatron.config.keys import dotted, leaves
    from grpo_megatron.config.problems import as_toml

    tree: dict[str, Any] = resolved.config.model_dump(mode="json")
    return {dotted(path): as_toml(value) for path, value in leaves(tree)}


def _cell(resolved: ResolvedConfig, values: dict[str, str], key: str) -> str:
    return f"{values[key]}  ({resolved.provenance[key]})" if key in values else "absent"


def print_table(header: tuple[str, ...], rows: list[tuple[str, ...]], *, dim: str = "",
                labelled: bool = False) -> None:
    """A table on a terminal; elsewhere tab-separated lines, easy to grep and cut, without the
    header unless `labelled`."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    if not console.is_terminal:
        for row in [header] * labelled + rows:
            typer.echo("\t".join(row))
        return
    table = Table(*header, box=None, pad_edge=False, header_style="bold")
    for row in rows:
        table.add_row(*map(Text, row), style="dim" if row[-1] == dim else None)
    console.print(table)
