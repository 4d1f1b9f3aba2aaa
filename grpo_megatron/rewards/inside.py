"""Both ends of a test by asserts, each in a sandbox of its own: the judge evaluates the asserts,
and asks the candidate's process, which need not be trusted, for what is the candidate's.

    judge SOCKET < {"setup": source, "asserts": [source]}
    serve SOCKET PRELUDE PROGRAM

The judge prints `s` once the other end has started and `setup` has run, then for each assert `1`
(passed), `0` (failed) or `?` (the test itself is no good)."""

import builtins
import importlib
import json
import os
import pickle
import sys
from collections.abc import Callable
from typing import Any

PLAIN = (type(None), bool, int, float, str, bytes, tuple, list, dict, set, frozenset)
objects: list[Any] = []  # the candidate's, that are no plain data: the judge has their numbers


_NEVER_RAISED = ("StopIteration", "StopAsyncIteration")
"""They end loops of the judge in place of telling it that something failed."""


class BadTest(Exception):
    """The assert cannot be evaluated, whatever the candidate."""


class Remote:
    """An object of the candidate's, for the judge. It can be called, asked for attributes and
    iterated over; the rest raises, so that no method of the candidate's decides an assert."""

    def __init__(self, number: Any):
        self.number = number

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Have the candidate's process call its object; the arguments must be plain data."""
        return ask("call", self, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        return ask("attribute", self, name)

    def __iter__(self) -> Any:
        return iter(ask("items", self))

    def __bool__(self, *_: object) -> bool:
        raise TypeError("the candidate returned an object that is no plain data")

    __eq__ = __bool__


class Names(dict[str, Any]):
    """Globals of the asserts. Never the candidate's: builtins and the standard library."""

    def __missing__(self, name: str) -> Any:
        if hasattr(builtins, name):
            raise KeyError(name)
        if name in sys.stdlib_module_names:
            return importlib.import_module(name)
        return ask("name", name)


class Sender(pickle.Pickler):
    """Sends plain data; an object of the candidate's goes as its number."""

    def persistent_id(self, obj: Any) -> Any:
        """Return the number under which an object is sent, None for plain data.

        Raises BadTest where the judge would send an object of its own."""
        if type(obj) in PLAIN:
            return None
        if type(obj) is Remote:
            return obj.number
        if is_judge:
            raise BadTest(f"{type(obj).__name__} is no plain data")
        objects.append(obj)
        return len(objects) - 1


class Receiver(pickle.Unpickler):
    """Receives plain data and numbers of objects: nothing that it reads can run code."""

    def find_class(self, module: str, name: str) -> Any:
        """Refuse every class and function, with an UnpicklingError."""
        raise pickle.UnpicklingError(f"{module}.{name} is no plain data")

    def persistent_load(self, number: Any) -> Any:
        """Return the candidate's object, or what stands for it at the judge."""
        if is_judge:
            return Remote(number)
        return objects[number]


def plain(value: Any) -> Any:
    """Return containers of subclasses as their base: a Counter is a dict, a named tuple a tuple."""
    if isinstance(value, dict):
        return {plain(key): plain(item) for key, item in value.items()}
    for kind in PLAIN[-5:]:
        if isinstance(value, kind):
            return kind(map(plain, value))
    return value


def ask(*request: Any) -> Any:
    """Have the candidate's process do something; raises what the candidate raised, by kind."""
    asked.append(request[0])
    Sender(outgoing).dump(plain(request))
    failed, value = Receiver(incoming).load()
    if failed:
        raise error_of(*value)
    return value


def error_of(kinds: list[str], arguments: tuple[Any, ...]) -> Exception:
    """Return an exception of the first of these kinds that is Python's own: the nearest one, with
    its arguments, of what the candidate raised."""
    for name in kinds:
        kind = getattr(builtins, name, None)
        if not isinstance(kind, type) or name in _NEVER_RAISED:
            continue
        if issubclass(kind, Exception):
            error: Exception = kind(*arguments)
            return error
    return RuntimeError(*arguments)


def judge(setup: str, asserts: list[str]) -> None:
    """Evaluate the asserts, once the candidate has started, and write a mark for each."""
    names = Names()
    Receiver(incoming).load()
    exec(setup, names)
    os.write(1, b"s")
    for test in asserts:
        asked.clear()
        try:
            exec(test, names)
            mark = b"1"
            if not asked:
                mark = b"?"
        except BadTest:
            mark = b"?"
        except BaseException:
            mark = b"0"
        os.write(1, mark)


def serve(prelude: str, path: str) -> None:
    """Run the candidate's program after a prelude, then do what the judge asks of its names and
    objects."""
    names: dict[str, Any] = {"__name__": "program"}
    actions: dict[str, Callable[..., Any]] = {
        "name": names.__getitem__,
        "attribute": getattr,
        "items": list,
        "call": lambda function, args, kwargs: function(*args, **kwargs),
    }
    execute(prelude, names)
    Sender(outgoing).dump("started")
    execute(path, names)
    while True:  # the end of the requests, an exception, ends it
        action, *arguments = Receiver(incoming).load()
        try:
            reply = (False, plain(actions[action](*arguments)))
        except Exception as error:
            kinds = [kind.__name__ for kind in type(error).__mro__]
            reply = (True, plain((kinds, error.args)))
        Sender(outgoing).dump(reply)


def execute(path: str, names: dict[str, Any]) -> None:
    """Run a file; what it defines is in `names` then."""
    with open(path, encoding="utf-8") as source:
        exec(compile(source.read(), path, "exec"), names)


if __name__ == "__main__":
    role = sys.argv[1]
    link = int(sys.argv[2])
    is_judge = role == "judge"
    asked: list[Any] = []
    incoming = os.fdopen(link, "rb")
    outgoing = os.fdopen(link, "wb", 0, closefd=False)
    if is_judge:
        tests = json.load(sys.stdin)
        sys.stdout = sys.stderr
        judge(**tests)
    else:
        serve(*sys.argv[3:])
