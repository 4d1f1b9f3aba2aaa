"""Where the trainer is: phase, module of the model, line of the code."""

import bisect
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import PurePath
from types import FrameType
from typing import Any

import torch
from torch.autograd.graph import Node

_LIBRARIES = re.compile(r"/(grpo_megatron|megatron)/(?!trace/)")
_NUMBER = re.compile(r"\.\d+")


class Places:
    """Knows the phase that `during` names and, inside of modules it was told of, the module."""

    def __init__(self) -> None:
        self.phase = "start"
        self._modules: list[str] = []
        self._paths: dict[int, str] = {}
        self._first_nodes: list[int] = []
        """Number of the first autograd node after each change of module, ascending."""
        self._module_of: list[str] = []

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Call what happens in the block `phase`."""
        before = self.phase
        self.phase = phase
        try:
            yield
        finally:
            self.phase = before

    def follow(self, model: torch.nn.Module, name: str = "") -> None:
        """Know the modules of `model` by their paths, which begin with `name`, from now on."""
        for path, module in model.named_modules():
            self._paths[id(module)] = f"{name} {path}".strip()
            module.register_forward_pre_hook(self._enter)
            module.register_forward_hook(self._leave, always_call=True)

    def _enter(self, module: torch.nn.Module, inputs: Any) -> None:
        self._modules.append(self._paths[id(module)])
        self._note_nodes()

    def _leave(self, module: torch.nn.Module, inputs: Any, output: Any) -> None:
        self._modules.pop()
        self._note_nodes()

    def _note_nodes(self) -> None:
        self._first_nodes.append(_next_node())
        self._module_of.append(self.module_in_forward)

    @property
    def module_in_forward(self) -> str:
        """Path of the innermost module whose forward runs; empty outside of them."""
        if not self._modules:
            return ""
        return self._modules[-1]

    @property
    def module(self) -> str:
        """Path of the module whose forward or backward runs; empty outside of them."""
        node: Node | None = torch._C._current_autograd_node()
        if node is None or self._modules:
            return self.module_in_forward
        number = node._sequence_nr()
        index = bisect.bisect_right(self._first_nodes, number) - 1
        if index < 0:
            return ""
        return self._module_of[index]

    def kind_of_module(self) -> str:
        """Return the module without the numbers of layers and experts."""
        return _without_numbers(self.module)

    def line(self) -> str:
        """Return file and line of the trainer or of Megatron that runs now."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            file = frame.f_code.co_filename
            if _LIBRARIES.search(file):
                return f"{_short(file)}:{frame.f_lineno}"
            frame = frame.f_back
        return ""

    def describe(self) -> str:
        """Return phase, module and line in one text."""
        parts = [self.phase, self.module, self.line()]
        return ", ".join(part for part in parts if part)


@cache
def _without_numbers(path: str) -> str:
    return _NUMBER.sub("", path)


def _next_node() -> int:
    number: int = torch._C._autograd._get_sequence_nr()
    return number


def _short(file: str) -> str:
    """Return a path from its package on."""
    parts = PurePath(file).parts
    for package in ("megatron", "grpo_megatron"):
        if package in parts:
            first = len(parts) - 1 - parts[::-1].index(package)
            return "/".join(parts[first:])
    return file
