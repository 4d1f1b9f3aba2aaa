"""Runs the cells of an episode inside of the sandbox: `{"cells": [source], "seed": 0, "mark": …}`
comes by standard input.

All cells but the last run silently, for what they define. Then comes the mark, what the last one
prints, and the mark again where it has run to its end. All cells have the same standard output, so
that a later cell prints through what an earlier one has kept of it."""

import ast
import code
import contextlib
import io
import json
import os
import random
import sys
from typing import Any


class Interpreter(code.InteractiveInterpreter):
    """Runs cells, each in the names that the former ones have left."""

    def __init__(self) -> None:
        super().__init__({"__name__": "__main__", "__file__": __file__})
        self._has_raised = False

    def run(self, source: str) -> None:
        """Run a cell. The value of an expression that ends it is shown, as is what it raises."""
        try:
            body = ast.parse(source, "cell").body
            shown: list[ast.stmt] = []
            if body and isinstance(body[-1], ast.Expr):  # `single` shows what loops compute, too
                shown = [body.pop()]
            parts = [
                compile(ast.Module(body, []), "cell", "exec"),
                compile(ast.Interactive(shown), "cell", "single"),
            ]
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            self.showsyntaxerror("cell")
            return
        self._has_raised = False
        with contextlib.suppress(SystemExit):
            for part in parts:
                if not self._has_raised:
                    self.runcode(part)

    def showtraceback(self) -> None:
        """Show what a cell has raised, and remember that it has."""
        self._has_raised = True
        super().showtraceback()


class Screen(io.RawIOBase):
    """Standard output, which can be silent."""

    def __init__(self) -> None:
        self.is_silent = True

    def writable(self) -> bool:
        """It can be written to."""
        return True

    def fileno(self) -> int:
        """Return the descriptor of standard output."""
        return 1

    def write(self, data: Any) -> int:
        """Write the bytes, or as many as are taken, unless it is silent."""
        if self.is_silent:
            return memoryview(data).nbytes
        return os.write(1, data)


def print_to(stream: io.TextIOWrapper) -> None:
    """Have this process print into the stream; an earlier cell may have changed that."""
    for name in ("stdout", "stderr", "__stdout__", "__stderr__"):
        setattr(sys, name, stream)


def main() -> None:
    """Run what standard input says."""
    task = json.load(sys.stdin)
    random.seed(task["seed"])
    interpreter = Interpreter()
    screen = Screen()
    stream = io.TextIOWrapper(
        io.BufferedWriter(screen), encoding=sys.stdout.encoding, errors=sys.stdout.errors
    )
    for source in task["cells"][:-1]:
        print_to(stream)
        interpreter.run(source)
    stream.flush()
    screen.is_silent = False
    print_to(stream)
    print(task["mark"], flush=True)
    interpreter.run(task["cells"][-1])
    print(task["mark"], file=stream, flush=True)


if __name__ == "__main__":
    main()
