"""The whole RL update on a pretended GPU: equal to the plain one, and how often its host waits."""

from __future__ import annotations

import numpy as np
import pytest

from tests.device.test_parity import TOLERANCE
from tests.trainer.models import MOE, write_samples
from tests.trainer.worker_group import CaseError

MAX_WAITS_PER_MICROBATCH = 0
"""Of our own lines, over all passes of an update: metrics, masks and routes are copied once a step.
Raise it only for a line that cannot be without."""
pytestmark = pytest.mark.device

UPDATE = "tests.device.device_ranks:rl_update"
V3_2 = {"preset": "deepseek_v3_2", "kl_beta": 0.05}
R3 = {"replay": "r3"}


@pytest.fixture(scope="session")
def stale_samples(tmp_path_factory) -> str:
    """With routes, of two domains, by an older policy, for three optimizer steps."""
    directory = tmp_path_factory.mktemp("store") / "step_000001"
    return write_samples(directory, num_updates=3, num_domains=2, stale=True, hf=MOE)


@pytest.fixture(scope="session")
def arguments(moe_model, stale_samples):
    return {
        "model": moe_model,
        "samples": stale_samples,
        "layout": {"max_tokens_per_microbatch": 64},
        "objective": V3_2,
        "routing": R3,
    }


@pytest.fixture(scope="session")
def found(pretended1, arguments):
    return pretended1.run(UPDATE, **arguments)


def test_it_computes_what_the_cpu_does(world1, arguments, found):
    expected = world1.run(UPDATE, **arguments)
    assert found.num_microbatches == expected.num_microbatches > 3
    for name in ("losses", "grad_norms"):
        np.testing.assert_allclose(found.report[name], expected.report[name], TOLERANCE, TOLERANCE)
    metrics = expected.report["metrics"]
    assert found.report["metrics"].keys() == metrics.keys()
    for name, value in metrics.items():
        assert found.report["metrics"][name] == pytest.approx(value, rel=1e-4, abs=1e-6), name


# --- how often the host waits


SMALLER = {"max_tokens_per_microbatch": 24}
"""The same samples in more micro-batches: what grows with these is done for each."""
R2_KEPT = {"objective": {"preset": "grpo"}, "routing": {"replay": "r2", "keep_loss": "kl"}}


def waits_by_line(few, many) -> dict[str, float]:
    """Waits for each further micro-batch, of our own lines and those of tests, the most first."""
    further = many.num_microbatches - few.num_microbatches
    assert further > 5
    by_line = {}
    for owner in ("grpo_megatron", "tests"):
        before = few.waits.get(owner, {})
        for line, count in many.waits.get(owner, {}).items():
            grown = (count - before.get(line, 0)) / further
            if grown:
                by_line[line] = grown
    return dict(sorted(by_line.items(), key=lambda item: -item[1]))


def told(by_line: dict[str, float]) -> str:
    return "".join(f"\n{count:8.2f} {line}" for line, count in by_line.items())


@pytest.fixture(scope="session")
def truncated_samples(tmp_path_factory) -> str:
    """Drawn from kept sets, some of which are not known."""
    directory = tmp_path_factory.mktemp("store") / "step_000001"
    return write_samples(directory, num_domains=2, stale=True, hf=MOE, truncated=True)


@pytest.mark.parametrize("case", ["v3.2", "r2", "truncated"])
def test_the_host_does_not_wait_for_each_microbatch(
    pretended1, arguments, found, truncated_samples, case
):
    few = found
    if case == "r2":
        arguments = arguments | R2_KEPT
    elif case == "truncated":
        arguments = arguments | {"samples": truncated_samples}
    if case != "v3.2":
        few = pretended1.run(UPDATE, **arguments)
    many = pretended1.run(UPDATE, **arguments | {"layout": SMALLER})
    assert few.waits["megatron"], "nothing was recorded at all"
    by_line = waits_by_line(few, many)
    assert sum(by_line.values()) <= MAX_WAITS_PER_MICROBATCH, (
        f"waits for each micro-batch, all passes together:{told(by_line)}"
    )


# --- mistakes that nothing on a CPU notices


@pytest.mark.parametrize(
    ("mistake", "error"),
    [
        ("forgotten transfer", "Expected all tensors to be on the same device"),
        ("numpy", "can't convert cuda:0 device type tensor to numpy"),
    ],
)
def test_a_tensor_in_the_wrong_place_is_an_error(pretended1, world1, arguments, mistake, error):
    world1.run(UPDATE, **arguments, mistake=mistake)  # on the CPU there is no wrong place
    with pytest.raises(CaseError, match=error):
        pretended1.run(UPDATE, **arguments, mistake=mistake)


def test_a_copy_that_is_read_too_early_gives_other_numbers(pretended1, world1, arguments):
    right, wrong = (
        group.run(UPDATE, **arguments, mistake="read too early").report["metrics"]
        for group in (world1, pretended1)
    )
    name = "routing/load_cv"
    assert right[name] > 0
    assert wrong.get(name) != pytest.approx(right[name], rel=1e-3)


@pytest.mark.parametrize(
    ("mistake", "line"),
    [
        ("unpinned routes", "grpo_megatron/trainer/routing/router_replay.py"),
        ("number read", "tests/device/device_ranks.py"),
    ],
)
def test_a_wait_too_many_is_named_by_its_line(pretended1, arguments, mistake, line):
    few = pretended1.run(UPDATE, **arguments, mistake=mistake)
    many = pretended1.run(UPDATE, **arguments | {"layout": SMALLER}, mistake=mistake)
    by_line = waits_by_line(few, many)
    assert sum(by_line.values()) > MAX_WAITS_PER_MICROBATCH
    assert next(iter(by_line)).startswith(line), told(by_line)
