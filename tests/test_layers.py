"""The import contracts of pyproject.toml hold, and a wrong import breaks them."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LINT = [
    sys.executable,
    "-c",
    "from importlinter.cli import lint_imports_command as c; c()",
    "--no-cache",
]


@pytest.fixture(scope="module")
def copy(tmp_path_factory) -> Path:
    """The package and its contracts, free to be broken."""
    path = tmp_path_factory.mktemp("layers")
    shutil.copytree(
        ROOT / "grpo_megatron", path / "grpo_megatron", ignore=shutil.ignore_patterns("__pycache__")
    )
    shutil.copy(ROOT / "pyproject.toml", path)
    return path


def test_contracts_hold():
    done = subprocess.run(LINT, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert "4 kept, 0 broken" in done.stdout


@pytest.mark.parametrize(
    ("file", "code", "contract"),
    [
        ("config/bad.py", "from grpo_megatron.plan import layout", "layers"),
        ("trainer/bad.py", "def f():\n    from grpo_megatron.rollout import seeds", "layers"),
        ("rewards/bad.py", "from grpo_megatron.environments import protocol", "layers"),
        ("environments/bad.py", "from grpo_megatron.rollout import client", "layers"),
        ("environments/worse.py", "import torch", "torch"),
        ("plan/bad.py", "def f():\n    import torch", "torch"),
        ("controller/bad.py", "import vllm.config", "vllm"),
        ("weights/bad.py", "from megatron.core import parallel_state", "megatron"),
        ("newcomer.py", "", "layers"),
    ],
)
def test_a_wrong_import_breaks_its_contract(copy, file, code, contract):
    bad = copy / "grpo_megatron" / file
    bad.write_text(code + "\n")
    try:
        done = subprocess.run(
            [*LINT, "--contract", contract], cwd=copy, capture_output=True, text=True
        )
    finally:
        bad.unlink()
    assert done.returncode != 0
    assert bad.stem in done.stdout + done.stderr


def test_every_package_is_in_each_contract():
    contracts = {
        contract["id"]: contract
        for contract in tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"][
            "importlinter"
        ]["contracts"]
    }
    every = {
        f"grpo_megatron.{path.stem}"
        for path in (ROOT / "grpo_megatron").iterdir()
        if path.stem[:1] != "_" and (path.suffix == ".py" or (path / "__init__.py").exists())
    }
    allowed = {
        "vllm": {"grpo_megatron.rollout"},
        "megatron": {
            "grpo_megatron.trainer",
            "grpo_megatron.checkpoints",
            "grpo_megatron.trace",
        },
    }
    for name, packages in allowed.items():
        assert set(contracts[name]["source_modules"]) == every - packages
