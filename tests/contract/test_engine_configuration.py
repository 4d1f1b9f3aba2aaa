"""What every shipped recipe starts a vLLM server with is what the CUDA build takes."""

from __future__ import annotations

import importlib.metadata
import json
from pathlib import Path
from typing import Any

import pytest

from grpo_megatron import assets
from grpo_megatron.config.presets import load_preset
from grpo_megatron.config.run import RunConfig
from grpo_megatron.network import Endpoint
from grpo_megatron.plan import engine_arguments
from grpo_megatron.plan.hf_config import as_transformers_reads
from grpo_megatron.plan.resolve import resolve
from grpo_megatron.rollout import replica
from tests.contract.pretended_gpus import GPUS_PER_NODE, in_a_process_of_its_own

pytestmark = pytest.mark.contract

RECIPES = assets.names(assets.root() / "recipes")


def engine_configuration(config: RunConfig, folder: Path, *further: str) -> dict[str, Any]:
    """What vLLM makes of our arguments, by its own parser and checks."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    from grpo_megatron.rollout.plugin import register

    with pytest.MonkeyPatch.context() as patch:
        argv, environment = replica.serve_command(config, str(folder), 0, 8000, token="t")
        for name, value in environment.items():
            patch.setenv(name, value)
        register()
        parser = make_arg_parser(FlexibleArgumentParser())
        words = argv[argv.index("grpo_megatron.rollout.serve") + 1 :]
        arguments = parser.parse_args([*words, "--load-format", "dummy", *further])
        validate_parsed_serve_args(arguments)
        found = AsyncEngineArgs.from_cli_args(arguments).create_engine_config()
    return {
        "architectures": found.model_config.architectures,
        "tensor_parallel_size": found.parallel_config.tensor_parallel_size,
        "data_parallel_size": found.parallel_config.data_parallel_size,
        "engines_of_the_first_node": found.parallel_config.data_parallel_size_local,
        "expert_parallel": found.parallel_config.enable_expert_parallel,
        "nodes": found.parallel_config.nnodes,
        "worker": found.parallel_config.worker_cls,
        "routes": found.aux_output_config.enable_return_routed_experts,
        "weights_by": found.weight_transfer_config.backend,
        "sleeps": found.model_config.enable_sleep_mode,
        "logprobs": found.model_config.logprobs_mode,
        "longest": found.model_config.max_model_len,
        "dtype": str(found.model_config.dtype),
        "quantization": found.model_config.quantization,
    }


def write_model(config: RunConfig, folder: Path) -> dict[str, Any]:
    """The model's config.json at its real size, from the preset, and how it takes images."""
    hf = dict(load_preset(config.model.preset).hf)
    processor = hf.pop("image_processor", None)
    if processor is not None:
        (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    (folder / "config.json").write_text(json.dumps(as_transformers_reads(hf)))
    return hf


def _of_the_first_node(config: RunConfig) -> list[str]:
    nodes = config.rollout.num_workers // GPUS_PER_NODE
    if nodes <= 1:
        return []
    return replica.multi_node_arguments(config.rollout, nodes, 0, Endpoint("10.0.0.1", 29500))


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipes_server_is_configured(recipe, tmp_path):
    config = resolve(recipe).config
    hf = write_model(config, tmp_path)
    nodes = max(config.rollout.num_workers // GPUS_PER_NODE, 1)
    further = _of_the_first_node(config)
    found = in_a_process_of_its_own(engine_configuration, config, tmp_path, *further)
    assert found == {
        "architectures": hf["architectures"],
        "tensor_parallel_size": config.rollout.tensor_parallel_size,
        "data_parallel_size": config.rollout.data_parallel_size,
        "engines_of_the_first_node": max(config.rollout.data_parallel_size // nodes, 1),
        "expert_parallel": config.rollout.expert_parallel,
        "nodes": nodes if config.rollout.data_parallel_size == 1 else 1,
        "worker": "vllm.v1.worker.gpu_worker.Worker",
        "routes": config.records_routes,
        "weights_by": "grpo_megatron",
        "sleeps": config.placement.mode == "colocated",
        "logprobs": "processed_logprobs",
        "longest": config.rollout.max_model_len,
        "dtype": f"torch.{config.rollout.dtype}",
        "quantization": {"none": None, "blockwise": "fp8"}[config.rollout.fp8],
    }


def test_a_released_checkpoint_in_fp8_is_served_as_it_is_published(tmp_path):
    """Its config.json says that its own files are quantised, which no engine reads."""
    config = resolve("moe/deepseek-v3").config
    hf = write_model(config, tmp_path)
    released = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
    released["activation_scheme"] = "dynamic"
    written = json.dumps({**hf, "quantization_config": released})
    (tmp_path / "config.json").write_text(written)
    found = in_a_process_of_its_own(
        engine_configuration, config, tmp_path, *_of_the_first_node(config)
    )
    assert found["quantization"] is None


def test_an_argument_that_vllm_does_not_know_is_caught(tmp_path):
    """The parser is strict; else the test above would let a renamed argument through."""
    config = resolve(RECIPES[0]).config
    write_model(config, tmp_path)
    with pytest.raises(AssertionError, match="SystemExit"):
        in_a_process_of_its_own(engine_configuration, config, tmp_path, "--enable-sleeping-mode")


def test_every_variable_is_one_that_vllm_reads():
    from vllm import envs

    tables = assets.tables(replica.__file__, "engine.toml")
    ours = {name for table in tables.values() for name in table if name.startswith("VLLM_")}
    assert ours
    assert sorted(ours - envs.environment_variables.keys()) == []


def option_names() -> list[str]:
    """All options of vLLM's parser."""
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    names = []
    for action in make_arg_parser(FlexibleArgumentParser())._actions:
        names += action.option_strings
    return sorted(names)


def test_the_recorded_options_are_those_of_the_parser():
    recorded = assets.tables(engine_arguments.__file__, "engine_options.toml")
    assert recorded["version"] == importlib.metadata.version("vllm").partition("+")[0]
    assert recorded["options"] == in_a_process_of_its_own(option_names)
