"""Megatron-Core on a machine without CUDA, over gloo. A no-op where CUDA exists.

Megatron calls `torch.cuda` unconditionally. Each replacement below names a call site, with lines
of release 0.16.1 unless it says another; without it Megatron raises there, or (where said)
silently does something else. Must run before `megatron` is imported for the first time."""

import functools
import importlib.util
import logging
import sys
import types
import warnings
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.utils._device

CPU = torch.device("cpu")
_CUDA: Any = torch.cuda
"""To replace attributes of it by what has other types."""
_TENSOR: Any = torch.Tensor
"""Likewise."""


@functools.cache
def install() -> None:
    """Replace what Megatron calls and a CPU has not, once; nothing where CUDA exists.

    Raises ImportError where Megatron was imported before."""
    if torch.cuda.is_available():
        return
    if "megatron.core.tensor_parallel.random" in sys.modules:
        raise ImportError(
            "megatron was imported before grpo_megatron.trainer.megatron.platform: it would keep "
            "functions that need CUDA, and seed no random numbers"
        )
    stand_in_for_triton_kernels()
    _replace_streams()
    _replace_random_state()
    _redirect_device_literals()
    _name_cpu_tensors_as_cuda_for_the_optimizer()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Megatron warns of absent CUDA packages at import
        _split_sizes_as_numpy()
        _uneven_collectives()


def stand_in_for_triton_kernels() -> None:
    """moe/paged_stash.py:12 of 0.19.2 imports kernels, and all of `megatron.core` imports that.

    They need Triton, which builds of torch for the CPU do not bring. Only `moe_paged_stash`, which
    is never on here, calls them."""
    if importlib.util.find_spec("triton") is not None:
        return
    kernels: Any = types.ModuleType("megatron.core.transformer.moe.ops.paged_stash")
    kernels.GLOBAL_BLOCK_SIZE = 1024
    kernels.paged_stash_copy_kernel = None
    kernels.paged_stash_pop_kernel = None
    sys.modules[kernels.__name__] = kernels


class _Queue:
    """A CPU has one queue: all streams are the same one, and every event has happened."""

    def __init__(self, *args: Any, **kwargs: Any): ...

    def record(self, *args: Any) -> "_Queue":
        return self

    wait = query = synchronize = wait_stream = wait_event = record_event = record

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Queue)

    def __hash__(self) -> int:
        return 0


def _replace_streams() -> None:
    _CUDA.current_device = lambda: CPU  # tensor_parallel/layers.py:261 and about 50 more
    _CUDA.synchronize = lambda *a, **k: None  # p2p_communication.py:398
    _CUDA.Stream = _CUDA.Event = _Queue  # token_dispatcher.py:445
    _CUDA.current_stream = lambda *a: _Queue()  # token_dispatcher.py:871


def _replace_random_state() -> None:
    """The CPU generator plays the CUDA one (tensor_parallel/random.py).

    `_lazy_call` and `manual_seed` do not raise unpatched: they queue the seeding for a CUDA
    initialisation that never comes, which leaves every rank with another stream of numbers."""

    def get_rng_state(device: object = "cuda") -> torch.Tensor:
        return torch.get_rng_state()

    _CUDA.default_generators = defaultdict(lambda: torch.default_generator)  # random.py:103
    _CUDA._lazy_call = lambda function, **k: function()  # random.py:111
    _CUDA.manual_seed = torch.default_generator.manual_seed  # random.py:237,422
    _CUDA.get_rng_state = _CUDA.random.get_rng_state = get_rng_state  # random.py:55,235
    logging.getLogger("megatron.core.tensor_parallel.random").addFilter(
        lambda record: "CPU RNG state changed" not in record.getMessage()
    )  # random.py:280


def _redirect_device_literals() -> None:
    """`device="cuda"`: schedules.py:596, clip_grads.py:103, optimizer.py:485, moe_utils.py:998."""
    # `torch.device("meta")` knows constructors by identity, from its first use on: the originals.
    torch.utils._device._device_constructors()
    for name in ("zeros", "tensor", "ones", "empty"):
        original = getattr(torch, name)

        @functools.wraps(original)
        def redirected(*args: Any, _original: Any = original, **kwargs: Any) -> torch.Tensor:
            if str(kwargs.get("device")).startswith("cuda"):
                kwargs["device"] = CPU
            tensor: torch.Tensor = _original(*args, **kwargs)
            return tensor

        setattr(torch, name, redirected)
    _TENSOR.cuda = lambda self, *a, **k: self  # language_module.py:244


def _name_cpu_tensors_as_cuda_for_the_optimizer() -> None:
    """`megatron.core.optimizer`, which alone is answered so, compares `tensor.type()` with
    'torch.cuda.FloatTensor': distrib_optimizer.py:361,420, optimizer.py:671, clip_grads.py:167."""
    original = _TENSOR.type

    def type_(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        result: Any = original(self, *args, **kwargs)
        caller = sys._getframe(1).f_globals.get("__name__", "")
        if not args and not kwargs and caller.startswith("megatron.core.optimizer"):
            result = result.replace("torch.", "torch.cuda.", 1)
        return result

    _TENSOR.type = type_


def _split_sizes_as_numpy() -> None:
    """moe_utils.py:1093 leaves CPU tensors unconverted, and all_to_all wants plain numbers."""
    import megatron.core.transformer.moe.token_dispatcher as dispatcher

    original = dispatcher.maybe_move_tensor_to_cpu

    def move(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        moved = original(tensor, as_numpy, False)
        if as_numpy and torch.is_tensor(moved):
            return moved.numpy()
        return moved

    dispatcher.maybe_move_tensor_to_cpu = move


def _uneven_collectives() -> None:
    """gloo has no all-gather or reduce-scatter of unequal parts (all-to-all with ETP and EP)."""
    import megatron.core.tensor_parallel.mappings as mappings

    gather_equal = mappings._gather_along_first_dim
    scatter_equal = mappings._reduce_scatter_along_first_dim

    @functools.wraps(gather_equal)
    def gather(
        tensor: torch.Tensor,
        group: dist.ProcessGroup,
        output_split_sizes: Sequence[int] | None = None,
        use_global_buffer: bool = False,
    ) -> torch.Tensor:
        if output_split_sizes is None or group.size() == 1:
            gathered: torch.Tensor = gather_equal(
                tensor, group, output_split_sizes, use_global_buffer
            )
            return gathered
        sizes = [int(size) for size in output_split_sizes]
        out = tensor.new_empty([sum(sizes), *tensor.shape[1:]])
        copies = torch.cat([tensor] * group.size())
        dist.all_to_all_single(out, copies, sizes, [tensor.shape[0]] * group.size(), group=group)
        return out

    @functools.wraps(scatter_equal)
    def scatter(
        tensor: torch.Tensor,
        group: dist.ProcessGroup,
        input_split_sizes: Sequence[int] | None = None,
        use_global_buffer: bool = False,
    ) -> torch.Tensor:
        if input_split_sizes is None or group.size() == 1:
            scattered: torch.Tensor = scatter_equal(
                tensor, group, input_split_sizes, use_global_buffer
            )
            return scattered
        total = tensor.clone()
        dist.all_reduce(total, group=group)
        parts: tuple[torch.Tensor, ...] = total.split([int(size) for size in input_split_sizes])
        return parts[group.rank()].clone()

    mappings._gather_along_first_dim = gather
    mappings._reduce_scatter_along_first_dim = scatter
