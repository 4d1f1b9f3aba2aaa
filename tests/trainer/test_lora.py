"""A whole trainer with adapters: what it saves, resumes, exports and reads in."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.trainer.test_layout_parity import LAYOUTS_2

pytestmark = pytest.mark.matrix
CASES = "tests.trainer.lora_ranks:"
CONVERT = "tests.checkpoints.checkpoint_ranks:convert"
LORA = {"rank": 2, "targets": ["q_proj", "o_proj", "experts"]}
DORA = {**LORA, "dora": True}
EP2 = {"num_ranks": 2, **LAYOUTS_2["ep2"]}


@pytest.fixture(scope="module", params=[LORA, DORA], ids=["lora", "dora"])
def settings(request) -> dict:
    return request.param


@pytest.fixture(scope="module")
def run(world2, moe_model, three_updates, tmp_path_factory, settings):
    """A run at expert parallelism, and the directory of its files."""
    root = tmp_path_factory.mktemp("lora")
    found = world2.run(
        CASES + "service_run",
        model=moe_model,
        samples=three_updates,
        layout=EP2,
        root=str(root),
        lora=settings,
    )
    return root, found


def test_a_resumed_run_goes_on_bit_for_bit(run):
    _, found = run
    assert found["state"] == {"step": 1}
    assert found["found"] == found["expected"]
    assert found["first"] != found["expected"]


def test_the_reference_is_the_model_without_adapters(run):
    _, found = run
    assert abs(found["first"]["reference/k3"]) < found["expected"]["reference/k3"]


def test_an_export_is_the_converted_checkpoint(run, world1, tmp_path):
    root, _ = run
    target = tmp_path / "converted"
    job = {"source": str(root / "step_000001"), "target": str(target), "to": "hf"}
    assert world1.run(CONVERT, job=job) is None  # compares log-probs with adapters and merged
    exported = load_file(root / "export" / "model.safetensors")
    converted = load_file(target / "model.safetensors")
    assert exported.keys() == converted.keys()
    for name, tensor in exported.items():
        np.testing.assert_allclose(converted[name], tensor, rtol=0, atol=1e-7, err_msg=name)


def test_weights_without_an_adapter_are_as_they_were(run, moe_model):
    root, _ = run
    before = load_file(Path(moe_model) / "model.safetensors")
    after = load_file(root / "export" / "model.safetensors")
    changed = {
        name.split(".")[-2] for name in before if not np.array_equal(before[name], after[name])
    }
    assert changed == {"q_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


@pytest.mark.parametrize("layout", ["tp2_sp", "pp2"])
def test_adapters_are_read_and_written_bit_for_bit(
    run, world2, moe_model, tmp_path, layout, settings
):
    root, _ = run
    world2.run(
        CASES + "write_again",
        model=moe_model,
        layout=LAYOUTS_2[layout],
        lora=settings,
        adapter=str(root / "adapter"),
        target=str(tmp_path / "again"),
    )
    name = "adapter_model.safetensors"
    assert (tmp_path / "again" / name).read_bytes() == (root / "adapter" / name).read_bytes()


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"rank": 3}, "r of adapter_config.json is 2, and [lora] needs 3"),
        ({"dora": None}, "use_dora of adapter_config.json is "),
    ],
)
def test_other_adapters_are_refused(run, world1, moe_model, three_updates, settings, other, words):
    root, _ = run
    if "dora" in other:
        other = {"dora": not settings.get("dora", False)}
    found = world1.run(
        CASES + "import_again",
        model=moe_model,
        samples=three_updates,
        layout={},
        lora={**settings, **other},
        adapter=str(root / "adapter"),
    )
    assert words in found["error"]


def test_adapters_that_experts_share_are_written_for_each(
    run, world2, moe_model, tmp_path, settings
):
    root, _ = run
    if settings is DORA:
        pytest.skip("with DoRA experts share nothing")
    source = tmp_path / "adapter"
    source.mkdir()
    tensors = load_file(root / "adapter" / "adapter_model.safetensors")
    for name in tensors:
        tensors[name] = tensors[name.replace(".experts.3.", ".experts.0.")]
        for expert in "123":
            if f".experts.{expert}." in name:
                tensors[name] = tensors[name.replace(f".experts.{expert}.", ".experts.0.")]
    save_file(tensors, source / "adapter_model.safetensors", metadata={"format": "pt"})
    config = (root / "adapter" / "adapter_config.json").read_text()
    (source / "adapter_config.json").write_text(config)
    world2.run(
        CASES + "write_again",
        model=moe_model,
        layout=LAYOUTS_2["ep2"],
        lora={**LORA, "experts": "shared"},
        adapter=str(source),
        target=str(tmp_path / "again"),
    )
    again = load_file(tmp_path / "again" / "adapter_model.safetensors")
    assert again.keys() == tensors.keys()
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(again[name], tensor)
    assert json.loads((tmp_path / "again" / "adapter_config.json").read_text())["r"] == 2
    assert "Not for PEFT" in (tmp_path / "again" / "README.md").read_text()


@pytest.mark.parametrize("interval", [0, 1])
def test_adapters_begin_after_a_cold_start(
    world2, moe_model, three_updates, tmp_path, interval, settings
):
    found = world2.run(
        CASES + "service_run",
        model=moe_model,
        samples=three_updates,
        layout={"num_ranks": 2, **LAYOUTS_2["tp2_sp"]},
        root=str(tmp_path),
        lora=settings,
        cold_start=True,
        reference_interval=interval,
    )
    assert found["found"] == found["expected"]


@pytest.mark.parametrize("dora", [False, True])
def test_peft_computes_what_the_trainer_does(world2, dense_model, three_updates, tmp_path, dora):
    """Skipped where PEFT is not installed. Experts of transformers are no linear layers of PEFT."""
    peft = pytest.importorskip("peft")
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    lora = {"rank": 2, "rank_stabilised": True, "dora": dora}
    world2.run(
        CASES + "service_run",
        model=dense_model,
        samples=three_updates,
        layout={"num_ranks": 2, **LAYOUTS_2["tp2_sp"]},
        root=str(tmp_path),
        lora=lora,
    )
    load = transformers.AutoModelForCausalLM.from_pretrained
    merged = load(tmp_path / "export", dtype=torch.float32)
    base = load(dense_model, dtype=torch.float32)
    ids = torch.arange(40)[None]
    before = base(ids).logits
    adapted = peft.PeftModel.from_pretrained(base, str(tmp_path / "adapter"))
    found = adapted(ids).logits
    assert (found - before).abs().max() > 0.1
    torch.testing.assert_close(found, merged(ids).logits, rtol=0, atol=1e-4)
    adapted.save_pretrained(tmp_path / "by_peft")
    [saved] = (tmp_path / "by_peft").glob("adapter_model.safetensors")
    ours = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    theirs = load_file(saved)
    assert ours.keys() == theirs.keys()
    assert any("lora_magnitude_vector" in name for name in ours) == dora
    for name, tensor in ours.items():
        np.testing.assert_array_equal(theirs[name], tensor)
    world2.run(
        CASES + "write_again",
        model=dense_model,
        layout=LAYOUTS_2["pp2"],
        lora=lora,
        adapter=str(saved.parent),
        target=str(tmp_path / "again"),
    )


def test_a_checkpoint_of_dora_goes_on_at_another_layout(
    world1, world2, moe_model, three_updates, tmp_path
):
    """Magnitudes that two tensor ranks saved, read by one."""
    arguments = {"model": moe_model, "samples": three_updates, "root": str(tmp_path), "lora": DORA}
    layout = {"num_ranks": 2, **LAYOUTS_2["tp2_sp"]}
    expected = world2.run(CASES + "service_run", layout=layout, **arguments)
    found = world1.run(
        CASES + "resumed",
        model=moe_model,
        samples=three_updates,
        layout={},
        lora=DORA,
        checkpoint=str(tmp_path / "step_000001"),
    )
    np.testing.assert_allclose(found["losses"], expected["losses"], rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(found["norms"], expected["norms"], rtol=1e-4)
