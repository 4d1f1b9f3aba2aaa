"""Functions that a recipe names as `module:function`, from any package or the current directory."""

import importlib
import inspect
import os
import sys
from collections.abc import Callable
from typing import Any

from grpo_megatron.config.suggest import did_you_mean, nearest
from grpo_megatron.errors import GrpoMegatronError

ENVIRONMENT_REWARD = "environment"
"""The reward that is the outcome of an episode: the only one that is no `module:function`."""


def imported(reference: str, kind: type[GrpoMegatronError], what: str) -> Callable[..., Any]:
    """Import `module:function`. The current directory is searched last, so that a file beside the
    recipe needs no package.

    what: the thing in messages, for example "reward". Raises `kind` where the reference is no text
    of this form, there is no such module, it does not import, or it has no such function."""
    module_name = name = ""
    if isinstance(reference, str):  # arguments of a recipe may be anything
        module_name, _, name = reference.partition(":")
    if not (module_name and name):
        raise kind(
            f"{what} {reference!r} is not `module:function`",
            remedy="name it as text: the module, a colon, and the function in it",
        )
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.append(os.getcwd())
    module = _imported_module(module_name, kind)
    function = getattr(module, name, None)
    if function is None:
        wanted = "function"
        if what == "environment":
            wanted = "class or function"
        raise kind(
            f"module {module_name} has no {wanted} {name!r}",
            remedy=_did_you_mean(name, module),
        )
    if not callable(function):
        raise kind(
            f"{reference} is {type(function).__name__}, not a function",
            remedy=_did_you_mean(name, module),
        )
    found: Callable[..., Any] = function
    return found


def with_colon(name: str) -> str | None:
    """Return `module:function` where `name` is `module.function`; else None."""
    module, _, function = name.rpartition(".")
    parts = [*module.split("."), function]
    if not all(part.isidentifier() for part in parts):
        return None
    return f"{module}:{function}"


def _imported_module(name: str, kind: type[GrpoMegatronError]) -> Any:
    try:
        return importlib.import_module(name)
    except Exception as error:
        missing = None
        if isinstance(error, ModuleNotFoundError):
            missing = error.name
        if missing and f"{name}.".startswith(f"{missing}."):
            raise kind(
                f"no module {missing!r}",
                remedy="install it, or run from the directory that holds it",
            ) from error
        raise kind(
            f"module {name} fails to import: {type(error).__name__}: {error}",
            remedy=f'see python -c "import {name}"',
        ) from error


def _did_you_mean(name: str, module: Any) -> str:
    """Suggest functions and classes of the module that are named alike, also those that it imports;
    where none is, list those that it defines, or imports where it defines none."""
    own = []
    others = []
    for known, value in vars(module).items():
        if known.startswith("_") or not (inspect.isfunction(value) or inspect.isclass(value)):
            continue
        if value.__module__ == module.__name__:
            own.append(known)
        else:
            others.append(known)
    if nearest(name, own + others):
        return did_you_mean(name, own + others)
    return did_you_mean(name, own or others)
