"""Adapters beside a vision tower: they learn and merge the same at every layout."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests.tiers import rest_in_matrix
from tests.trainer.test_layout_parity import assert_same
from tests.trainer.test_lora_parity import KINDS, MERGE, TRAIN
from tests.trainer.test_sparse_vision import TP_AND_EP
from tests.trainer.vision import (
    DEEP_VISION,
    SPARSE_VISION,
    VISION,
    write_vision_model,
    write_vision_samples,
)

pytestmark = pytest.mark.engine
FAMILIES = {"qwen2_5_vl": VISION, "qwen3_vl": DEEP_VISION, "qwen3_vl_moe": SPARSE_VISION}
ROWS = {"max_tokens_per_microbatch": 128}
LAYOUTS = {
    "tp2_sp": (2, {"tensor_parallel_size": 2}),
    "tp2_ep2": (2, TP_AND_EP),
    "pp2_recompute": (2, {"pipeline_parallel_size": 2, "recompute": "full"}),
    "cp2": (2, {"context_parallel_size": 2}),
    "dp2": (2, {}),
}
CASES = [
    f"{family}-{layout}"
    for family, hf in FAMILIES.items()
    for layout in LAYOUTS
    if layout != "tp2_ep2" or "num_experts" in hf.get("text_config", {})
]
RUN = "tests.trainer.lora_ranks:service_run"
GATE = ("qwen3_vl_moe-tp2_ep2",)


@pytest.fixture(scope="module")
def case_of(tmp_path_factory):
    """A model and samples, by family."""
    written = {}

    def of(family: str) -> dict[str, str]:
        if family not in written:
            root: Path = tmp_path_factory.mktemp(family)
            model = write_vision_model(root / "model", hf=FAMILIES[family])
            samples = write_vision_samples(root / "step_000000", model)
            written[family] = {"model": model, "samples": samples}
        return written[family]

    return of


@pytest.fixture(scope="module")
def expected(world1, case_of):
    """Of one rank, which computes every sample alone."""
    found = {}

    def of(family: str) -> dict:
        if family not in found:
            layout = {**ROWS, "share_prefixes": False}
            found[family] = world1.run(
                TRAIN, **case_of(family), layout=layout, lora=KINDS["each"], gradients=True
            )
        return found[family]

    return of


@pytest.mark.parametrize("case", rest_in_matrix(CASES, GATE))
def test_gradients_do_not_depend_on_the_layout(request, expected, case_of, case):
    """And nothing but adapters has moved, which the ranks look at."""
    family, layout = case.split("-")
    ranks, sizes = LAYOUTS[layout]
    group = request.getfixturevalue(f"world{ranks}")
    found = group.run(
        TRAIN, **case_of(family), layout={**ROWS, **sizes}, lora=KINDS["each"], gradients=True
    )
    assert_same(found, expected(family))
    assert not [name for name in found["tensors"] if "visual" in name]


@pytest.mark.parametrize("family", rest_in_matrix(FAMILIES, ("qwen3_vl",)))
def test_merged_weights_compute_what_adapters_do(world1, case_of, family):
    found = world1.run(MERGE, **case_of(family), layout=ROWS, lora=KINDS["each"])
    for adapted, off, merged in zip(found["adapted"], found["off"], found["merged"], strict=True):
        assert np.abs(adapted - off).max() > 0.01
        np.testing.assert_allclose(merged, adapted, atol=2e-5)


@pytest.mark.parametrize("family", rest_in_matrix(FAMILIES, ("qwen2_5_vl",)))
def test_adapters_are_read_and_written_bit_for_bit(world2, case_of, tmp_path, family):
    """By the names of transformers' modules, and nothing of the tower."""
    case = case_of(family)
    lora = {"rank": 2}
    layout = {"num_ranks": 2, **LAYOUTS["tp2_sp"][1], **ROWS}
    world2.run(RUN, layout=layout, root=str(tmp_path), lora=lora, **case)
    world2.run(
        "tests.trainer.lora_ranks:write_again",
        model=case["model"],
        layout=LAYOUTS["pp2_recompute"][1],
        lora=lora,
        adapter=str(tmp_path / "adapter"),
        target=str(tmp_path / "again"),
    )
    name = "adapter_model.safetensors"
    assert (tmp_path / "again" / name).read_bytes() == (tmp_path / "adapter" / name).read_bytes()
    found = load_file(tmp_path / "again" / name)
    assert all(key.startswith("base_model.model.model.language_model.layers.") for key in found)
    assert any(tensor.abs().max() > 0 for key, tensor in found.items() if ".lora_B." in key)
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert re.fullmatch(config["exclude_modules"], "model.visual.blocks.0.mlp.gate_proj")
    assert re.fullmatch(config["exclude_modules"], "visual.blocks.0.mlp.gate_proj")
    of_text = "model.language_model.layers.0.mlp.gate_proj"
    assert not re.fullmatch(config["exclude_modules"], of_text)


@pytest.mark.matrix
@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_peft_binds_every_adapter_and_computes_what_the_trainer_does(
    world2, case_of, tmp_path, family
):
    """Skipped where PEFT is not installed: modules have other names than tensors in checkpoints.
    Experts of transformers are no linear layers of PEFT."""
    peft = pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    case = case_of(family)
    world2.run(
        RUN,
        layout={"num_ranks": 2, **LAYOUTS["tp2_sp"][1], **ROWS},
        root=str(tmp_path),
        lora={"rank": 2},
        **case,
    )
    load = transformers.AutoModelForImageTextToText.from_pretrained
    merged = load(tmp_path / "export", dtype=torch.float32)
    base = load(case["model"], dtype=torch.float32)
    ids = torch.arange(40)[None]
    before = base(input_ids=ids).logits
    adapted = peft.PeftModel.from_pretrained(base, str(tmp_path / "adapter"))
    found = adapted(input_ids=ids).logits
    assert (found - before).abs().max() > 1e-2
    torch.testing.assert_close(found, merged(input_ids=ids).logits, rtol=0, atol=1e-4)
    adapted.save_pretrained(tmp_path / "by_peft")
    ours = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    theirs = load_file(tmp_path / "by_peft" / "adapter_model.safetensors")
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert torch.equal(theirs[name], tensor), name
