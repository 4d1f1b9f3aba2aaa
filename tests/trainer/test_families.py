"""Every family: transformers' logits, and its tensors back bit for bit, at every kind of layout.

A selection runs with all tests; `make test-families` runs every model at every layout.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from grpo_megatron.config.presets import load_preset, preset_names
from grpo_megatron.config.trainer import TrainerConfig
from grpo_megatron.plan.layout import Case, check_layout
from grpo_megatron.plan.model_facts import facts_from_hf
from tests.trainer.families import MODELS, write_family
from tests.trainer.test_layout_parity import APART, assert_same

pytestmark = pytest.mark.engine

CASES = "tests.trainer.family_ranks:"

_SHORT = {
    "tp": "tensor_parallel_size",
    "pp": "pipeline_parallel_size",
    "vpp": "virtual_pipeline_parallel_size",
    "ep": "expert_parallel_size",
    "etp": "expert_tensor_parallel_size",
    "cp": "context_parallel_size",
    "first": "first_stage_layers",
}
LAYOUTS = {
    name: (ranks, {_SHORT[key]: size for key, size in sizes.items()})
    for name, (ranks, sizes) in {
        "tp2": (2, {"tp": 2}),
        "pp2": (2, {"pp": 2}),
        "pp2_uneven": (2, {"pp": 2, "first": 1}),
        "pp2_vpp2": (2, {"pp": 2, "vpp": 2}),
        "ep2": (2, {"ep": 2}),
        "tp2_etp1": (2, {"tp": 2, "etp": 1}),
        "etp2": (2, {"etp": 2}),
        "cp2": (2, {"cp": 2}),
        "cp2_tp2": (4, {"cp": 2, "tp": 2}),
        "etp2_ep2": (4, {"tp": 2, "etp": 2, "ep": 2}),
        "tp2_pp2_ep2": (4, {"tp": 2, "pp": 2, "ep": 2, "etp": 1}),
    }.items()
}

SELECTED = [
    ("qwen2", "tp2"),
    ("qwen2", "pp2_vpp2"),
    ("llama_odd", "pp2"),
    ("seed_oss", "tp2"),
    ("seed_oss_unbiased", "pp2"),
    ("qwen3_yarn", "tp2"),
    ("qwen3_yarn", "cp2"),
    ("deepseek_v2", "cp2"),
    ("qwen3_moe_mixed", "tp2_etp1"),
    ("mixtral", "ep2"),
    ("mixtral", "pp2_uneven"),
    ("deepseek_v2", "tp2"),
    ("deepseek_v3", "tp2"),
    ("deepseek_v3", "pp2_vpp2"),
    ("moonlight", "ep2"),
    ("glm4_moe", "tp2"),
    ("glm4_moe_air", "etp2"),
    ("deepseek_v3", "etp2_ep2"),
    ("deepseek_v3", "tp2_pp2_ep2"),
    ("glm4_moe", "tp2_pp2_ep2"),
    ("mixtral", "etp2_ep2"),
]
GRADIENTS = [
    ("deepseek_v2", "tp2"),
    ("deepseek_v3", "tp2"),
    ("deepseek_v3", "ep2"),
    ("deepseek_v3", "cp2"),
    ("glm4_moe", "tp2_etp1"),
]


def _refusals(model: str, layout: str) -> list[str]:
    ranks, sizes = LAYOUTS[layout]
    found = check_layout(
        Case(TrainerConfig(num_ranks=ranks, **sizes), facts_from_hf(MODELS[model]), cpu=False)
    )
    return [v.message for v in found if v.key.startswith("trainer.")]


ALL = [(model, layout) for model in MODELS for layout in LAYOUTS if not _refusals(model, layout)]


@pytest.fixture(scope="session")
def family_model(tmp_path_factory, samples):
    """Checkpoint of a name in `MODELS`, made when it is first asked for."""
    made: dict[str, str] = {}

    def get(name: str) -> str:
        if name not in made:
            made[name] = write_family(tmp_path_factory.mktemp("families") / name, name, samples)
        return made[name]

    return get


def _assert_parity(request, model: str, samples: str, ranks: int, layout: dict) -> None:
    found = request.getfixturevalue(f"world{ranks}").run(
        CASES + "parity", model=model, samples=samples, layout=layout
    )
    assert found["wrong"] == []
    assert found["error"] < 2e-5


def _assert_gradients(request, model: str, samples: str, layout: str) -> None:
    ranks, sizes = LAYOUTS[layout]
    one, many = (
        request.getfixturevalue(f"world{n}").run(
            CASES + "gradients", model=model, samples=samples, layout=layout
        )
        for n, layout in ((1, APART), (ranks, sizes))
    )
    assert_same(many, one)


ALONE = [name for name in MODELS if name not in {model for model, _ in SELECTED}]
"""Models that no selected layout compares with transformers."""


@pytest.mark.parametrize("name", ALONE)
def test_one_rank(request, family_model, samples, name):
    _assert_parity(request, family_model(name), samples, 1, {})


@pytest.mark.parametrize(("name", "layout"), SELECTED)
def test_layouts(request, family_model, samples, name, layout):
    _assert_parity(request, family_model(name), samples, *LAYOUTS[layout])


@pytest.mark.parametrize(("name", "layout"), GRADIENTS)
def test_gradients(request, family_model, samples, name, layout):
    _assert_gradients(request, family_model(name), samples, layout)


@pytest.mark.families
@pytest.mark.parametrize("name", [name for name in MODELS if name not in ALONE])
def test_one_rank_of_the_others(request, family_model, samples, name):
    _assert_parity(request, family_model(name), samples, 1, {})


@pytest.mark.families
@pytest.mark.parametrize(("name", "layout"), ALL)
def test_all_layouts(request, family_model, samples, name, layout):
    _assert_parity(request, family_model(name), samples, *LAYOUTS[layout])
    _assert_gradients(request, family_model(name), samples, layout)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param("tp2", "pp2_uneven", marks=pytest.mark.families),
        ("pp2_uneven", "ep2"),
    ],
)
def test_checkpoints_with_a_stage_without_experts(
    world2, family_model, samples, tmp_path, before, after
):
    """The first stage is one dense layer: its expert optimizer holds nothing."""
    directory = str(tmp_path / "step_000002")
    arguments = {"model": family_model("deepseek_v3"), "samples": samples, "directory": directory}
    saved = world2.run(
        "tests.checkpoints.checkpoint_ranks:save_after",
        layout=LAYOUTS[before][1],
        steps=2,
        **arguments,
    )
    found = world2.run(
        "tests.checkpoints.checkpoint_ranks:resume_from", layout=LAYOUTS[after][1], **arguments
    )
    assert all(
        np.array_equal(found["saved"][name], tensor) for name, tensor in saved["saved"].items()
    )
    for ours, theirs in zip(found["metrics"], saved["metrics"], strict=True):
        assert ours["loss/value"] == pytest.approx(theirs["loss/value"], abs=1e-6)
        assert ours["grad/norm"] == pytest.approx(theirs["grad/norm"], rel=1e-5)


def test_selection_biases_stay_fp32(world1, family_model, samples):
    """And training does not move them."""
    found = world1.run(CASES + "selection_biases", model=family_model("glm4_moe"), samples=samples)
    assert found == {"imported": [], "trained": []}


def test_layers_for_multi_token_prediction_need_no_place(world1, family_model, tmp_path):
    directory = Path(shutil.copytree(family_model("deepseek_v3"), tmp_path / "mtp"))
    tensors = load_file(directory / "model.safetensors")
    tensors["model.layers.4.eh_proj.weight"] = torch.zeros(48, 96)
    save_file(tensors, directory / "model.safetensors")

    def refusal() -> str | None:
        return world1.run(
            "tests.checkpoints.checkpoint_ranks:import_refusal",
            directory=str(directory),
            model=family_model("deepseek_v3"),
        )

    assert "1 without a place in the model" in refusal()
    hf = json.loads((directory / "config.json").read_text()) | {"num_nextn_predict_layers": 1}
    (directory / "config.json").write_text(json.dumps(hf))
    assert refusal() is None


def test_megatron_takes_released_models_at_their_layouts(world1):
    presets = [preset for preset in map(load_preset, preset_names()) if preset.checkpoint]
    found = world1.run(
        CASES + "build_configs",
        presets=[(preset.hf, layout["trainer"]) for preset in presets for layout in preset.layouts],
    )
    assert found.count("MLATransformerConfig") == 4 and len(found) == len(presets)


def test_heads_that_cannot_be_split_are_refused():
    (message,) = _refusals("qwen2_tied_mqa", "tp2")
    assert "3 attention heads and 1 key-value heads" in message and "TP = 2" in message
    (message,) = _refusals("deepseek_v3_odd", "tp2")
    assert "3 attention heads" in message and "TP = 2" in message
    assert ("qwen2_tied_mqa", "pp2") in ALL
