"""Adapters by domain: one trainer trains each as a run of its own would."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.trainer.models import write_samples
from tests.trainer.test_layout_parity import LAYOUTS_2

pytestmark = pytest.mark.matrix
CONVERT = "tests.checkpoints.checkpoint_ranks:convert"
CASES = "tests.trainer.domain_adapter_ranks:"
LORA = {"rank": 2, "targets": ["q_proj", "o_proj", "experts"]}
BY_DOMAIN = {**LORA, "per_domain": True, "publish": "adapter"}
EP2 = {"num_ranks": 2, **LAYOUTS_2["ep2"]}
LAYOUTS = {
    "one rank": {},
    "experts": EP2,
    "tensors": {"num_ranks": 2, **LAYOUTS_2["tp2_sp"]},
    "stages": {"num_ranks": 2, **LAYOUTS_2["pp2"]},
    "data": {"num_ranks": 2, "distributed_optimizer": True},
}


@pytest.fixture(scope="module")
def steps(tmp_path_factory) -> list[str]:
    """Three steps; in the second one only the first domain has samples."""
    root = tmp_path_factory.mktemp("store")
    found = []
    for number, num_domains in enumerate((2, 1, 2)):
        step = write_samples(
            root / f"step_{number:06d}", seed=number, num_updates=2, num_domains=num_domains
        )
        found.append(step)
    return found


def _assert_equal(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_array_equal(found[name], values, err_msg=name)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_domain_is_trained_as_by_a_run_of_its_own(request, moe_model, steps, layout):
    settings = LAYOUTS[layout]
    world = request.getfixturevalue("world2" if settings else "world1")
    case = {"model": moe_model, "steps": steps, "layout": settings, "lora": LORA}
    apart = world.run(CASES + "trained_apart", **case)
    together = world.run(CASES + "trained_together", **case)
    assert not np.array_equal(
        *(together[domain]["model.layers.0.self_attn.q_proj.lora_B.weight"] for domain in apart)
    )
    for domain, alone in apart.items():
        _assert_equal(together[domain], alone["adapters"])
    norms = [report.grad_norms for report in together["reports"]]
    even = [report["norms"] for report in apart["even"]["reports"]]
    odd = [report["norms"] for report in apart["odd"]["reports"]]
    assert norms == [even[0] + odd[0], even[1], even[2] + odd[1]]
    assert [report.updates for report in together["reports"]] == [2, 2, 2]


def test_a_publish_has_the_adapters_of_all_domains(world2, moe_model, steps):
    found = world2.run(
        CASES + "trained_together", model=moe_model, steps=steps, layout=EP2, lora=LORA
    )
    expected = {}
    for domain in ("even", "odd"):
        for name, values in found[domain].items():
            expected[f"{domain}/{name}"] = values
    _assert_equal(found["published"], expected)


def test_adapters_begin_after_a_cold_start(world2, moe_model, steps):
    case = {"model": moe_model, "steps": steps, "layout": EP2, "lora": LORA}
    found = world2.run(CASES + "trained_together", cold_start=True, **case)
    without = world2.run(CASES + "trained_together", **case)
    name = "model.layers.0.self_attn.q_proj.lora_B.weight"
    for domain in ("even", "odd"):
        assert np.abs(found[domain][name]).max() > 0
        assert not np.array_equal(found[domain][name], without[domain][name])


def test_every_objective_learns_for_its_domain_alone(world1, moe_model, steps):
    """What an objective keeps from step to step is kept by domain."""
    case = {
        "model": moe_model,
        "steps": steps,
        "layout": {},
        "lora": LORA,
        "aggregation": "lambda_grpo",
    }
    apart = world1.run(CASES + "trained_apart", **case)
    together = world1.run(CASES + "trained_together", **case)
    state = together["reports"][-1].state
    assert state.keys() == {"even", "odd"}
    for domain, alone in apart.items():
        assert "lambda" in state[domain]
        assert state[domain] == alone["reports"][-1]["state"]


@pytest.fixture(scope="module")
def run(world2, moe_model, steps, tmp_path_factory):
    root = tmp_path_factory.mktemp("run")
    found = world2.run(
        CASES + "resumed", model=moe_model, steps=steps, layout=EP2, lora=LORA, root=str(root)
    )
    return root, found


def test_a_resumed_run_goes_on_bit_for_bit(run):
    _, found = run
    assert found["found"]["state"] == {"step": 1}
    expected = [report.grad_norms for report in found["expected"]]
    assert [report.grad_norms for report in found["found"]["reports"]] == expected
    for domain in ("even", "odd"):
        _assert_equal(found["found"][domain], found["adapters"][domain])


@pytest.mark.parametrize("layout", ["tensors", "stages", "data"])
def test_a_run_goes_on_at_another_layout(run, world2, moe_model, steps, layout):
    root, found = run
    other = world2.run(
        CASES + "gone_on",
        model=moe_model,
        steps=steps,
        layout=LAYOUTS[layout],
        lora=BY_DOMAIN,
        checkpoint=str(root / "step_000001"),
    )
    for report, expected in zip(other["reports"], found["expected"], strict=True):
        np.testing.assert_allclose(report.grad_norms, expected.grad_norms, rtol=1e-5)
    for domain in ("even", "odd"):
        for name, values in found["adapters"][domain].items():
            np.testing.assert_allclose(other[domain][name], values, rtol=0, atol=1e-5)


def test_every_domain_is_exported(run):
    root, _ = run
    for domain in ("even", "odd"):
        assert (root / "export" / domain / "model.safetensors").is_file()
        config = json.loads((root / "adapter" / domain / "adapter_config.json").read_text())
        assert config["r"] == 2
    assert not (root / "export" / "config.json").exists()


def test_a_checkpoint_of_other_domains_is_refused(run, world2, moe_model):
    root, _ = run
    told = world2.run(
        CASES + "refused",
        model=moe_model,
        layout=EP2,
        lora=BY_DOMAIN,
        checkpoint=str(root / "step_000001"),
    )
    assert "even, odd" in told
    assert "even, third" in told


def test_logprobs_of_a_recorded_step_are_of_each_domains_adapters(
    run, world2, moe_model, steps, tmp_path
):
    """The recorded step has the same numbers, whichever way its log-probs are measured."""
    root, _ = run
    columns = world2.run(
        CASES + "logprobs",
        model=moe_model,
        step=steps[2],
        layout=EP2,
        lora=BY_DOMAIN,
        checkpoint=str(root / "step_000001"),
        to=str(tmp_path / "columns.safetensors"),
    )
    assert not np.isnan(columns["live"]).any()
    apart = {}
    for domain in ("even", "odd"):
        found = world2.run(
            CASES + "merged_logprobs_of",
            model=str(root / "export" / domain),
            step=steps[2],
            layout=EP2,
            to=str(tmp_path / f"{domain}.safetensors"),
        )
        apart[domain] = found["live"]
    is_odd = world2.run(CASES + "tokens_of_odd", step=steps[2])
    expected = np.where(is_odd, apart["odd"], apart["even"])
    np.testing.assert_allclose(columns["live"], expected, rtol=0, atol=1e-5)
    assert np.abs(apart["odd"] - apart["even"]).max() > 1e-4


def test_what_is_recorded_beside_a_step_has_every_domain(run, steps):
    written = {path.name for path in Path(steps[0]).glob("drift-*")}
    assert written == {
        "drift-even-0.safetensors",
        "drift-even-1.safetensors",
        "drift-odd-0.safetensors",
        "drift-odd-1.safetensors",
    }


@pytest.mark.parametrize("domain", ["even", "odd"])
def test_a_checkpoint_is_converted_for_one_domain(run, world1, tmp_path, domain):
    """Megatron with the adapters and transformers with merged weights are compared on the way."""
    root, _ = run
    target = tmp_path / "converted"
    job = {"source": str(root / "step_000001"), "target": str(target), "to": "hf"}
    assert world1.run(CONVERT, job={**job, "domain": domain}) is None
    exported = load_file(root / "export" / domain / "model.safetensors")
    converted = load_file(target / "model.safetensors")
    assert exported.keys() == converted.keys()
    for name, tensor in exported.items():
        np.testing.assert_allclose(converted[name], tensor, rtol=0, atol=1e-7, err_msg=name)


@pytest.mark.parametrize(
    ("domain", "words"),
    [("", "choose one: --domain even"), ("evn", "did you mean 'even'")],
)
def test_a_conversion_wants_a_domain_that_is_there(run, world1, tmp_path, domain, words):
    root, _ = run
    job = {"source": str(root / "step_000001"), "target": str(tmp_path / "converted"), "to": "hf"}
    _, code, told = world1.run(CONVERT, job={**job, "domain": domain})
    assert code == 8
    assert words in told
    assert not (tmp_path / "converted").exists()


def test_a_check_reads_the_adapters_of_every_domain(run, world1, tmp_path):
    root, _ = run
    checkpoint = root / "step_000001"
    assert world1.run(CONVERT, job={"source": str(checkpoint)}) is None
    damaged = tmp_path / "step_000001"
    shutil.copytree(checkpoint, damaged)
    for path in (damaged / "adapters" / "odd").glob("*.distcp"):
        path.write_bytes(path.read_bytes()[:-9] + bytes(9))
    _, code, told = world1.run(CONVERT, job={"source": str(damaged)})
    assert code == 8
    assert "adapters/odd" in told


def test_decisions_of_a_domain_that_are_gone_are_made_anew_for_it_alone(
    world1, moe_model, steps, tmp_path
):
    """Not taken for those of a domain that clipped nothing."""
    step = tmp_path / "step_000000"
    shutil.copytree(steps[0], step)
    case = {"model": moe_model, "step": str(step), "lora": LORA}
    told = world1.run(CASES + "replayed", **case)
    assert told == {"even": 1.0, "odd": 1.0, "both": 1.0}
    for path in step.glob("decisions-odd-*"):
        path.unlink()
    told = world1.run(CASES + "replayed", **case)
    assert (told["even"], told["odd"]) == (1.0, 0.0)
    assert 0 < told["both"] < 1
