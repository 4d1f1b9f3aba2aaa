"""Exit codes and messages of the command line, and that it starts fast."""

from __future__ import annotations

import subprocess
import sys

import pytest

import grpo_megatron
from grpo_megatron.cli import run_commands
from grpo_megatron.cli.main import main
from grpo_megatron.errors import ConfigError, GrpoMegatronError

RECIPE = "recipes/demo/gspo-moe-cpu.toml"
HEAVY = {"torch", "vllm", "megatron", "transformers", "numpy", "pyarrow"}


def _subclasses(cls: type) -> list[type]:
    return [cls, *(deep for sub in cls.__subclasses__() for deep in _subclasses(sub))]


def test_a_misspelt_key_stops_before_anything_heavy_is_imported():
    code = (
        "import sys; from grpo_megatron.cli.main import main; "
        f"code = main(['train', {RECIPE!r}, 'trainer.tensor_paralel_size=2']); "
        f"print(sorted({HEAVY!r} & set(sys.modules))); sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stdout == "[]\n"
    assert "trainer.tensor_paralel_size: unknown key" in done.stderr
    assert "write trainer.tensor_parallel_size" in done.stderr
    assert "Traceback" not in done.stderr


def test_violated_layout_rules_are_listed(capsys):
    assert main(["train", RECIPE, "trainer.expert_parallel_size=3"]) == 2
    error = capsys.readouterr().err
    assert "8 experts must be divisible by EP = 3" in error
    assert "must divide num_ranks = 2" in error


@pytest.mark.parametrize("kind", _subclasses(GrpoMegatronError))
def test_each_error_class_has_its_exit_code(kind, monkeypatch, capsys):
    def fail(*_):
        raise kind("broken", where="here", remedy="mend it")

    monkeypatch.setattr(run_commands, "_is_run", fail)
    assert main(["resume", "runs/x"]) == kind.exit_code
    error = capsys.readouterr().err
    assert "error: broken" in error and "mend it" in error


def test_traceback_on_request(monkeypatch):
    monkeypatch.setenv("GRPO_MEGATRON_TRACEBACK", "1")
    with pytest.raises(ConfigError):
        main(["train", "nowhere.toml"])


def test_interrupt(monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(run_commands, "_is_run", interrupt)
    assert main(["resume", "runs/x"]) == 130


@pytest.mark.parametrize("arguments", [["trian"], ["train"], ["train", RECIPE, "--nope"]])
def test_wrong_command_lines(arguments, capsys):
    assert main(arguments) == 2
    assert "Usage" in capsys.readouterr().err


def test_unexpected_errors_are_not_hidden(monkeypatch):
    monkeypatch.setattr(run_commands, "_is_run", lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        main(["resume", "runs/x"])


def test_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"grpo-megatron {grpo_megatron.__version__}\n"
