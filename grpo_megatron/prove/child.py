"""One part, in a process of its own: `python -m grpo_megatron.prove.child MODULE:NAME FOLDER`.

Its evidence is in `FOLDER/evidence.json`; the exit code is that of the error that ended it."""

import importlib
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import msgspec

from grpo_megatron.errors import GrpoMegatronError
from grpo_megatron.prove.conditions import Conditions
from grpo_megatron.prove.evidence import EVIDENCE_FILE, Recorder
from grpo_megatron.prove.part import Job

CONDITIONS_FILE = "conditions.json"
"""Beside the folders of the parts."""


def read_conditions(path: Path) -> Conditions:
    """Read what the probe wrote. Raises OSError or msgspec.MsgspecError."""
    return msgspec.json.decode(path.read_bytes(), type=Conditions)


def main(function: str, folder: Path) -> int:
    """Run the part whose function is `module:name`; return the exit code."""
    module, _, name = function.partition(":")
    run: Callable[[Job], None] = getattr(importlib.import_module(module), name)
    recorder = Recorder(folder / EVIDENCE_FILE)
    job = Job(folder, read_conditions(folder.parent / CONDITIONS_FILE), recorder)
    code = 0
    try:
        run(job)
        recorder.evidence.finished = True
    except GrpoMegatronError as error:
        traceback.print_exc()
        recorder.evidence.error = str(error)
        code = error.exit_code
    except Exception as error:
        traceback.print_exc()
        recorder.evidence.error = f"{type(error).__name__}: {error}"
        code = 1
    recorder.save()
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2])))
