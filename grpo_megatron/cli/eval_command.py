"""`eval`: what a checkpoint, or a run, reaches on the domains of a recipe."""

import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer

from grpo_megatron.checkpoints.fitting import adapter_domains
from grpo_megatron.checkpoints.retention import UNFINISHED
from grpo_megatron.cli.run_commands import (
    InJob,
    Overrides,
    Recipe,
    flag,
    print_advice,
    runs_beside,
)
from grpo_megatron.config.evaluated_share import UNSCORABLE, share_of
from grpo_megatron.config.toml_file import find_recipe, read_recipe_chain
from grpo_megatron.errors import ConfigError
from grpo_megatron.rundir import RunDir

_OF_TRAINING = (
    "cold_start",
    "distillation",
    "correction",
    "allocation",
    "seeding",
    "critic",
    "lora",
)
"""Tables that only say how a recipe trains."""
_WITHOUT_ANSWERS = ("preferences", "reward_model")
"""Kinds whose domains have no rewards, by which an evaluation scores answers."""
_DECIDED = ("kind", "num_steps", "model", "model.path", "model.preset")
"""Keys of `evaluation_settings` that make it an evaluation of MODEL."""

EvaluatedModel = Annotated[
    Path,
    typer.Argument(
        metavar="MODEL",
        help="Hugging Face checkpoint, or a run directory: what that run exported.",
    ),
]


def evaluate(
    recipe: Recipe,
    model: EvaluatedModel,
    overrides: Overrides = None,
    overwrite: Annotated[
        bool, flag("overwrite", "Delete the evaluation of this name and start anew.")
    ] = False,
    in_job: InJob = False,
) -> None:
    """Measure held-out accuracy of a checkpoint on a recipe's domains; trains nothing."""
    given = overrides or []
    refuse_what_is_decided(given)
    checkpoint = exported(model)
    flags = evaluation_settings(recipe, checkpoint) + given
    from grpo_megatron.launch import local
    from grpo_megatron.plan.resolve import resolve

    resolved = resolve(recipe, flags)
    run = RunDir(resolved.run_path)
    if overwrite:
        refuse_to_replace_another_kind(run)
    print_advice(resolved.config)
    code = local.train(resolved, overwrite=overwrite, in_job=in_job)
    if code == 0:
        typer.echo(f"all figures: {run.result}")
        typer.echo("\n".join(table(json.loads(run.result.read_text())["eval"])))
    raise typer.Exit(code)


def refuse_what_is_decided(overrides: Sequence[str]) -> None:
    """Raise ConfigError for an override that makes something else of an evaluation of MODEL."""
    for override in overrides:
        key, _, _ = override.partition("=")
        if key.strip() in _DECIDED:
            raise ConfigError(
                f"`eval` sets {key.strip()} itself: it evaluates MODEL, and trains nothing",
                where=override,
                remedy="leave it out; another model is another MODEL, and `grpo-megatron train "
                "RECIPE` trains",
            )


def refuse_to_replace_another_kind(run: RunDir) -> None:
    """Raise ConfigError where a run is that is no evaluation: it may be what is evaluated."""
    from grpo_megatron.plan.resolve import resolve_run

    if not run.config.is_file():
        return
    kind = resolve_run(run.config).config.kind
    if kind != "eval":
        raise ConfigError(
            f"{run.root.name!r} is a run of kind {kind}, which an evaluation does not replace",
            where=str(run.root),
            remedy="choose another name=…",
        )


def exported(model: Path) -> Path:
    """The checkpoint that `model` is, or that the run there has exported.

    Raises ConfigError, with what there is instead, where it is neither."""
    run = RunDir(model)
    is_run = run.config.is_file() and run.logs.is_dir()
    has_export = (run.export / "config.json").is_file()
    of_domains = _exports_of_domains(run)
    if is_run and has_export and not run.has_gone_on:
        return run.export
    if is_run and (has_export or (of_domains and run.has_gone_on)):
        before = _quoted(of_domains or [run.export])
        raise ConfigError(
            f"{model} has gone on since it exported, and has not ended again",
            where=str(run.export.absolute()),
            remedy=f"{_what_to_evaluate_instead(run)}; what it exported before: {before}",
        )
    if is_run and of_domains:
        raise ConfigError(
            f"the domains of {model} have adapters of their own, and a checkpoint each",
            where=str(run.export.absolute()),
            remedy=f"evaluate one of {_quoted(of_domains)}",
        )
    if is_run:
        raise ConfigError(
            f"{model} has exported no checkpoint",
            where=str(run.export.absolute()),
            remedy=_what_to_evaluate_instead(run),
        )
    if (model / "complete.json").is_file():
        raise ConfigError(
            f"{model} is a checkpoint of Megatron, which engines do not read",
            where=str(model.absolute()),
            remedy=f"evaluate what {_to_hf(model, adapter_domains(model))} writes",
        )
    if (model / "config.json").is_file():
        return model
    raise ConfigError(
        f"{model} is neither a Hugging Face checkpoint nor a run: it has no config.json",
        where=str(model.absolute()),
        remedy="runs here: " + (", ".join(runs_beside(model)[:5]) or "none"),
    )


def _exports_of_domains(run: RunDir) -> list[Path]:
    """Return what a run has exported for its domains, where these have adapters of their own."""
    found = []
    for file in sorted(run.export.glob("*/config.json")):
        if not file.parent.name.endswith(UNFINISHED):
            found.append(file.parent)
    return found


def _quoted(paths: Sequence[Path]) -> str:
    """Return paths as a shell takes them."""
    return ", ".join(shlex.quote(str(path)) for path in paths)


def _what_to_evaluate_instead(run: RunDir) -> str:
    from grpo_megatron.checkpoints.retention import complete_steps
    from grpo_megatron.plan.resolve import resolve_run

    config = resolve_run(run.config).config
    if not config.trains:
        return f"it trains nothing: evaluate its model, {config.model.path or run.model}"
    steps = complete_steps(run.checkpoints)
    if steps:
        command = _to_hf(run.step_checkpoint(steps[-1]), config.adapter_domains)
        return f"let the run end, or evaluate what {command} writes"
    return "let the run end: it has no checkpoint either"


def _to_hf(checkpoint: Path, domains: Sequence[str]) -> str:
    """Return the command that makes a Hugging Face checkpoint of one of Megatron's. domains: that
    have adapters of their own in it."""
    words = f"convert to-hf {shlex.quote(str(checkpoint))} --to FOLDER"
    if domains:
        words += f" --domain {shlex.quote(domains[0])}"
    return f"`grpo-megatron {words}`"


def evaluation_settings(recipe: str, checkpoint: Path) -> list[str]:
    """What makes of a recipe an evaluation of `checkpoint`.

    Raises ConfigError for a recipe that has no rewards to score answers by."""
    kind = "rl"
    for file in read_recipe_chain(find_recipe(recipe)):  # base first
        kind = file.values.get("kind", kind)
    if kind in _WITHOUT_ANSWERS:
        raise ConfigError(
            f"a recipe of kind {kind} has no rewards by which answers could be scored",
            where=recipe,
            remedy="evaluate with a recipe whose domains have rewards, for example that of the "
            "RL stage that follows",
        )
    return [
        f"name=eval-{_name_of(checkpoint.absolute())}",
        "kind=eval",
        "num_steps=0",
        "model.preset=null",
        f"model.path={checkpoint}",
        *(f"{table}=null" for table in _OF_TRAINING),
    ]


def table(results: Mapping[str, Mapping[str, float]]) -> list[str]:
    """A line for each domain: greedy accuracy with its 95 % interval; and, where answers were
    sampled, pass@n and majority@n of the largest n; with what could not be scored."""
    lines = []
    width = max(len(domain) for domain in results)
    for domain, values in results.items():
        line = f"{domain:<{width}}  {values['prompts']:>6.0f} prompts"
        if values["prompts"]:
            line += f"  accuracy {_told_share(values, 'accuracy', has_interval=True)}"
        most = _most_samples(values)
        if most:
            line += f"  pass@{most} {_told_share(values, f'pass_at_{most}')}"
            line += f"  majority@{most} {_told_share(values, f'majority_at_{most}')}"
        lines.append(line)
    return lines


def _told_share(values: Mapping[str, float], name: str, *, has_interval: bool = False) -> str:
    """Return a share in words, with what could not be scored. has_interval: whether its interval is
    told too, where it has one."""
    share = share_of(values, name)
    low = values.get(f"{name}_low")
    if not has_interval or low is None:
        return str(share)
    notes = [f"{low:.3f} to {values[f'{name}_high']:.3f}"]
    if share.num_unscorable:
        notes.append(share.unscorable_words)
    return f"{share.value:.3f} ({'; '.join(notes)})"


def _most_samples(values: Mapping[str, float]) -> int:
    """Return the largest n of which there is a pass@n, or a count of what it could not be said of;
    0 where no answers were sampled."""
    sizes = [0]
    for name in values:
        size = name.removeprefix("pass_at_").removesuffix(UNSCORABLE)
        if size.isdigit():
            sizes.append(int(size))
    return max(sizes)


def _name_of(checkpoint: Path) -> str:
    """Return what an evaluation is called after: the run whose export `checkpoint` is, or of which
    domain's adapters; else the directory itself."""
    if checkpoint.name == "export":
        return checkpoint.parent.name
    if checkpoint.parent.name == "export":
        return f"{checkpoint.parent.parent.name}-{checkpoint.name}"
    return checkpoint.name
