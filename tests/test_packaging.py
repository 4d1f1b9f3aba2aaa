"""The lock, the set-up script and the Makefile agree with each other."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
LOCK = ROOT / "requirements/cpu.txt"


def _pins() -> dict[str, str]:
    rows = [row for row in LOCK.read_text().splitlines() if row and not row.startswith("#")]
    assert all(re.fullmatch(r"[a-z0-9.-]+==\S+", row) for row in rows)
    return dict(row.split("==") for row in rows)


def test_the_lock_keeps_cuda_builds_out():
    pins = _pins()
    assert pins["torch"] == "2.13.0+cpu"
    assert not {"torchvision", "torchaudio", "torchcodec", "triton"} & set(pins)
    assert not any(name.startswith("nvidia") for name in pins)


def test_the_lock_satisfies_the_project():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    pins = _pins()
    for text in (*project["dependencies"], *extras["cpu"], *extras["mirrors"], *extras["dev"]):
        requirement = Requirement(text)
        assert requirement.specifier.contains(pins[requirement.name]), text


def test_setup_script_is_valid_bash():
    subprocess.run(["bash", "-n", ROOT / "scripts/setup.sh"], check=True)
    subprocess.run(["bash", "-n", ROOT / ".ci/run"], check=True)


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (["demo"], "train recipes/demo/gspo-moe-cpu.toml --overwrite"),
        (["demo", "seed=5"], "seed=5"),
        (["demo", "seed=5", "name=mine", "args=num_steps=3"], "name=mine seed=5 num_steps=3"),
        (["demo-control", "seed=2"], "name=demo-control objective.shuffle_advantages=true seed=2"),
        (["test"], "lint-imports"),
        (["test-fast"], "not engine"),
    ],
)
def test_make_targets(arguments, wanted):
    done = subprocess.run(
        ["make", "--dry-run", *arguments], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert wanted in re.sub(r"[\s\\]+", " ", done.stdout)
