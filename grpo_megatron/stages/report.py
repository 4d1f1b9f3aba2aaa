"""`grpo-megatron report`: what a run, or every stage of a graph, has written, on one page."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import jinja2
import numpy as np

from grpo_megatron.algorithms.advantages.pipeline import advantages_of, needed_columns
from grpo_megatron.batching.store import SampleTable
from grpo_megatron.config.loader import read_resolved
from grpo_megatron.config.objective import ObjectiveConfig
from grpo_megatron.config.run import RunConfig
from grpo_megatron.data.tokenizer import load_tokenizer
from grpo_megatron.errors import ConfigError, GrpoMegatronError, raised_as
from grpo_megatron.files import write_atomically
from grpo_megatron.plan.memory import plan_of
from grpo_megatron.rundir import RunDir
from grpo_megatron.stages.graph import Graph, load_graph
from grpo_megatron.stages.records import Records, State
from grpo_megatron.telemetry.events import read_events
from grpo_megatron.telemetry.metrics import read_metrics
from grpo_megatron.trainer.steps.recorded_batch import objective_of, sample_batch

CURVE_POINTS, NEWEST_STEPS, SHOWN_TOKENS = 1000, 3, 512
_ASSETS = jinja2.Environment(
    autoescape=True,
    undefined=jinja2.StrictUndefined,
    loader=jinja2.PackageLoader(__package__, "report_assets"),
)


def write_report(target: str, to: Path | None = None) -> Path:
    """One page without references to others, of a run directory, or of a graph's file or name."""
    graph = None if RunDir(Path(target)).config.is_file() else load_graph(target)
    root = graph.root if graph else Path(target)
    runs = [*map(graph.run_dir, graph.order)] if graph else [RunDir(root)]
    report = {
        "graph": graph and _stages(graph),
        "levels": graph and graph.levels(),
        "runs": [_run(run_dir) for run_dir in runs if run_dir.config.exists()],
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
    records = Records(graph)
    found = {}
    for name, stage in graph.table.stages.items():
        state = records.state(name)
        closed = records.closed_gates(name) if state in (State.DONE, State.GATED) else []
        found[name] = {
            "kind": graph.kind(name),
            "state": state,
            "parents": stage.parents,
            "gates": graph.gates(name),
            "closed": closed,
            "result": records.result(name),
        }
    return found


def _run(run_dir: RunDir) -> dict[str, Any]:
    """`metrics`: columns, "" where a step lacks one; at most about CURVE_POINTS steps."""
    config = read_resolved(run_dir.config).config
    notes: list[str] = []
    steps = read_metrics(run_dir.metrics) if run_dir.metrics.exists() else []
    every = len(steps) // CURVE_POINTS + 1
    rows = [
        step
        for left, step in enumerate(reversed(steps))
        if left % every == 0 or "evaluation/accuracy" in step
    ][::-1]
    found = {
        "name": run_dir.root.resolve().name,
        "config": config.model_dump(mode="json"),
        "result": json.loads(run_dir.result.read_text()) if run_dir.result.exists() else {},
        "events": [event["kind"] for event in read_events(run_dir.events)],
        "metrics": {
            name: [row.get(name, "") for row in rows]
            for name in dict.fromkeys(name for row in rows for name in row)
        },
        "every": every,
        "notes": notes,
        "samples": [
            json.loads(line)
            for file in sorted(run_dir.samples.glob("step_*.jsonl"))[-NEWEST_STEPS:]
            for line in file.read_text().splitlines()
        ],
    }
    for part, make in (
        ("recorded", lambda: _recorded(config, run_dir)),
        ("memory", lambda: plan_of(config, worst_only=True).worst.parts),
    ):
        try:
            found[part] = make()
        except (GrpoMegatronError, OSError) as error:
            notes.append(f"{part}: {str(error).splitlines()[0]}")
    return found


def _recorded(config: RunConfig, run_dir: RunDir) -> list[dict[str, Any]]:
    """The newest steps in the store: (domain, rewards) of groups, extreme samples with `tokens`
    (id, text, advantage). `lacks`: columns only the trainer has; plain GRPO does without them."""
    path = config.model.path or run_dir.model  # without a tokenizer ids are shown
    decode = load_tokenizer(path).decode if (path / "tokenizer.json").exists() else "".format
    found = []
    weighs_kl = objective_of(config, {}).weighs_kl
    lacks = {*needed_columns(config.objective, weighs_kl=weighs_kl)}
    if config.objective.subset == "adaptive":
        lacks.add("success of earlier steps")
    if lacks:
        config = config.model_copy(update={"objective": ObjectiveConfig(preset="grpo")})
    stored = sorted(run_dir.store.glob("step_*/manifest.json")) if config.kind == "rl" else []
    for table in (SampleTable(file.parent, verify=False) for file in stored[-NEWEST_STEPS:]):
        batch = sample_batch(config, table)
        samples = []
        advantages = advantages_of(objective_of(config, {}), batch)
        tokens = advantages.values if advantages.per_token else batch.spread(advantages.values)
        rows = [(table.group == group).nonzero()[0] for group in np.unique(table.group)]
        for sample in (s for s in table.manifest.extremes if "index" in s):
            row = rows[sample["group"]][sample["index"]]
            ids = table.completion(row)[0][:SHOWN_TOKENS].tolist()
            texts = [decode(ids[:end]).rstrip("\ufffd") for end in range(len(ids) + 1)]
            pieces = [text[len(before) :] for before, text in pairwise(texts)]
            own = tokens[batch.offsets[row] :][: len(ids)].tolist()
            samples.append({**sample, "tokens": [*zip(ids, pieces, own, strict=True)]})
        found.append(
            {
                "step": table.manifest.step,
                "lacks": sorted(lacks),
                "samples": samples,
                "groups": [(int(table.domain[row[0]]), table.reward[row].tolist()) for row in rows],
            }
        )
    return found
