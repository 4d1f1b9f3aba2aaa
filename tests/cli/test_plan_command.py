"""`plan`: what it prints, what it refuses, and layouts that fit."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys

import pytest

from grpo_megatron.cli.main import main
from grpo_megatron.config.problems import as_toml
from grpo_megatron.config.run import RolloutConfig
from grpo_megatron.config.trainer import TrainerConfig
from grpo_megatron.errors import ConfigError
from grpo_megatron.plan.engine_arguments import MEMORY_SHARE
from grpo_megatron.plan.engine_share import arguments_with_share
from grpo_megatron.plan.memory import memory_problems, plan_of
from grpo_megatron.plan.resolve import resolve
from grpo_megatron.plan.search import search
from grpo_megatron.plan.step_memory import in_flight
from grpo_megatron.plan.weights import sizes_of, weights_of_chunk

COLOCATED = [
    "placement.mode=colocated",
    "batch.max_staleness=0",
    'rollout.engine_arguments=["--gpu-memory-utilization=0.3"]',
]
SMALL, LARGE = "dense/qwen3-8b", "moe/qwen3-235b-a22b"
PREFERENCES = "stages/tulu3-8b-preferences"


def test_json_has_every_component_of_every_stage(capsys):
    assert main(["plan", LARGE, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [stage["stage"] for stage in found["stages"]] == list(range(8))
    assert set(found["worst"]["parts"]) == {
        "weights",
        "gradients",
        "optimizer",
        "buffers",
        "activations",
        "layer",
        "logits",
        "embedding",
        "adam",
        "routing",
        "communication",
        "libraries",
    }
    assert found["worst"]["parts"] == max(
        (stage["parts"] for stage in found["stages"]), key=lambda parts: sum(parts.values())
    )
    assert found["numbers"]["parameters"] == 235_093_634_560
    assert found["numbers"]["publish_bytes"] == 2 * 235_093_634_560
    assert found["numbers"]["bubble_fraction"] == 7 / (512 + 7)
    assert found["publish"]["worker_bytes"] == found["engine"]["weights"]
    assert found["publish"]["seconds"] < 2


def test_text_names_the_fullest_rank(capsys):
    assert main(["plan", "demo/gspo-moe-cpu"]) == 0
    out = capsys.readouterr().out
    assert "fullest rank\t0: " in out and "usable: not known" in out
    assert "parameters\t1,799,552" in out  # 96 tokens: the preset's own tokenizer


@pytest.mark.parametrize(("recipe", "has_engines"), [(SMALL, True), (PREFERENCES, False)])
def test_engines_and_publishes_are_lines_of_runs_that_have_them(capsys, recipe, has_engines):
    assert main(["plan", recipe]) == 0
    names = {line.partition("\t")[0] for line in capsys.readouterr().out.splitlines()}
    of_engines = {"engine", "publish over the links"}
    assert (names & of_engines == of_engines) is has_engines
    assert names.isdisjoint(of_engines) is not has_engines
    assert main(["plan", recipe, "--json"]) == 0
    assert (json.loads(capsys.readouterr().out)["publish"] is not None) is has_engines


def test_a_trainer_that_does_not_fit_is_told_layouts_that_do(capsys):
    assert main(["plan", SMALL, "trainer.tensor_parallel_size=2"]) == 2
    error = capsys.readouterr().err
    assert "rank 0 (pipeline stage 0) needs" in error
    assert "\n          fits: " in error  # under the first remedy
    fits = next(line for line in error.splitlines() if "fits: " in line).partition("fits: ")[2]
    assert main(["plan", SMALL, "trainer.tensor_parallel_size=2", *fits.split()]) == 0


@pytest.mark.parametrize(
    ("argument", "fits"),
    [("--gpu_memory_utilization=0.3", True), ("--gpu-memory-utilization=0.2", False)],
)
def test_an_engine_without_room_for_one_sequence(capsys, argument, fits):
    code = main(["plan", SMALL, f'rollout.engine_arguments=["{argument}"]'])
    assert (code == 0) == fits
    assert ("GiB of weights a GPU leave room for" in capsys.readouterr().err) != fits


SHARING = ["placement.mode=colocated", "batch.max_staleness=0", "trainer.recompute=full"]
"""With the share of a GPU that vLLM takes by default."""


def told_share(capsys) -> str:
    """Return the setting that an error proposes, as an override."""
    error = capsys.readouterr().err
    setting = next(line for line in error.splitlines() if "set rollout.engine_arguments" in line)
    return "rollout.engine_arguments=" + setting.partition("rollout.engine_arguments = ")[2]


@pytest.mark.parametrize(
    "layout", [["trainer.tensor_parallel_size=2"], ["placement.trainer_nodes=4"]]
)
def test_a_share_that_leaves_engines_and_trainer_enough_is_told(capsys, layout):
    other = 'rollout.engine_arguments=["--max-num-batched-tokens=8192"]'
    given = [*SHARING, *layout, other]
    assert main(["plan", SMALL, *given]) == 2
    share = told_share(capsys)
    assert "--max-num-batched-tokens=8192" in share
    assert main(["plan", SMALL, *given, share]) == 0
    told = resolve(SMALL, [*given, share]).config.rollout.engine_argument(MEMORY_SHARE)
    larger = arguments_with_share(RolloutConfig(), float(told) + 0.02)
    assert main(["plan", SMALL, *given, f"rollout.engine_arguments={as_toml(larger)}"]) == 2


def test_a_search_tells_the_share_with_which_a_layout_fits(capsys):
    assert main(["plan", SMALL, *SHARING, "--search", "1x8"]) == 2
    share = told_share(capsys)
    assert main(["plan", SMALL, *SHARING, share, "--search", "1x8"]) == 0


@pytest.mark.parametrize(
    "arguments", [["trainer.max_tokens_per_microbatch=65536"], ["--search", "1x1"]]
)
def test_no_share_is_told_where_none_is_enough_for_both(capsys, arguments):
    one_gpu = ["placement.gpus_per_node=1", "rollout.num_replicas=1"]
    one_gpu += ["trainer.tensor_parallel_size=1", "trainer.num_ranks=1"]
    assert main(["plan", SMALL, *SHARING, *one_gpu, *arguments]) == 2
    error = capsys.readouterr().err
    assert "--gpu-memory-utilization" not in error and "placement.mode='separate'" in error


def test_an_engine_that_has_too_small_a_share_is_told_a_larger_one(capsys):
    small = 'rollout.engine_arguments=["--gpu-memory-utilization=0.2"]'
    assert main(["plan", SMALL, small]) == 2
    assert main(["plan", SMALL, told_share(capsys)]) == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--device", "h100"], "h100-80g"),
        (["--search", "4by8"], "for example --search 16x8"),
        (["--search", "1x1"], "no layout of 1x1 fits: 4 engine(s) of 1 GPU(s) leave none"),
        (["--search", "100000x8"], "for example --search 2048x8"),
    ],
)
def test_wrong_arguments(capsys, arguments, message):
    assert main(["plan", SMALL, *arguments]) == 2
    assert message in capsys.readouterr().err


def test_found_layouts_are_valid_and_fit(capsys):
    assert main(["plan", SMALL, "--search", "1x8", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    costs = [round(row["cost"], 3) for row in rows]
    assert costs == sorted(costs)
    for row in rows:
        plan = plan_of(resolve(SMALL, row["settings"].split()).config)
        assert plan.worst.total == row["bytes"] <= plan.usable_bytes


@pytest.mark.parametrize(
    ("source", "shape", "overrides"),
    [
        (SMALL, (1, 8), []),
        (SMALL, (1, 7), ["rollout.num_replicas=2"]),  # five GPUs are left, no layout has five ranks
        (SMALL, (2, 8), ["rollout.num_replicas=3"]),
        (SMALL, (1, 8), ["placement.rollout_nodes=1", "rollout.num_replicas=8"]),
        (SMALL, (1, 8), COLOCATED),
        ("single_gpu/qwen3-8b-lora", (1, 4), []),
        ("dense/qwen3-8b", (1, 8), ["kind=eval", "num_steps=0", "cold_start=null"]),
    ],
)
def test_a_layout_that_is_proposed_is_one_that_is_taken(source, shape, overrides):
    """On the GPUs that engines leave, and with settings that say all that is changed."""
    rows = search(resolve(source, overrides).config, *shape, "h100-80g")
    assert rows
    for row in rows[:20]:
        config = resolve(source, [*overrides, *shlex.split(row["settings"])]).config
        assert memory_problems(config, plan_of(config)) == []
        placement = config.placement
        assert (placement.trainer_nodes, placement.gpus_per_node) == shape


SHORT = [
    "placement.rollout_nodes=1",
    "rollout.num_replicas=4",
    "rollout.max_model_len=8192",
    "rollout.max_new_tokens=4096",
]


@pytest.mark.parametrize(
    ("overrides", "refused"),
    [
        # MLP of 13824 / 8 = 13.5 blocks
        (["model.preset=qwen2.5-14b", "rollout.fp8=blockwise"], "trainer.tensor_parallel_size=8"),
        # stages of dense layers alone would have no adapters
        (
            ["model.preset=moonlight-16b-a3b", 'lora={rank=8,targets=["mlp.experts"]}'],
            "trainer.pipeline_parallel_size=2",
        ),
    ],
)
def test_no_layout_is_proposed_that_weights_in_fp8_or_adapters_refuse(overrides, refused):
    overrides = [*overrides, *SHORT]
    with pytest.raises(ConfigError, match=r"rollout\.fp8|lora\.targets"):
        resolve(SMALL, [*overrides, "trainer.num_ranks=8", refused])
    rows = search(resolve(SMALL, overrides).config, 1, 8, "h100-80g")
    assert rows
    for row in rows:
        assert refused not in row["settings"].split()


def test_shorter_last_stage_and_virtual_stages_are_found():
    config = resolve(LARGE).config
    found = [row["settings"] for row in search(config, 16, 8, "h100-80g")]
    assert any("trainer.last_stage_layers=4" in settings for settings in found)
    assert any("trainer.virtual_pipeline_parallel_size=2" in settings for settings in found)
    assert not any("num_ranks" in settings for settings in found)  # the recipe has as many


@pytest.mark.parametrize(("vpp", "first", "last"), [(None, 4, 1), (2, 5.5, 2.5)])
def test_microbatches_in_flight(vpp, first, last):
    hf = {
        "model_type": "llama",
        "hidden_size": 64,
        "num_hidden_layers": 8,
        "vocab_size": 96,
        "num_attention_heads": 4,
        "intermediate_size": 96,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e4,
    }
    sizes = sizes_of(
        hf,
        96,
        TrainerConfig(num_ranks=4, pipeline_parallel_size=4, virtual_pipeline_parallel_size=vpp),
    )
    assert (in_flight(sizes, 0, 100), in_flight(sizes, 3, 100)) == (first, last)
    assert in_flight(sizes, 0, 2) == 2
    assert sum(len(sizes.layers_of(p, c)) for p in range(4) for c in range(vpp or 1)) == 8
    assert len(weights_of_chunk(sizes, 1, 0)) == 6 * len(sizes.layers_of(1, 0))


def test_recomputation_and_smaller_chunks_need_less():
    def parts(*overrides: str) -> dict[str, int]:
        return plan_of(resolve(SMALL, overrides).config).worst.parts

    assert parts("trainer.recompute=full")["activations"] < parts()["activations"] / 2
    assert parts("trainer.logprob_chunk_tokens=256")["logits"] < parts()["logits"]


def test_no_torch():
    code = (
        "import sys; from grpo_megatron.cli.main import main; "
        f"main(['plan', '{SMALL}']); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_an_optimizer_on_the_host_is_not_traced(capsys):
    recipe = "moe/qwen3-30b-a3b"
    assert main(["plan", recipe, "trainer.offload_optimizer=true", "--trace"]) == 2
    assert "trainer.offload_optimizer=false" in capsys.readouterr().err
