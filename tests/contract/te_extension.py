"""Transformer Engine without its compiled half.

A module takes the place of `transformer_engine_torch`: it has the enumerations, classes and
functions that the sources of that extension bind, and no function computes. The Python half is as
released; its layers can be made, on the meta device, and check their arguments.
"""

from __future__ import annotations

import enum
import os
import re
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

EXTENSION = "transformer_engine_torch"
_ENUMERATION = re.compile(r'enum_<[^;]*?\(\s*m,\s*"(\w+)"[^;]*;')
_MEMBER = re.compile(r'\.value\(\s*"(\w+)"')
_CLASS = re.compile(r'class_<[^;]*?\(\s*m,\s*"(\w+)"')
_FUNCTION = re.compile(r'm\.def\(\s*"(\w+)"')


def install(sources: Path) -> types.ModuleType:
    """Before Transformer Engine or Megatron is imported; `sources`: what was unpacked."""
    os.environ["NVTE_PROJECT_BUILDING"] = "1"  # then importing it loads no library
    module = types.ModuleType(EXTENSION)
    for text in _binding_texts(sources):
        for found in _ENUMERATION.finditer(text):
            members = _MEMBER.findall(found[0])
            setattr(module, found[1], enum.IntEnum(found[1], members, start=0))
        for name in _CLASS.findall(text):
            setattr(module, name, type(name, (_Unbuilt,), {}))
        for name in _FUNCTION.findall(text):
            setattr(module, name, _not_here(name))
    sys.modules[EXTENSION] = module
    import transformer_engine.common

    transformer_engine.common.load_framework_extension = lambda framework: None
    return module


class _Unbuilt:
    def __init__(self, *_: Any, **__: Any): ...


def _not_here(name: str) -> Any:
    def function(*_: Any, **__: Any) -> Any:
        raise NotImplementedError(f"{EXTENSION}.{name} needs a GPU")

    function.__name__ = name
    return function


def _binding_texts(sources: Path) -> Iterator[str]:
    """C++ of the extension; macros of several lines as one."""
    files = [path for path in sources.rglob("*") if path.suffix in (".cpp", ".h", ".cuh")]
    assert files, f"no sources of {EXTENSION} in {sources}: run make test-contract"
    for path in sorted(files):
        yield path.read_text("utf-8", errors="replace").replace("\\\n", " ")
