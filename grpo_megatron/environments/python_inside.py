"""Runs the cells of an episode inside of the sandbox: `{"cells": [source], "seed": 0, "mark": …}`
comes by standard input.

All cells but the last run silently, for what they define. Then comes the mark, what the last one
prints, and the mark again where it has run to its end."""

import ast
import code
import contextlib
import io
import json
import random
import sys


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


def main() -> None:
    """Run what standard input says."""
    task = json.load(sys.stdin)
    random.seed(task["seed"])
    interpreter = Interpreter()
    real = sys.stdout
    for source in task["cells"][:-1]:
        sys.stdout = sys.stderr = io.StringIO()
        interpreter.run(source)
    sys.stdout = sys.stderr = real
    print(task["mark"], flush=True)
    interpreter.run(task["cells"][-1])
    print(task["mark"], file=real, flush=True)


if __name__ == "__main__":
    main()
