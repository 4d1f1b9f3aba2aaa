"""Shipped data is found in a checkout and in a wheel."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from grpo_megatron import assets
from grpo_megatron.errors import SetupError

ROOT = Path(__file__).parents[1]


def test_checkout():
    assert assets.root() == ROOT
    assert "demo/gspo-moe-cpu" in assets.names(assets.root() / "recipes")
    assert "tiny-qwen3-moe" in assets.names(assets.root() / "models")
    assert (assets.root() / "slurm").is_dir()


def test_an_installation_without_assets_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(assets, "_PACKAGE", tmp_path / "grpo_megatron")
    with pytest.raises(SetupError, match="reinstall"):
        assets.root()


def test_display_is_short(tmp_path, monkeypatch):
    assert assets.display(ROOT / "models/x.toml") == "models/x.toml"
    monkeypatch.chdir(tmp_path)
    assert assets.display(ROOT / "models/x.toml") == "models/x.toml"
    assert assets.display(tmp_path / "mine.toml") == "mine.toml"
    assert assets.display(Path("/elsewhere/x.toml")) == "/elsewhere/x.toml"


def test_links_in_a_circle_are_displayed(tmp_path):
    """Who cannot read the file says so by its name."""
    link = tmp_path / "config.json"
    link.symlink_to(link)
    assert assets.display(link) == str(link)


def test_wheel_carries_everything(tmp_path):
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)],
        cwd=ROOT,
        check=True,
        capture_output=True,
    )
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
        names = archive.namelist()
    assert not any(name.startswith(("models/", "recipes/", "tests/")) for name in names)
    for folder in (ROOT / "grpo_megatron/stages/report_assets", ROOT / "grpo_megatron/telemetry"):
        for file in folder.iterdir():
            assert file.is_dir() or str(file.relative_to(ROOT)) in names
    code = (
        "from grpo_megatron import assets; from grpo_megatron.plan.resolve import resolve; "
        "print(assets.root(), resolve('demo/gspo-moe-cpu').config.name)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path / "site",
        check=True,
        capture_output=True,
        text=True,
    )
    assert done.stdout.split() == [str(tmp_path / "site/grpo_megatron/_assets"), "demo"]


def test_shipped_inputs_are_found_from_anywhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shipped = Path("recipes/data/tiny-agents/questions.jsonl")
    assert assets.input_path(shipped) == ROOT / shipped
    assert assets.input_path(Path("recipes/README.md")) == tmp_path / "recipes/README.md"
    shipped.parent.mkdir(parents=True)
    shipped.write_text("one's own")
    assert assets.input_path(shipped) == tmp_path / shipped
