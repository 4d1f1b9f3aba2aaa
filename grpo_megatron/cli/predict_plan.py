"""What `plan` prints of predicted time, and `plan --search` by it."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import typer

from grpo_megatron.cli.inspect_commands import MOST_SEARCHED, format_size, print_table
from grpo_megatron.config.engine_places import most_ranks_of_node
from grpo_megatron.config.run import RunConfig
from grpo_megatron.errors import ConfigError
from grpo_megatron.plan.engine_share import setting_of_share
from grpo_megatron.plan.memory import Plan
from grpo_megatron.plan.search import largest_fitting_share
from grpo_megatron.plan.search import search as search_layouts
from grpo_megatron.plan.timing.constants import Constants, constants_with
from grpo_megatron.plan.timing.lengths import Lengths
from grpo_megatron.plan.timing.node_split import (
    Split,
    fitting_size,
    node_splits,
    split_points,
    splits_nodes,
)
from grpo_megatron.plan.timing.prediction import (
    MEDIAN_ERROR,
    WORST_ERROR,
    LengthOptions,
    Prediction,
    lengths_of,
    predict_run,
)

_SHOWN = 10


class Predictor:
    """Constants and lengths of a command line, for a recipe on a device."""

    def __init__(
        self,
        config: RunConfig,
        device: str,
        *,
        lengths_file: str | None,
        answer_tokens: float | None,
        prompt_tokens: float | None,
        constants: list[str],
    ):
        if lengths_file is not None and answer_tokens is not None:
            raise ConfigError(
                "--lengths and --answer-tokens exclude each other",
                where="command line",
                remedy="choose one of them",
            )
        for option, tokens in (
            ("--answer-tokens", answer_tokens),
            ("--prompt-tokens", prompt_tokens),
        ):
            if tokens is not None and not 0 < tokens < float("inf"):
                raise ConfigError(
                    f"{tokens:g} tokens", where=option, remedy="a positive number of tokens"
                )
        options = LengthOptions(
            Path(lengths_file) if lengths_file else None, answer_tokens, prompt_tokens
        )
        self.device = device
        self.constants: Constants = constants_with(constants)
        self.lengths: Lengths = lengths_of(config, options, self.constants)

    def __call__(self, config: RunConfig, plan: Plan) -> Prediction:
        """Predict a recipe's step."""
        return predict_run(config, plan, self.device, self.constants, self.lengths)

    def as_json(self, config: RunConfig, plan: Plan) -> dict[str, Any]:
        """The same with every constant's source."""
        return self(config, plan).as_json(self.constants)


def print_prediction(found: Prediction) -> None:
    """Print seconds of phases, and what they amount to."""
    phases = {
        "generation": found.generation_s,
        "log-probs": found.logprobs_s,
        "forward, backward": found.forward_backward_s,
        "gradient sync": found.gradient_sync_s,
        "optimizer": found.optimizer_s,
        "publish": found.publish_s,
        "switch": found.switch_s,
        "overhead": found.overhead_s,
        "step": found.step_s,
    }
    rows = []
    for name, seconds in phases.items():
        rows.append((name, f"{seconds:.1f}", f"{seconds / found.step_s:.0%}"))
    typer.echo()
    print_table(("predicted phase", "seconds", "of the step"), rows, labelled=True)
    typer.echo()
    print_table(("what", ""), list(_amounts(found).items()))


def _amounts(found: Prediction) -> dict[str, str]:
    lengths = found.lengths
    order = "one after the other"
    if found.overlaps:
        order = "generation beside training"
    return {
        "predicted for": f"{found.num_gpus} x {found.device}, {order}",
        "lengths": f"prompt {lengths.prompt:.0f}, answer {lengths.answer:.0f} tokens on the mean, "
        f"at most {lengths.longest:.0f} ({lengths.source})",
        "tokens per second per GPU": f"{found.tokens_per_s_per_gpu:.1f}",
        "MFU": f"{found.mfu:.1%} of the trainer while it trains, {found.step_mfu:.1%} of all GPUs",
        "utilisation": f"trainer {found.trainer_utilisation:.0%}, "
        f"engines {found.engine_utilisation:.0%}",
        **_forecast_rows(found),
        "cost": f"{found.gpu_hours_per_step:.2f} GPU hours a step, {found.gpu_hours:,.0f} in all",
        "how sure": f"of published times that no constant was fitted to, half are within "
        f"{MEDIAN_ERROR:.0%} and all within {WORST_ERROR:.0%}: docs/plan-time.md",
        "largest phase": f"{found.largest_phase.replace('_', ' ')}; to shorten it: {found.advice}",
    }


def _forecast_rows(found: Prediction) -> dict[str, str]:
    """Return the rows about the simulated steps in flight; none where nothing is generated or
    trained."""
    seen = found.forecast
    if seen is None:
        return {}
    rows = {
        "staleness": f"{seen.mean:.2f} versions on the mean over tokens, at most {seen.max:.0f}; "
        f"{seen.sample_mean:.2f} on the mean over samples; {found.staleness_updates:.2f} updates",
        "too old": f"{seen.too_old_fraction:.1%} of the tokens",
        "idle": f"trainer {seen.trainer_idle:.0%}, engines {seen.engine_idle:.0%} of the time",
    }
    known = found.published
    if known is not None:
        rows["published at this bound"] = (
            f"learning rates up to {known.max_learning_rate:g}, {known.min_samples} samples or "
            "more an optimizer step: docs/staleness.md"
        )
    return rows


def search(
    config: RunConfig,
    nodes: int,
    gpus_per_node: int,
    predictor: Predictor,
    *,
    as_json: bool,
) -> None:
    """Print splits of nodes between training and generation, fastest first; with one node, or where
    trainer and engines share GPUs, layouts of the trainer. ConfigError where nothing fits."""
    if nodes > 1 and splits_nodes(config):
        _search_splits(config, nodes, gpus_per_node, predictor, as_json=as_json)
        return
    rows = search_layouts(
        config,
        nodes,
        gpus_per_node,
        predictor.device,
        lambda changed, plan: predictor(changed, plan).step_s,
    )[:_SHOWN]
    if not rows:
        raise _no_layout(config, nodes, gpus_per_node, predictor.device)
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
        return
    shown = []
    for row in rows:
        shown.append(
            (
                f"{row['cost']:.2f}",
                format_size(row["bytes"]),
                f"{row['bubble_fraction']:.1%}",
                f"{row['step_s']:.1f}",
                row["settings"] or "as in the recipe",
            )
        )
    header = ("cost", "memory", "bubble", "step seconds", "settings")
    print_table(header, shown, labelled=True)


def _no_layout(config: RunConfig, nodes: int, gpus_per_node: int, device: str) -> ConfigError:
    """Say that no trainer layout fits, and why where the run's engines leave it no GPU, or not
    enough of each."""
    message = f"no layout of {nodes}x{gpus_per_node} fits"
    remedy = "more nodes, or fewer trainer.max_tokens_per_microbatch"
    shape = {"trainer_nodes": nodes, "gpus_per_node": gpus_per_node}
    placement = config.placement.model_copy(update=shape)
    if most_ranks_of_node(config.model_copy(update={"placement": placement})) == 0:
        message += (
            f": {config.num_replicas} engine(s) of {config.rollout.num_workers} GPU(s) leave none "
            "for the trainer"
        )
        remedy = "more GPUs a node, or fewer rollout.num_replicas"
    elif config.shares_gpus:
        message += " beside engines on the same GPUs"
        share = largest_fitting_share(config, nodes, gpus_per_node, device)
        remedy += ", a larger rollout.tensor_parallel_size, or placement.mode='separate'"
        if share is not None:
            remedy = f"set {setting_of_share(config.rollout, share)}"
    return ConfigError(message, where="--search", remedy=remedy)


def _search_splits(
    config: RunConfig,
    nodes: int,
    gpus_per_node: int,
    predictor: Predictor,
    *,
    as_json: bool,
) -> None:
    splits = node_splits(
        config, nodes, gpus_per_node, predictor.device, predictor.constants, predictor.lengths
    )[:_SHOWN]
    if not splits:
        raise _no_split(config, nodes, gpus_per_node, predictor.device)
    if as_json:
        typer.echo(json.dumps([_split_values(split) for split in splits], indent=2))
        return
    shown = []
    for split in splits:
        found = split.prediction
        shown.append(
            (
                str(split.trainer_nodes),
                str(split.rollout_nodes),
                f"{found.step_s:.1f}",
                f"{found.tokens_per_s_per_gpu:.1f}",
                f"{found.trainer_utilisation:.0%}",
                f"{found.engine_utilisation:.0%}",
                split.settings or "as in the recipe",
            )
        )
    header = (
        "trainer nodes",
        "rollout nodes",
        "step seconds",
        "tokens/s/GPU",
        "trainer busy",
        "engines busy",
        "settings",
    )
    print_table(header, shown, labelled=True)


def _no_split(config: RunConfig, nodes: int, gpus_per_node: int, device: str) -> ConfigError:
    """Say that no split fits, and a size of which one does."""
    tried = ", ".join(map(str, split_points(nodes, config.placement.trainer_nodes)))
    remedy = (
        f"no number of nodes of {gpus_per_node} GPU(s) that was tried fits: other nodes, another "
        "--device, or fewer trainer.max_tokens_per_microbatch and a smaller rollout.max_model_len"
    )
    found = fitting_size(config, gpus_per_node, MOST_SEARCHED // gpus_per_node, device)
    if found is not None:
        trainer_nodes, rollout_nodes = found
        remedy = (
            f"--search {trainer_nodes + rollout_nodes}x{gpus_per_node}, of which {trainer_nodes} "
            f"node(s) that train and {rollout_nodes} with engines fit, or fewer "
            "trainer.max_tokens_per_microbatch"
        )
    return ConfigError(
        f"no split of {nodes}x{gpus_per_node} fits; tried trainer nodes: {tried or 'none'}",
        where="--search",
        remedy=remedy,
    )


def _split_values(split: Split) -> dict[str, Any]:
    values = asdict(split.prediction)
    del values["lengths"]
    return {
        "trainer_nodes": split.trainer_nodes,
        "rollout_nodes": split.rollout_nodes,
        "settings": split.settings,
        **values,
    }
