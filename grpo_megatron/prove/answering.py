"""What processes that execute requests of a part have in common: answers, and how they end."""

import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from grpo_megatron.prove.ranks import answer_file


def write_answer(folder: Path, number: int, answer: Any) -> None:
    """Let request `number`, from 0, be answered; the file gets its name when it is whole."""
    partial = folder / "answer.partial"
    partial.write_bytes(msgspec.json.encode(answer))
    partial.replace(answer_file(folder, number))


def run_and_exit(main: Callable[[Path], None]) -> NoReturn:
    """Call `main` with the folder of the command line and end, with the exit code of its error.

    At once: others may be inside a collective with this process, or wait for it."""
    code = 0
    try:
        main(Path(sys.argv[1]))
    except Exception as error:
        traceback.print_exc()
        print(f"error: {error}", file=sys.stderr, flush=True)
        code = getattr(error, "exit_code", 1)
    sys.stdout.flush()
    os._exit(code)
