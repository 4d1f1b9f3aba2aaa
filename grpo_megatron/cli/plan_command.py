"""`plan`: what a recipe needs, before a GPU hour is spent."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from grpo_megatron.cli.config_commands import Json, print_table
from grpo_megatron.cli.run_commands import Overrides

if TYPE_CHECKING:
    from grpo_megatron.plan.memory import Plan

_NUM_SHOWN = 10


def plan(
    recipe: Annotated[str, typer.Argument(help="Recipe or run directory.")],
    overrides: Overrides = None,
    search: Annotated[str | None, typer.Option(
        "--search", metavar="NODESxGPUS",
        help="Rank trainer layouts that fit, for example 16x8.")] = None,
    device: Annotated[str, typer.Option("--device", help="GPU, for example h200.")] = "h100-80g",
    as_json: Json = False,
) -> None:
    """Memory by component, bubble, tokens, bytes; exit code 2 if the recipe does not fit."""
    from grpo_megatron.cli.config_commands import resolve_any
    from grpo_megatron.config.suggest import did_you_mean
    from grpo_megatron.errors import ConfigError
    from grpo_megatron.plan.memory import device_table, memory_problems, plan_of

    known = list(device_table()["memory"])
    if device not in known:
        raise ConfigError(f"no device is called {device!r}", where="--device",
                          remedy=did_you_mean(device, known))
    config = resolve_any(recipe, overrides or []).config
    if search:
        _search(config, search, device, as_json)
        return
    found = plan_of(config, device)
    problems = memory_problems(config, found)
    if as_json:
        typer.echo(json.dumps({
            **asdict(found), "worst": {**asdict(found.worst), "total": found.worst.total},
            "problems": list(map(asdict, problems))}, indent=2))
    else:
        _print(found)
    if problems:
        raise ConfigError(
            "the recipe does not fit\n" + "\n".join(
                f"  {p.key} = {p.value}: {p.message}" for p in problems), where=recipe,
            remedy="\n".join([p.remedy for p in problems] + _layouts_that_fit(config, device)))


def _size(num_bytes: float) -> str:
    unit, name = (2**30, "GiB") if num_bytes >= 2**30 else (2**20, "MiB")
    return f"{num_bytes / unit:.1f} {name}"


def _print(found: Plan) -> None:
    names = [name for name in asdict(found.worst) if name not in ("stage", "rank")]
    rows = [(str(s.stage), str(s.rank), *(_size(getattr(s, name)) for name in names), _size(s.total))
            for s in found.stages]
    print_table(("stage", "rank", *names, "total"), rows)
    engine, worst = found.engine, found.worst
    limit = f" of {_size(found.usable_bytes)} usable" if found.usable_bytes else ""
    facts = {
        "device": found.device,
        "fullest rank": f"{worst.rank} (stage {worst.stage}): {_size(worst.total)}{limit}",
        "engine": f"{_size(engine.weights)} weights, {_size(engine.kv_cache)} keys and values "
        f"= {engine.kv_tokens} tokens a server",
        "parameters": f"{found.num_parameters / 1e9:.2f} B",
        "micro-batches": f"{found.num_microbatches} a rank and update, at full length",
        "pipeline bubble": f"{found.bubble_fraction:.1%}",
        "tokens a step": f"at most {found.tokens_per_step}",
        "publish": f"{_size(found.publish_bytes)}",
        "checkpoint": f"{_size(found.checkpoint_bytes)} on disk",
        "sample store": f"at most {_size(found.sample_store_bytes)} a step",
        "references": f"{_size(found.reference_host_bytes)} of host memory a rank",
    }
    typer.echo()
    print_table(("what", "value"), list(facts.items()))


def _shape(text: str) -> tuple[int, int]:
    from grpo_megatron.errors import ConfigError

    if not (match := re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", text)):
        raise ConfigError(f"{text!r} is not NODESxGPUS", where="--search",
                          remedy="for example --search 16x8")
    return int(match[1]), int(match[2])


def _search(config: Any, text: str, device: str, as_json: bool) -> None:
    from grpo_megatron.errors import ConfigError
    from grpo_megatron.plan.search import search

    found = search(config, *_shape(text), device)
    if not found:
        raise ConfigError(f"no layout of {text} fits", where="--search",
                          remedy="more nodes, or a smaller trainer.max_tokens_per_microbatch")
    rows = [{"layout": c.settings(config.trainer), "memory_bytes": c.plan.worst.total, "cost": c.cost,
             "bubble_fraction": c.plan.bubble_fraction} for c in found[:_NUM_SHOWN]]
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
        return
    print_table(("cost", "memory", "bubble", "settings"), [
        (f"{row['cost']:.2f}", _size(row["memory_bytes"]), f"{row['bubble_fraction']:.1%}",
         " ".join(row["layout"]) or "as in the recipe") for row in rows])


def _layouts_that_fit(config: Any, device: str) -> list[str]:
    """The best layouts on as many ranks, as overrides."""
    from grpo_megatron.plan.search import search

    place = config.placement
    per_node = config.trainer.num_ranks // place.trainer_nodes
    found = search(config, place.trainer_nodes, per_node, device)[:2]
    return [f"fits: {' '.join(c.settings(config.trainer))}" for c in found]
