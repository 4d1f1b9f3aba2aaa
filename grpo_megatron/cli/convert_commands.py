"""`convert from-hf`, `convert to-hf`, `convert check`."""

import math
from pathlib import Path
from typing import Annotated, Any

import typer

from grpo_megatron.cli.run_commands import flag
from grpo_megatron.errors import ConfigError
from grpo_megatron.rundir import RunDir

app = typer.Typer(
    no_args_is_help=True, help="Hugging Face checkpoints to Megatron's and back; check either."
)
Source = Annotated[Path, typer.Argument(help="The checkpoint directory.", show_default=False)]
Layout = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="KEY=VALUE",
        show_default=False,
        help=(
            "Layout keys of \\[trainer]: where log-probs are compared; "
            "num_ranks processes share the work."
        ),
    ),
]

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")


@app.command()
def check(source: Source, layout: Layout = None) -> None:
    """Read every tensor: names, shapes, finite numbers, digests where they were recorded."""
    from grpo_megatron.launch.convert import convert

    values = _layout(layout, source)
    convert({"source": str(source), "target": None, "layout": values}, values["num_ranks"])
    typer.echo(f"{source} is whole")


@app.command(
    "from-hf", help="Make a checkpoint that Megatron loads at any layout (`model.path=…`)."
)
@app.command(
    "to-hf", help=("Make a Hugging Face checkpoint of a run's checkpoint or a converted one.")
)
def _convert(
    context: typer.Context,
    source: Source,
    to: Annotated[Path, flag("to", "Directory to make.")],
    layout: Layout = None,
    dtype: Annotated[
        str | None,
        flag("dtype", "float32, float16 or bfloat16; default: every tensor keeps its own."),
    ] = None,
    shard_gb: Annotated[float, flag("shard-gb", "Largest size of a file, in GB.")] = 5.0,
    domain: Annotated[
        str,
        flag(
            "domain",
            "Whose adapters are merged, of a run in which domains have adapters of their own.",
        ),
    ] = "",
    probe: Annotated[
        bool, typer.Option(help="Compare log-probs by Megatron and by transformers at the end.")
    ] = True,
    mtp: Annotated[
        bool,
        typer.Option(help="Carry multi-token-prediction layers along unchanged, or drop them."),
    ] = True,
) -> None:
    from grpo_megatron.launch.convert import convert

    if dtype not in (None, "float32", "float16", "bfloat16"):
        raise ConfigError(
            f"--dtype {dtype} is not a dtype of weights",
            where="command line",
            remedy="float32, float16 or bfloat16",
        )
    if not 0 < shard_gb < float("inf"):
        raise ConfigError(
            f"{shard_gb:g} GB", where="--shard-gb", remedy="a positive number, for example 5"
        )
    if domain and context.info_name == "from-hf":
        raise ConfigError(
            "a Hugging Face checkpoint has no adapters of domains",
            where="--domain",
            remedy="leave --domain away",
        )
    if to.exists():
        raise ConfigError(
            f"{to} exists", where="command line", remedy="remove it, or choose another --to"
        )
    values = _layout(layout, source)
    convert(
        {
            "source": str(source.absolute()),
            "target": str(to.absolute()),
            "dtype": dtype,
            "to": {"from-hf": "megatron", "to-hf": "hf"}[str(context.info_name)],
            "layout": values,
            "shard_bytes": int(shard_gb * 1e9),
            "probe": probe,
            "carry": mtp,
            "domain": domain,
        },
        values["num_ranks"],
    )
    if not any((source / name).exists() for name in _TOKENIZER_FILES):
        typer.echo(f"warning: {source} has no tokenizer, so {to} has none", err=True)
    typer.echo(f"{to} was read back and is what {source} says")


def _layout(overrides: list[str] | None, source: Path) -> dict[str, Any]:
    """The `[trainer]` values that were given and `num_ranks`; what the model forbids is refused."""
    from pydantic import ValidationError

    from grpo_megatron.config.run import ModelConfig
    from grpo_megatron.config.trainer import TrainerConfig, refuse_other_than_layout
    from grpo_megatron.plan.layout import refuse_layout
    from grpo_megatron.plan.model_facts import model_facts

    _refuse_run(source)
    values: dict[str, Any] = {}
    for text in overrides or ():
        key, _, value = text.removeprefix("trainer.").partition("=")
        refuse_other_than_layout(key, where="command line")
        values[key] = value
    try:
        layout = TrainerConfig.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        raise ConfigError(f"{first['loc'][0]}: {first['msg']}", where="command line") from error
    if "num_ranks" not in values:
        layout = layout.model_copy(
            update={"num_ranks": math.lcm(layout.attention_ranks, layout.expert_ranks)}
        )
    refuse_layout(layout, model_facts(ModelConfig(path=source)))
    return layout.model_dump(include={*values, "num_ranks"})


def _refuse_run(source: Path) -> None:
    """Raise ConfigError for a run's directory, whose config.json is none of a model."""
    from grpo_megatron.checkpoints.retention import complete_steps

    run = RunDir(source)
    if not run.has_run:
        return
    remedy = "let it train until it has a checkpoint"
    steps = complete_steps(run.checkpoints)
    if steps:
        remedy = f"give one of its checkpoints: {run.step_checkpoint(steps[-1])}"
    raise ConfigError(f"{source} is a run, and no checkpoint", where="command line", remedy=remedy)
