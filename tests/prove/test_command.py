"""What the command answers before it runs anything."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from grpo_megatron.cli.main import main


def test_an_unknown_part_gets_one_message_with_the_nearest_name(capsys, tmp_path):
    code = main(["prove", "--only", "layuots", "--to", str(tmp_path / "p")])
    error = capsys.readouterr().err
    assert code == 2
    assert "no part is called 'layuots'" in error and "did you mean 'layouts'" in error
    assert "Traceback" not in error
    assert not (tmp_path / "p").exists()


def test_the_list_names_every_part_and_imports_no_torch():
    script = (
        "import sys; from grpo_megatron.cli.main import main; code = main(['prove', '--list']);"
        "assert 'torch' not in sys.modules, 'torch was imported'; sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for name in ("machine", "device", "layouts", "nodes", "run-moe", "speed", "profile"):
        assert f"{name} " in done.stdout


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="no /proc, which nobody may write")
def test_a_folder_that_cannot_be_written_is_one_message(capsys):
    code = main(["prove", "--only", "machine", "--to", "/proc/prove"])
    error = capsys.readouterr().err
    assert code == 3
    assert "cannot write the folder" in error and "/proc/prove" in error and "--to" in error
    assert "Traceback" not in error


def test_a_folder_of_something_else_is_refused(capsys, tmp_path):
    (tmp_path / "thesis.txt").write_text("years of work")
    code = main(["prove", "--only", "machine", "--to", str(tmp_path)])
    assert code == 2
    assert "no folder of an earlier `prove`" in capsys.readouterr().err
