"""What `torch.cuda` says and does where devices are pretended."""

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch

from grpo_megatron.pretended_cuda import synchronisations
from grpo_megatron.pretended_cuda.current import NUM_DEVICES, current_device, set_current

CAPABILITY = (9, 0)
"""Of an H100."""
MEMORY_BYTES = 80 << 30


class Event:
    """A point in a queue; here all that was queued has been done."""

    def __init__(self, *args: Any, **kwargs: Any):
        self.is_recorded = False

    def record(self, stream: "Stream | None" = None) -> None:
        """Mark where the stream is."""
        self.is_recorded = True

    def wait(self, stream: "Stream | None" = None) -> None:
        """Let a stream wait, not the host."""

    def query(self) -> bool:
        """Say whether the queue has reached it."""
        return True

    def synchronize(self) -> None:
        """Let the host wait."""
        synchronisations.note(synchronisations.WAIT)

    def elapsed_time(self, end: "Event") -> float:
        """Milliseconds from here to `end`."""
        return 0.0


class Stream:
    """A queue; what is put into it is done at once."""

    def __init__(self, device: Any = None, priority: int = 0, **kwargs: Any):
        self.device = current_device()
        self.priority = priority
        self.cuda_stream = id(self)

    def wait_event(self, event: Event) -> None:
        """Let the stream wait, not the host."""

    def wait_stream(self, stream: "Stream") -> None:
        """Let the stream wait, not the host."""

    def record_event(self, event: Event | None = None) -> Event:
        """Mark where the stream is."""
        event = event or Event()
        event.record(self)
        return event

    def query(self) -> bool:
        """Say whether the queue is empty."""
        return True

    def synchronize(self) -> None:
        """Let the host wait."""
        synchronisations.note(synchronisations.WAIT)


_DEFAULT_STREAM = Stream()
_current: list[Stream] = [_DEFAULT_STREAM]


@contextlib.contextmanager
def stream(queue: Stream | None) -> Iterator[None]:
    """Put into `queue` what the block queues."""
    if queue is None:
        yield
        return
    _current.append(queue)
    try:
        yield
    finally:
        _current.pop()


class DeviceContext:
    """Work on another device inside a block, as `torch.cuda.device` does."""

    def __init__(self, device: Any):
        self.index = _index_of(device)
        self.before = 0

    def __enter__(self) -> None:
        self.before = torch.cuda.current_device()
        if self.index is not None:
            torch.cuda.set_device(self.index)

    def __exit__(self, *_: object) -> None:
        torch.cuda.set_device(self.before)


def _index_of(device: Any) -> int | None:
    if isinstance(device, int):
        return device
    if device is None:
        return None
    return torch.device(device).index


def _properties(device: Any = None) -> SimpleNamespace:
    major, minor = CAPABILITY
    index = _index_of(device)
    if index is None:
        index = current_device().index
    return SimpleNamespace(
        name="pretended GPU",
        uuid=f"pretended-{index}",
        major=major,
        minor=minor,
        total_memory=MEMORY_BYTES,
        multi_processor_count=132,
        warp_size=32,
    )


def _wait(device: Any = None) -> None:
    synchronisations.note(synchronisations.WAIT)


def _random_state(device: Any = "cuda") -> torch.Tensor:
    return torch.get_rng_state()


def _set_random_state(state: torch.Tensor, device: Any = "cuda") -> None:
    torch.set_rng_state(state)


def _call_now(function: Callable[..., None], **kwargs: Any) -> None:
    function()


def _nothing() -> Callable[..., None]:
    """Make a function that does nothing; torch's compiler wants each to be another object."""

    def nothing(*args: Any, **kwargs: Any) -> None:
        return None

    return nothing


def install(set_device_of_guard: Callable[[int], None]) -> None:
    """Replace what asks the driver."""
    cuda: Any = torch.cuda

    def set_device(device: Any) -> None:
        index = _index_of(device)
        if index is not None and index >= 0:
            set_current(index)
            set_device_of_guard(index)

    replaced = {
        # which devices there are
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: NUM_DEVICES,
        "current_device": lambda: current_device().index,
        "set_device": set_device,
        "device": DeviceContext,
        "get_device_capability": lambda device=None: CAPABILITY,
        "get_device_name": lambda device=None: _properties().name,
        "get_device_properties": _properties,
        "is_bf16_supported": lambda *a, **k: True,
        "_initialized": True,
        "_lazy_init": _nothing(),
        "init": _nothing(),
        "_lazy_call": _call_now,
        # queues
        "Stream": Stream,
        "Event": Event,
        "stream": stream,
        "current_stream": lambda device=None: _current[-1],
        "default_stream": lambda device=None: _DEFAULT_STREAM,
        "set_stream": _nothing(),
        "synchronize": _wait,
        "is_current_stream_capturing": lambda: False,
        # random numbers: those of the CPU, so that both give the same
        "default_generators": defaultdict(lambda: torch.default_generator),
        "manual_seed": _seed,
        "manual_seed_all": _nothing(),  # torch.manual_seed seeds the CPU's, which is this one
        "get_rng_state": _random_state,
        "set_rng_state": _set_random_state,
        # memory
        "memory_allocated": lambda device=None: 0,
        "memory_reserved": lambda device=None: 0,
        "max_memory_allocated": lambda device=None: 0,
        "max_memory_reserved": lambda device=None: 0,
        "memory_stats": lambda device=None: defaultdict(int),
        "mem_get_info": lambda device=None: (MEMORY_BYTES, MEMORY_BYTES),
        "reset_peak_memory_stats": _nothing(),
        "empty_cache": _nothing(),
        "ipc_collect": _nothing(),
    }
    for name, stand_in in replaced.items():
        setattr(cuda, name, stand_in)
    cuda.random.get_rng_state = _random_state
    cuda.random.set_rng_state = _set_random_state


def _seed(seed: int) -> None:
    torch.default_generator.manual_seed(seed)
