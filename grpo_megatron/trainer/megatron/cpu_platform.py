"""Megatron-Core 0.16.1 on a machine without CUDA, over gloo. A no-op where CUDA exists.

Megatron calls `torch.cuda` unconditionally. Each replacement below names a call site; without
it Megatron raises there, or (where said) silently does something else. Must run before
`megatron` is imported for the first time."""

import functools
import logging
import sys
import warnings
from collections import defaultdict

import torch
import torch.distributed as dist
import torch.utils._device

CPU = torch.device("cpu")


@functools.cache
def install() -> None:
    if torch.cuda.is_available():
        return
    if "megatron.core.tensor_parallel.random" in sys.modules:
        raise ImportError(
            "megatron was imported before grpo_megatron.trainer.megatron.platform: it would keep "
            "functions that need CUDA, and seed no random numbers"
        )
    _replace_streams()
    _replace_random_state()
    _redirect_device_literals()
    _name_cpu_tensors_as_cuda_for_the_optimizer()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Megatron warns of absent CUDA packages at import
        _split_sizes_as_numpy()
        _uneven_collectives()


class _Queue:
    """A CPU has one queue: all streams are the same one, and every event has happened."""

    def __init__(self, *args, **kwargs): ...

    def record(self, *args):
        return self

    wait = query = synchronize = wait_stream = wait_event = record_event = record

    def __eq__(self, other) -> bool:
        return isinstance(other, _Queue)

    def __hash__(self) -> int:
        return 0


def _replace_streams() -> None:
    torch.cuda.current_device = lambda: CPU  # tensor_parallel/layers.py:261 and about 50 more
    torch.cuda.synchronize = lambda *a, **k: None  # p2p_communication.py:398
    torch.cuda.Stream = torch.cuda.Event = _Queue  # token_dispatcher.py:445
    torch.cuda.current_stream = lambda *a: _Queue()  # token_dispatcher.py:871


def _replace_random_state() -> None:
    """The CPU generator plays the CUDA one (tensor_parallel/random.py).

    `_lazy_call` and `manual_seed` do not raise unpatched: they queue the seeding for a CUDA
    initialisation that never comes, which leaves every rank with another stream of numbers."""
    torch.cuda.default_generators = defaultdict(lambda: torch.default_generator)  # random.py:103
    torch.cuda._lazy_call = lambda function, **k: function()  # random.py:111
    torch.cuda.manual_seed = torch.default_generator.manual_seed  # random.py:237,422
    state = lambda device="cuda": torch.get_rng_state()  # noqa: E731
    torch.cuda.get_rng_state = torch.cuda.random.get_rng_state = state  # random.py:55,235
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
        def redirected(*args, _original=original, **kwargs):
            if str(kwargs.get("device")).startswith("cuda"):
                kwargs["device"] = CPU
            return _original(*args, **kwargs)

        setattr(torch, name, redirected)
    torch.Tensor.cuda = lambda self, *a, **k: self  # language_module.py:244


def _name_cpu_tensors_as_cuda_for_the_optimizer() -> None:
    """`megatron.core.optimizer`, which alone is answered so, compares `tensor.type()` with
    'torch.cuda.FloatTensor': distrib_optimizer.py:361,420, optimizer.py:671, clip_grads.py:167."""
    original = torch.Tensor.type

    def type_(self, *args, **kwargs):
        result = original(self, *args, **kwargs)
        caller = sys._getframe(1).f_globals.get("__name__", "")
        if not args and not kwargs and caller.startswith("megatron.core.optimizer"):
            result = result.replace("torch.", "torch.cuda.", 1)
        return result

    torch.Tensor.type = type_


def _split_sizes_as_numpy() -> None:
    """moe_utils.py:1093 leaves CPU tensors unconverted, and all_to_all wants plain numbers."""
    import megatron.core.transformer.moe.token_dispatcher as dispatcher

    original = dispatcher.maybe_move_tensor_to_cpu

    def move(tensor, as_numpy=False, record_stream=False):
        tensor = original(tensor, as_numpy, False)
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    dispatcher.maybe_move_tensor_to_cpu = move


def _uneven_collectives() -> None:
    """gloo has no all-gather or reduce-scatter of unequal parts (all-to-all with ETP and EP)."""
    import megatron.core.tensor_parallel.mappings as mappings

    gather_equal = mappings._gather_along_first_dim
    scatter_equal = mappings._reduce_scatter_along_first_dim

    def gather(tensor, group, output_split_sizes=None, use_global_buffer=False):
        if output_split_sizes is None or group.size() == 1:
            return gather_equal(tensor, group, output_split_sizes, use_global_buffer)
        sizes = [int(size) for size in output_split_sizes]
        out = tensor.new_empty([sum(sizes), *tensor.shape[1:]])
        copies = torch.cat([tensor] * group.size())
        dist.all_to_all_single(out, copies, sizes, [tensor.shape[0]] * group.size(), group=group)
        return out

    def scatter(tensor, group, input_split_sizes=None, use_global_buffer=False):
        if input_split_sizes is None or group.size() == 1:
            return scatter_equal(tensor, group, input_split_sizes, use_global_buffer)
        tensor = tensor.clone()
        dist.all_reduce(tensor, group=group)
        return torch.split(tensor, [int(s) for s in input_split_sizes])[group.rank()].clone()

    mappings._gather_along_first_dim = gather
    mappings._reduce_scatter_along_first_dim = scatter
