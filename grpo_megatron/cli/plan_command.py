"""`plan`: what a recipe needs, before a GPU hour is spent."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from grpo_megatron.cli.config_commands import Json, print_table, resolve_any
from grpo_megatron.cli.run_commands import Overrides

if TYPE_CHECKING:
    from grpo_megatron.config.run import RunConfig
    from grpo_megatron.plan.memory import Plan


def plan(
    recipe: Annotated[str, typer.Argument(help="Recipe or run directory.")],
    overrides: Overrides = None,
    search: Annotated[str | None, typer.Option(
        "--search", metavar="NODESxGPUS", help="Rank trainer layouts that fit.")] = None,
    device: Annotated[str, typer.Option("--device", help="GPU, for example h200.")] = "h100-80g",
    as_json: Json = False,
) -> None:
    """Memory by component, bubble, tokens, bytes; an error if the recipe does not fit."""
    from grpo_megatron.config.suggest import did_you_mean
    from grpo_megatron.errors import ConfigError
    from grpo_megatron.plan import search as layouts
    from grpo_megatron.plan.memory import DEVICES, memory_problems, plan_of

    if device not in DEVICES["memory"]:
        raise ConfigError(f"no device is called {device!r}", where="--device",
                          remedy=did_you_mean(device, DEVICES["memory"]))
    config = resolve_any(recipe, overrides or []).config
    if search:
        _search(config, search, device, as_json)
        return
    found = plan_of(config, device)
    if as_json:
        typer.echo(json.dumps({**asdict(found), "worst": asdict(found.worst)}, indent=2))
    else:
        _print(found)
    if problems := memory_problems(config, found):
        nodes, ranks = config.placement.trainer_nodes, config.trainer.num_ranks
        fits = [f"fits: {row['settings']}" for row in layouts.search(
            config, nodes, ranks // nodes, device)[:2] if problems[0].rule == "trainer_memory"]
        raise ConfigError(
            "\n".join(f"{p.key} = {p.value}: {p.message}" for p in problems), where=recipe,
            remedy="\n".join([*(p.remedy for p in problems), *fits]))


def _print(found: Plan) -> None:
    rows = [(str(rank.stage), str(rank.rank), *map(_size, rank.parts.values()), _size(rank.total))
            for rank in found.stages]
    print_table(("stage", "rank", *found.worst.parts, "total"), rows, labelled=True)
    usable = _size(found.usable_bytes) if found.usable_bytes is not None else "not known"
    lines = {"fullest rank": f"{found.worst.rank}: {_size(found.worst.total)}, usable: {usable}",
             "engine": ", ".join(f"{name} {n if name == 'kv_tokens' else _size(n)}"
                                 for name, n in found.engine.items())}
    for name, n in found.numbers.items():
        words = name.removesuffix("_bytes").replace("_", " ")
        lines[words] = _size(n) if name.endswith("_bytes") else (
            f"{n:.1%}" if isinstance(n, float) else f"{n:,}")
    typer.echo()
    print_table(("what", ""), list(lines.items()))


def _size(num_bytes: float) -> str:
    unit, name = (2**30, "GiB") if num_bytes >= 2**30 else (2**20, "MiB")
    return f"{num_bytes / unit:.1f} {name}"


def _search(config: RunConfig, text: str, device: str, as_json: bool) -> None:
    from grpo_megatron.errors import ConfigError
    from grpo_megatron.plan.search import search

    if not (shape := re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", text)):
        raise ConfigError(f"{text!r} is not NODESxGPUS", where="--search",
                          remedy="for example --search 16x8")
    rows = search(config, int(shape[1]), int(shape[2]), device)[:10]
    if not rows:
        raise ConfigError(f"no layout of {text} fits", where="--search",
                          remedy="more nodes, or fewer trainer.max_tokens_per_microbatch")
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
        return
    print_table(("cost", "memory", "bubble", "settings"), [
        (f"{row['cost']:.2f}", _size(row["bytes"]), f"{row['bubble_fraction']:.1%}",
         row["settings"] or "as in the recipe") for row in rows], labelled=True)
