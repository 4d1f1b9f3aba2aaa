"""`grpo-megatron report`: what a run, or every stage of a graph, has written, on one page."""

import json
from pathlib import Path
from typing import Any

import jinja2

from grpo_megatron.errors import ConfigError, raised_as
from grpo_megatron.files import write_atomically
from grpo_megatron.rundir import RunDir
from grpo_megatron.stages.graph import Graph
from grpo_megatron.stages.loading import load_graph
from grpo_megatron.stages.records import Records, State
from grpo_megatron.stages.run_report import report_run

_ASSETS = jinja2.Environment(
    autoescape=True,
    undefined=jinja2.StrictUndefined,
    loader=jinja2.PackageLoader(__package__, "report_assets"),
)


def write_report(target: str, to: Path | None = None) -> Path:
    """Write one page without references to others, of a run directory, or of a graph's file or
    name, to `to`, by default beside what it shows; returns its path.

    Raises ConfigError: `target` is neither, the page cannot be written, or none is asked for
    elsewhere of a graph of which nothing has begun."""
    run_dir = RunDir(Path(target))
    graph = None
    runs = [run_dir]
    root = run_dir.root
    if not run_dir.config.is_file():
        graph = load_graph(target)
        runs = [graph.run_dir(name) for name in graph.order]
        root = graph.root
        if to is None and not root.exists():
            raise ConfigError(
                f"no stage of the graph has begun: there is no {root}",
                where=target,
                remedy="run it (`grpo-megatron stages run`), or see its plan with --to FILE.html",
            )
    report = {
        "graph": graph and _stages(graph),
        "levels": graph and graph.levels(),
        "runs": [report_run(run) for run in runs if run.config.exists()],
    }
    # what JSON lacks (NaN, infinities) becomes null
    finite = json.loads(json.dumps(report, default=str), parse_constant=lambda _: None)
    page = _ASSETS.get_template("page.html").render(
        title=root.resolve().name, data=json.dumps(finite).replace("<", "\\u003c")
    )
    file = to or root / "report.html"
    with raised_as(ConfigError, "cannot write the page", OSError, where=file):
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(file, page)
    return file


def _stages(graph: Graph) -> dict[str, Any]:
    """Return what the page shows of each stage, by name. changed: in what it differs from what it
    would be now; notes: what is to be known of one that counts as unchanged."""
    records = Records(graph)
    found = {}
    for name, stage in graph.table.stages.items():
        state = records.state(name)
        has_ended = state in (State.DONE, State.GATED)
        closed: list[str] = []
        if has_ended:
            closed = records.closed_gates(name)
        found[name] = {
            "kind": graph.kind(name),
            "state": state,
            "parents": stage.parents,
            "gates": graph.gates(name),
            "closed": closed,
            "result": records.result(name),
            "changed": records.changed_since(name),
            "notes": records.notes(name),
        }
    return found
