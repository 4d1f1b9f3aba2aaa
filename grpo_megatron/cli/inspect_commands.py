"""`config`, `objective`, `plan`: recipes and objectives looked at; nothing is started."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from grpo_megatron.cli.run_commands import Overrides, flag, print_advice
from grpo_megatron.errors import ConfigError
from grpo_megatron.plan.devices import DEFAULT_DEVICE, DEVICES

MOST_SEARCHED = 16384
"""GPUs whose layouts are tried, which takes about a minute."""
config_app = typer.Typer(no_args_is_help=True, help="Look at resolved configurations.")
objective_app = typer.Typer(
    no_args_is_help=True, help="The objectives: what they are, what they compute."
)
Json = Annotated[bool, typer.Option("--json", help="Machine-readable.")]
Source = Annotated[str, typer.Argument(help="Recipe or run directory.")]


@config_app.command()
def show(recipe: Source, overrides: Overrides = None, as_json: Json = False) -> None:
    """Every value of a recipe or a run, and where it comes from."""
    from grpo_megatron.config.keys import dotted, leaves
    from grpo_megatron.config.loader import to_json
    from grpo_megatron.config.overlay import DEFAULT
    from grpo_megatron.config.problems import as_toml

    resolved = resolve_any(recipe, overrides or [])
    print_advice(resolved.config)
    if as_json:
        typer.echo(to_json(resolved), nl=False)
        return
    rows = []
    for path, value in leaves(resolved.config.model_dump(mode="json")):
        key = dotted(path)
        # a setting that is younger than the run has its default
        rows.append((key, as_toml(value), str(resolved.provenance.get(key, DEFAULT))))
    print_table(("key", "value", "set at"), rows, dim="default")


@config_app.command()
def schema() -> None:
    """JSON schema of a recipe, for editors."""
    from grpo_megatron.config.schema import json_schema

    typer.echo(json.dumps(json_schema(), indent=2))


def resolve_any(source: str, overrides: list[str]) -> Any:
    """The ResolvedConfig of a run directory or its config.json, of anything else as a recipe."""
    from grpo_megatron.plan.resolve import resolve, resolve_run

    path = Path(source)
    is_run = path.is_dir() or path.suffix == ".json"
    if is_run:
        return resolve_run(path, overrides)
    return resolve(source, overrides)


@objective_app.command("list")
def list_objectives(as_json: Json = False) -> None:
    """All presets, with evidence grade and use."""
    from grpo_megatron.config.objective import PRESETS

    if as_json:
        shown = {"title", "source", "use", "evidence", "not_trained"}
        values = {name: preset.model_dump(include=shown) for name, preset in PRESETS.items()}
        typer.echo(json.dumps(values, indent=2, ensure_ascii=False))
        return
    rows = []
    for name, preset in PRESETS.items():
        when = preset.use
        if preset.not_trained:
            when += f"; training refuses it {preset.not_trained}"
        rows.append((name, preset.title, preset.evidence, when))
    print_table(("name", "what", "evidence", "when"), rows)


@objective_app.command("show")
def show_objective(
    name: Annotated[str, typer.Argument(help="A preset (see `objective list`).")],
) -> None:
    """Formula, choices, source and evidence of one preset."""
    from grpo_megatron.algorithms.catalogue import describe
    from grpo_megatron.config.loader import load_objective

    load_objective(name)  # refuses unknown names
    typer.echo(describe(name))


@objective_app.command("eval")
def evaluate(
    arguments: Annotated[
        list[str],
        typer.Argument(
            metavar="[KEY=VALUE]... CASE.json",
            show_default=False,
            help="Changes to the preset, then the file with the samples.",
        ),
    ],
    objective: Annotated[str, flag("objective", "Preset to start from.")],
) -> None:
    """Loss, gradient, advantages and metrics of a batch in a file, in float64."""
    from grpo_megatron.algorithms.case import read_case
    from grpo_megatron.algorithms.evaluate import evaluate_case
    from grpo_megatron.algorithms.objective import Objective
    from grpo_megatron.config.loader import load_objective

    files = [text for text in arguments if "=" not in text]
    if len(files) != 1:
        raise ConfigError(
            f"{len(files)} case files given, exactly one is needed",
            where="command line",
            remedy="end with the path of a CASE.json",
        )
    load_objective(objective)
    case = read_case(Path(files[0]))
    config, own = load_objective(objective, [t for t in arguments if "=" in t], case.domains)
    objective_of_case = Objective(config, case.domains, own, case.state)
    typer.echo(json.dumps(evaluate_case(objective_of_case, case)))


Search = Annotated[
    str | None,
    typer.Option(
        "--search",
        metavar="NODESxGPUS",
        help="Split nodes between training and generation by predicted time; rank trainer "
        "layouts of one node, or of GPUs that both share.",
    ),
]
Device = Annotated[str, typer.Option(help="GPU, for example h200.")]
CompareWith = Annotated[
    str | None,
    typer.Option(
        "--compare",
        metavar="ppo",
        help="Memory of PPO's models beside GRPO's; also of a model preset, 7b, 13b or 70b.",
    ),
]
Trace = Annotated[
    bool,
    flag("trace", "Run the trainer's own step at real sizes without memory, and compare; minutes."),
]
LengthsFile = Annotated[
    str | None,
    typer.Option(
        "--lengths",
        metavar="FILE",
        help="Lengths for the predicted time: a line a sample, tokens of its answer, or of "
        "prompt and answer.",
    ),
]
AnswerTokens = Annotated[
    float | None,
    typer.Option(help="Mean tokens of an answer; lengths are log-normal around it."),
]
PromptTokens = Annotated[float | None, typer.Option(help="Mean tokens of a prompt.")]
Constants = Annotated[
    list[str] | None,
    typer.Option(
        "--constant",
        metavar="NAME=VALUE",
        help="A constant of the predicted time as measured by you; --json lists them.",
    ),
]


def plan(
    recipe: Source,
    overrides: Overrides = None,
    search: Search = None,
    device: Device = DEFAULT_DEVICE,
    compare: CompareWith = None,
    trace: Trace = False,
    lengths: LengthsFile = None,
    answer_tokens: AnswerTokens = None,
    prompt_tokens: PromptTokens = None,
    constant: Constants = None,
    as_json: Json = False,
) -> None:
    """Memory by component, predicted seconds by phase, tokens per second, MFU, cost, bubble, bytes;
    an error if the recipe does not fit."""
    of_prediction = {
        "--device": device if device != DEFAULT_DEVICE else None,
        "--lengths": lengths,
        "--answer-tokens": answer_tokens,
        "--prompt-tokens": prompt_tokens,
        "--constant": constant,
    }
    if trace:
        _refuse("--trace", {"--search": search, "--compare": compare, **of_prediction})
        _trace(recipe, overrides or [], as_json)
    if compare is not None:
        _refuse("--compare", {"--search": search, **of_prediction})
        _compare(recipe, overrides or [], compare, as_json)
        return
    from grpo_megatron.cli.predict_plan import Predictor

    _refuse_unknown_device(device)
    config = resolve_any(recipe, overrides or []).config
    print_advice(config)
    predictor = Predictor(
        config,
        device,
        lengths_file=lengths,
        answer_tokens=answer_tokens,
        prompt_tokens=prompt_tokens,
        constants=constant or [],
    )
    if search:
        _search(config, search, predictor, as_json)
        return
    _print_plan(recipe, config, predictor, device, as_json)


def _refuse_unknown_device(device: str) -> None:
    from grpo_megatron.config.suggest import did_you_mean

    if device not in DEVICES["memory"]:
        raise ConfigError(
            f"no device is called {device!r}",
            where="--device",
            remedy=did_you_mean(device, DEVICES["memory"]),
        )


def _print_plan(recipe: str, config: Any, predictor: Any, device: str, as_json: bool) -> None:
    """Print the plan of a recipe. Raises ConfigError, after that, where the recipe does not fit."""
    from grpo_megatron.cli.predict_plan import print_prediction
    from grpo_megatron.plan.memory import plan_of

    found = plan_of(config, device)
    if as_json:
        publish = None
        if found.publish is not None:
            publish = {**asdict(found.publish), "seconds": found.publish.seconds}
        values = {**asdict(found), "publish": publish, "worst": asdict(found.worst)}
        values["time"] = predictor.as_json(config, found)
        typer.echo(json.dumps(values, indent=2))
    else:
        _print(found)
        print_prediction(predictor(config, found))
    _require_memory(recipe, config, found, device)


def _require_memory(recipe: str, config: Any, found: Any, device: str) -> None:
    """Raise ConfigError where the recipe does not fit, with layouts that do."""
    from grpo_megatron.plan import search as layouts
    from grpo_megatron.plan.memory import memory_problems

    problems = memory_problems(config, found)
    if not problems:
        return
    remedies = [problem.remedy for problem in problems]
    if problems[0].rule == "trainer_memory":
        placement = config.placement
        nodes = placement.trainer_nodes
        for row in layouts.search(config, nodes, placement.gpus_per_node, device)[:2]:
            remedies.append(f"fits: {row['settings']}")
    raise ConfigError(
        "\n  ".join(f"{p.key} = {p.value}: {p.message}" for p in problems),
        where=recipe,
        remedy="\n".join(remedies),
    )


def _refuse(mode: str, others: Mapping[str, object]) -> None:
    """Raise ConfigError for options that have no effect with `mode`."""
    given = [name for name, value in others.items() if value]
    if given:
        names = ", ".join(given)
        raise ConfigError(
            f"{mode} and {names} exclude each other",
            where="command line",
            remedy=f"leave out {names}",
        )


def _trace(source: str, overrides: list[str], as_json: bool) -> NoReturn:
    from grpo_megatron.cli.trace_plan import trace

    raise typer.Exit(trace(source, overrides, as_json=as_json))


def _compare(source: str, overrides: list[str], other: str, as_json: bool) -> None:
    from grpo_megatron.cli.compare_plan import compare

    if other != "ppo":
        raise ConfigError(
            f"GRPO can be compared with ppo, not with {other!r}",
            where="--compare",
            remedy="--compare ppo",
        )
    compare(source, overrides, as_json=as_json)


def _print(found: Any) -> None:
    rows = []
    for rank in found.stages:
        parts = [format_size(num_bytes) for num_bytes in rank.parts.values()]
        rows.append((str(rank.stage), str(rank.rank), *parts, format_size(rank.total)))
    print_table(("stage", "rank", *found.worst.parts, "total"), rows, labelled=True)
    usable = "not known"
    if found.usable_bytes is not None:
        usable = format_size(found.usable_bytes)
    engine = []
    for name, number in found.engine.items():
        size = format_size(number)
        if name == "kv_tokens":
            size = str(number)
        engine.append(f"{name} {size}")
    lines = {
        "fullest rank": f"{found.worst.rank}: {format_size(found.worst.total)}, usable: {usable}",
    }
    if engine:
        lines["engine"] = ", ".join(engine)
    for name, number in found.numbers.items():
        words = name.removesuffix("_bytes").replace("_", " ")
        lines[words] = _number(name, number)
    if found.usable_bytes is not None and found.publish is not None:
        lines["publish over the links"] = _publish(found.publish)
    typer.echo()
    print_table(("what", ""), list(lines.items()))


def _publish(found: Any) -> str:
    """The arithmetic of `plan.publishing`, for a person."""
    behind = f"(1 + {found.num_replicas - 1} replicas behind / {found.num_buckets} buckets)"
    return (
        f"{format_size(found.worker_bytes)} / {found.link_bytes_per_s / 1e9:.0f} GB/s * {behind} = "
        f"{found.seconds:.1f} s; a trainer rank sends {format_size(found.sender_bytes)}"
    )


def _number(name: str, number: float) -> str:
    if name.endswith("_bytes"):
        return format_size(number)
    if isinstance(number, float):  # a share
        return f"{number:.1%}"
    return f"{number:,}"


def format_size(num_bytes: float) -> str:
    """Write a size in GiB or MiB."""
    if num_bytes >= 2**30:
        return f"{num_bytes / 2**30:.1f} GiB"
    return f"{num_bytes / 2**20:.1f} MiB"


def _search(config: Any, text: str, predictor: Any, as_json: bool) -> None:
    from grpo_megatron.cli.predict_plan import search

    shape = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", text)
    if shape is None:
        raise ConfigError(
            f"{text!r} is not NODESxGPUS", where="--search", remedy="for example --search 16x8"
        )
    nodes = int(shape[1])
    gpus_per_node = int(shape[2])
    if nodes * gpus_per_node > MOST_SEARCHED:
        most_nodes = max(MOST_SEARCHED // gpus_per_node, 1)
        raise ConfigError(
            f"{text} is more than {MOST_SEARCHED} GPUs, of which layouts are tried",
            where="--search",
            remedy=f"for example --search {most_nodes}x{min(gpus_per_node, MOST_SEARCHED)}",
        )
    search(config, nodes, gpus_per_node, predictor, as_json=as_json)


def print_table(
    header: tuple[str, ...],
    rows: Sequence[tuple[str, ...]],
    *,
    dim: str = "",
    labelled: bool = False,
) -> None:
    """A table on a terminal; elsewhere tab-separated lines, with a header where `labelled`."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    if not console.is_terminal:
        if labelled:
            typer.echo("\t".join(header))
        for row in rows:
            typer.echo("\t".join(row))
        return
    table = Table(*header, box=None, pad_edge=False, header_style="bold")
    for row in rows:
        style = None
        if dim and row[-1] == dim:
            style = "dim"
        table.add_row(*(Text(cell) for cell in row), style=style)
    console.print(table)
