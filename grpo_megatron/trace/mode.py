"""Looks at every operator of a rank: computes its shapes, follows memory and collectives."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from grpo_megatron.trace import collectives
from grpo_megatron.trace.collectives import Collective, GroupNames
from grpo_megatron.trace.memory import LiveMemory
from grpo_megatron.trace.places import Places
from grpo_megatron.trace.values import Values, tensors_in


@dataclass(frozen=True)
class Pass:
    """One pass over the micro-batches of a rank."""

    phase: str
    num_microbatches: int


class TraceMode(TorchDispatchMode):
    """While it is on, tensors on the device have no memory, and nothing goes unseen.

    `boundary` is the shape of what one pipeline stage hands to the next."""

    def __init__(self, boundary: Sequence[int]):
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self.values = Values()
        self.memory = LiveMemory()
        self.places = Places()
        self.collectives: list[Collective] = []
        self.passes: list[Pass] = []
        self.num_operators = 0
        self._boundary = boundary
        self._inside_kernel = False
        self._groups = GroupNames()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Answer one operator."""
        self.num_operators += 1
        kwargs = kwargs or {}
        if func.namespace == "c10d":
            return self._collective(func, args, kwargs)
        found = self.values.compute(func, args, kwargs)
        self._follow(found)
        return found

    def in_one_kernel(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Let `function` hold nothing but its result, as if torch had compiled it."""

        def call(*args: Any, **kwargs: Any) -> Any:
            was_inside = self._inside_kernel
            self._inside_kernel = True
            try:
                found = function(*args, **kwargs)
            finally:
                self._inside_kernel = was_inside
            self._follow(found)
            return found

        return call

    def _follow(self, found: Any) -> None:
        """Count storages that this operator made."""
        if self._inside_kernel:
            return
        has_new = False
        for tensor in tensors_in((found,)):
            storage = tensor.untyped_storage()
            if self.memory.knows(storage) or not self.values.lies_on_device(tensor):
                continue
            self.memory.hold(storage, self._owner())
            has_new = True
        if has_new and self.memory.bytes > self.memory.peak.bytes:
            self.memory.note_peak(self.places.describe(), self.num_operators)

    def _owner(self) -> str:
        module = self.places.kind_of_module()
        if module:
            return f"{self.places.phase}: {module}"
        return self.places.phase

    def _collective(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        places = self.places
        record = collectives.described(
            func, args, self._groups, places.phase, places.line(), places.module
        )
        if record is not None:
            self.collectives.append(record)
        collectives.fill_known(func, args, self._boundary)
        return collectives.call(func, args, kwargs)
