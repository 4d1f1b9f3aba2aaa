"""Rehearse a graph: the same stages, each with its recipe scaled down, run one after the other."""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from grpo_megatron import assets
from grpo_megatron.config.problems import as_toml
from grpo_megatron.config.run import RunConfig
from grpo_megatron.config.suggest import nearest
from grpo_megatron.config.toml_file import find_recipe, read_toml
from grpo_megatron.errors import ConfigError, GrpoMegatronError
from grpo_megatron.files import write_atomically
from grpo_megatron.launch.bindings import (
    refuse_unbound_objective,
    refuse_unbound_rewards,
)
from grpo_megatron.rehearsal.evidence import Finding, at_cluster_scale, of_judges, of_run
from grpo_megatron.rehearsal.local_server import LocalServer
from grpo_megatron.rehearsal.made_up_rows import (
    refuse_unbound_environments_here,
    special_tokens_of,
)
from grpo_megatron.rehearsal.rehearse import (
    Rehearsal,
    Say,
    as_line,
    conclude,
    start_teachers,
    table_of,
    take_folder,
    write_site,
)
from grpo_megatron.rehearsal.scale_down import Change, num_layers_of, scale_down
from grpo_megatron.rehearsal.stand_ins import StandInWriter
from grpo_megatron.rehearsal.teacher_servers import TeacherServers
from grpo_megatron.stages.graph import Graph, Source
from grpo_megatron.stages.loading import load_graph
from grpo_megatron.stages.runner import run_graph

_NUM_STEPS = 2
"""Of every stage: what builds on it only needs that it trained."""


def is_graph(target: str) -> bool:
    """Whether `target` names a graph of stages, a file or a shipped one, and no recipe."""
    if not target.endswith(".toml"):
        return target in assets.names(assets.root() / "recipes" / "graphs")
    path = Path(target)
    return path.is_file() and "stages" in read_toml(path).values


def refuse_unknown(target: str) -> None:
    """Raise ConfigError, with the nearest recipes and graphs, where `target` is neither."""
    if is_graph(target):
        return
    shipped = assets.root() / "recipes"
    try:
        find_recipe(target, shipped)
    except ConfigError as error:
        labels = {Path(name).name: name for name in assets.names(shipped)}
        for name in assets.names(shipped / "graphs"):
            labels[name] = f"{name} (a graph)"
        wanted = Path(target).name.removesuffix(".toml")
        close = [labels[name] for name in nearest(wanted, labels)] or list(labels.values())
        raise ConfigError(
            f"no recipe or graph at {target!r}",
            where=error.where,
            remedy="give a .toml file or the name of a shipped one: " + ", ".join(close[:5]),
        ) from None


def rehearse_graph(
    target: str,
    overrides: Sequence[str],
    *,
    model: Path | None = None,
    folder: Path | None = None,
    site: str | None = None,
    say: Say = print,
) -> Rehearsal:
    """Run every stage of the graph for two steps, each from what its parents really made.

    Arguments and errors as of `rehearse_recipe`; `overrides` go to all stages. Gates are read, not
    held: a random model passes none."""
    started = time.monotonic()
    graph = _with_settings(load_graph(target), overrides)
    if folder is None:
        folder = graph.table.runs_dir / "rehearsal" / graph.table.name
    take_folder(folder)
    if site is None:
        site = write_site(folder / "inputs" / "site.env")
    findings = _at_scale(graph, site)
    for finding in findings:
        say(as_line(finding))
    with LocalServer() as server, TeacherServers(folder / "inputs") as teachers:
        changes = _changes(graph, folder / "inputs", model, server.url, teachers)
        for line in table_of([_named(name, change) for name, change in changes]):
            say(line)
        scaled = load_graph(_write_graph(folder, graph, changes))
        start_teachers(teachers, _configs(scaled).values(), say)
        code = run_graph(scaled, lambda text: say(f"--- {text}"))
        if code:
            error = GrpoMegatronError(
                "a stage of the rehearsal failed",
                where=str(folder),
                remedy="what it said is above; on the cluster it would have ended like this",
            )
            error.exit_code = code
            raise error
        shown = _of_stages(scaled)
        shown += of_judges(_configs(scaled).values(), server.num_judged)
    for finding in shown:
        say(as_line(finding))
    seconds = time.monotonic() - started
    named = [_named(name, change) for name, change in changes]
    return conclude(Rehearsal(target, named, [*findings, *shown], seconds), folder)


def _with_settings(graph: Graph, overrides: Sequence[str]) -> Graph:
    settings = (*graph.table.settings, *overrides)
    return Graph(graph.file, graph.table.model_copy(update={"settings": settings}))


def _configs(graph: Graph) -> dict[str, RunConfig]:
    """Return the configurations of the stages that are runs, by name, in the order of the graph."""
    configs = {}
    for name in graph.order:
        if graph.table.stages[name].recipe is not None:
            configs[name] = graph.resolve(name).config
    return configs


def _at_scale(graph: Graph, site: str) -> list[Finding]:
    """Return findings about all stages, one for each thing that was looked at."""
    by_what: dict[str, list[Finding]] = {}
    for name in graph.order:
        if graph.table.stages[name].recipe is None:
            continue
        resolved = graph.resolve(name)
        refuse_unbound_objective(resolved.config)
        refuse_unbound_rewards(resolved.config)
        refuse_unbound_environments_here(resolved.config)
        first = graph.resolve(_root_of(graph, name)).config.model  # others are not there yet
        config = resolved.config.model_copy(update={"model": first})
        for finding in at_cluster_scale(resolved.model_copy(update={"config": config}), site):
            detail = f"{name}: {finding.detail}"
            by_what.setdefault(finding.what, []).append(replace(finding, detail=detail))
    merged = []
    for what, findings in by_what.items():
        wrong = [finding for finding in findings if not finding.holds]
        detail = f"{len(findings)} stages"
        if wrong:
            detail = "; ".join(finding.detail for finding in wrong)
        merged.append(Finding(what, not wrong, detail))
    return merged


def _changes(
    graph: Graph, inputs: Path, model: Path | None, server: str, teachers: TeacherServers
) -> list[tuple[str, Change]]:
    """Changes of all stages, with the stage's name. What comes from another stage is not changed.

    Stages share tiny models and made-up rows."""
    configs = _configs(graph)
    special_tokens: list[str] = []
    num_layers = []
    for config in configs.values():
        special_tokens += special_tokens_of(config)
        num_layers.append(num_layers_of(config.trainer))
    in_fp8 = any(config.rollout.fp8 != "none" for config in configs.values())
    writer = StandInWriter(
        inputs,
        server,
        teachers,
        max(num_layers),
        special_tokens,
        given_model=model,
        fills_blocks=in_fp8,
    )
    found = []
    for name, config in configs.items():
        root = configs[_root_of(graph, name)]
        given = set(graph.table.stages[name].inputs)
        if "model.path" in given:
            given.add("model.preset")
        for change in scale_down(config, writer.write(config, root)):
            if change.key == "num_steps":
                change = replace(change, after=_NUM_STEPS, why="two steps, a checkpoint")
            if change.key == "checkpoint.interval":
                change = replace(change, after=_NUM_STEPS, why="two steps, a checkpoint")
            if change.key not in given:
                found.append((name, change))
    return found


def _root_of(graph: Graph, name: str) -> str:
    """Return the run whose `model` the checkpoint of stage `name` descends from."""
    stage = graph.table.stages[name]
    parent = stage.inputs.get("model.path") or next(iter(stage.parts), None)
    if parent is None:
        return name
    return _root_of(graph, Source.parse(parent).stage)


def _named(stage: str, change: Change) -> Change:
    return replace(change, key=f"{stage}: {change.key}")


def _write_graph(folder: Path, graph: Graph, changes: Sequence[tuple[str, Change]]) -> Path:
    """Write the graph with the changes of each stage after its own settings, without gates."""
    lines = [
        f"name = {json.dumps('run')}",
        f"runs_dir = {json.dumps(str(folder.absolute()))}",
    ]
    for name in graph.order:
        stage = graph.table.stages[name]
        lines.append(f"[stages.{json.dumps(name)}]")
        if stage.recipe is None:
            lines += _table(stage.model_dump(exclude_defaults=True, exclude={"gates"}))
            continue
        recipe, *_ = graph.recipe_arguments(name)
        own = [change.override for stage_name, change in changes if stage_name == name]
        settings = [*graph.table.settings, *stage.settings, *own]
        table: dict[str, Any] = {"recipe": str(Path(recipe).absolute()), "settings": settings}
        lines += _table(table | {"inputs": stage.inputs})
    path = folder / "graph.toml"
    write_atomically(path, "\n".join(lines) + "\n")
    return path


def _table(values: Mapping[str, Any]) -> list[str]:
    """Return lines of a TOML table; keys of inner tables are quoted, since they have dots."""
    lines = []
    for key, value in values.items():
        if isinstance(value, dict):
            inner = [f"{json.dumps(name)} = {as_toml(item)}" for name, item in value.items()]
            lines.append(f"{key} = {{ {', '.join(inner)} }}")
        else:
            lines.append(f"{key} = {as_toml(value)}")
    return lines


def _of_stages(graph: Graph) -> list[Finding]:
    """Return what each stage's run shows, named by the stage."""
    shown = []
    for name, config in _configs(graph).items():
        for finding in of_run(config, graph.run_dir(name), num_attempts=1):
            shown.append(replace(finding, what=f"{name}: {finding.what}"))
    return shown
