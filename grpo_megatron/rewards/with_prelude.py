"""Inside of a sandbox: runs a program that has the names of a prelude.

    with_prelude.py PRELUDE PROGRAM

A prelude of many imports takes as long as Python's start, and so it runs only where the program
uses a name that it does not define."""

import builtins
import sys
from collections.abc import Iterator
from symtable import SymbolTable, symtable
from types import ModuleType


def lacks_names(source: bytes, path: str) -> bool:
    """Whether a program uses a name that neither it nor Python defines. SyntaxError where it is no
    program."""
    used = set()
    defined = set()
    for table in _tables(symtable(source.decode(errors="replace"), path, "exec")):
        for symbol in table.get_symbols():
            is_of_program = table.get_type() == "module" or symbol.is_global()
            if not is_of_program:
                continue
            if symbol.is_assigned() or symbol.is_imported() or symbol.is_namespace():
                defined.add(symbol.get_name())
            else:
                used.add(symbol.get_name())
    return not used <= defined | set(dir(builtins)) | {"__file__"}


def _tables(table: SymbolTable) -> Iterator[SymbolTable]:
    """Yield a table of names and those inside of it."""
    yield table
    for child in table.get_children():
        yield from _tables(child)


def main(prelude: str, path: str) -> None:
    """Run the program as Python's main module would, maybe after the prelude."""
    with open(path, "rb") as file:
        source = file.read()
    module = ModuleType("__main__")
    module.__file__ = path
    sys.modules["__main__"] = module
    sys.argv = [path]
    if lacks_names(source, path):
        with open(prelude, "rb") as file:
            exec(compile(file.read(), prelude, "exec"), vars(module))
    exec(compile(source, path, "exec"), vars(module))


if __name__ == "__main__":
    main(*sys.argv[1:])
