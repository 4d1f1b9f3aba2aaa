"""`plan --compare ppo`: memory of PPO's models beside GRPO's."""

import json
from dataclasses import asdict
from pathlib import Path

import typer

from grpo_megatron.cli.inspect_commands import format_size, print_table, resolve_any
from grpo_megatron.cli.run_commands import print_advice
from grpo_megatron.errors import ConfigError
from grpo_megatron.plan.ppo import (
    Comparison,
    comparison_of,
    comparison_of_model,
    is_model_name,
)


def compare(source: str, overrides: list[str], *, as_json: bool) -> None:
    """Print the comparison of a recipe, a run, a model preset, or `7b`, `13b`, `70b`."""
    found = _comparison(source, overrides)
    if as_json:
        typer.echo(json.dumps(asdict(found), indent=2))
        return
    _print_models(found)
    typer.echo()
    rows = []
    for algorithm in found.algorithms:
        rows.append(
            (
                algorithm.algorithm,
                ", ".join(algorithm.models),
                format_size(algorithm.rank),
                format_size(algorithm.all_ranks),
                f"{algorithm.share_of_ppo:.1%}",
            )
        )
    print_table(("algorithm", "models", "a rank", "all ranks", "of PPO"), rows, labelled=True)
    typer.echo()
    for line in formula_lines(found):
        typer.echo(line)


def _comparison(source: str, overrides: list[str]) -> Comparison:
    if is_model_name(source) and not Path(source).exists():
        if overrides:
            raise ConfigError(
                f"{source} is a model at its own layout and takes no settings",
                where="command line",
                remedy=f"name a recipe: plan RECIPE model.preset=… {' '.join(overrides)} "
                "--compare ppo",
            )
        return comparison_of_model(source)
    config = resolve_any(source, overrides).config
    print_advice(config)
    return comparison_of(config)


def _print_models(found: Comparison) -> None:
    components = ("weights", "gradients", "optimizer", "buffers")
    rows = []
    for model in found.models:
        parts = [_size_or_dash(model.parts.get(name, 0)) for name in components]
        rows.append(
            (
                model.model,
                f"{model.parameters:,}",
                f"{model.rank_parameters:,}",
                *parts,
                format_size(model.rank),
                format_size(model.all_ranks),
            )
        )
    header = ("model", "parameters", "of a rank", *components, "a rank", "all ranks")
    print_table(header, rows, labelled=True)


def _size_or_dash(num_bytes: int) -> str:
    if num_bytes == 0:
        return "–"
    return format_size(num_bytes)


def formula_lines(found: Comparison) -> list[str]:
    """What the numbers are made of, in words."""
    each = found.per_parameter
    [policy, critic] = [model for model in found.models if model.is_trained]
    shards = f"{found.optimizer_shards} rank(s)"
    if found.expert_optimizer_shards != found.optimizer_shards:
        shards += f", of experts by {found.expert_optimizer_shards}"
    difference = critic.parameters - policy.parameters
    return [
        f"ranks: {found.num_ranks}; a rank is the fullest one of pipeline stage {found.stage}",
        f"trained (policy, critic): {each.weights} bytes of weights, {each.gradients} of gradients "
        f"and {each.optimizer} of optimizer state a parameter of the rank, padded; optimizer state "
        f"is shared by {shards}",
        f"computed only (reference, reward model): {each.weights} bytes a parameter of the rank",
        "critic and reward model: the policy's layers with a value head of one number a token in "
        f"the place of the output layer, {difference:+,} parameters",
        "left out: activations, KV cache, engine; here the host keeps references, so that on a GPU "
        "GRPO needs no more with KL than without",
    ]
