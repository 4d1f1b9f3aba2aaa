"""Tensors with and without numbers, and the bytes that live ones hold; no Megatron."""

from __future__ import annotations

import gc

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from grpo_megatron.trace.memory import LiveMemory
from grpo_megatron.trace.values import DEVICE, Values


class Computed(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.values = Values()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return self.values.compute(func, args, kwargs or {})


def test_whole_numbers_on_the_device_are_known():
    mode = Computed()
    with mode:
        positions = torch.arange(6, device=DEVICE)
        doubled = positions * 2
        assert doubled.tolist() == [0, 2, 4, 6, 8, 10]
        assert mode.values.lies_on_device(doubled)
        assert not mode.values.lies_on_device(torch.arange(6))


def test_other_numbers_are_not_and_count_as_one_where_they_are_asked_for():
    with Computed():
        states = torch.randn(3, 4, device=DEVICE)
        assert states.is_meta
        assert float(states.sum()) == 1.0
        assert bool(states.sum() > 5)
        assert states.tolist() == [[1.0] * 4] * 3
        assert states.argmax(-1).cpu().tolist() == [1] * 3


def test_known_numbers_decide_shapes_of_unknown_ones():
    with Computed():
        states = torch.randn(10, 4, device=DEVICE)
        lengths = torch.tensor([3, 7])
        assert [part.size(0) for part in states.split(lengths.tolist())] == [3, 7]
        mask = torch.arange(10) < 6
        assert states[mask].shape == (6, 4)
        assert states.masked_select(mask[:, None]).shape == (24,)
        assert states[states[:, 0] > 0].shape == (10, 4)  # nobody knows: all of them


def test_a_known_tensor_does_not_take_on_unknown_numbers():
    with Computed():
        known = torch.arange(4)
        known.copy_(torch.randn(4, device=DEVICE))
        known += torch.ones(4, device=DEVICE).long()
        assert known.tolist() == [0, 1, 2, 3]


def test_a_storage_on_the_host_is_forgotten_when_it_ends():
    mode = Computed()
    with mode:
        copy = torch.empty(1 << 21, device=DEVICE).cpu()
        assert copy.is_meta and not mode.values.lies_on_device(copy)
        assert len(mode.values.of_host) == 1
        del copy
        gc.collect()
        assert not mode.values.of_host


def test_the_second_answer_to_an_operator_has_memory_of_its_own():
    with Computed():
        first = torch.empty(4, 8, device=DEVICE)
        weight = torch.empty(8, 2, device=DEVICE)
        results = [first @ weight for _ in range(2)]
        addresses = {result.untyped_storage()._cdata for result in results}
        assert len(addresses) == 2 and results[1].shape == (4, 2)
        view = first.t()
        assert view.untyped_storage()._cdata == first.untyped_storage()._cdata
        changed = first.add_(1)
        assert changed is first


def test_live_bytes_rise_and_fall_with_their_tensors():
    memory = LiveMemory()
    tensors = [torch.empty(1000, dtype=dtype) for dtype in (torch.float32, torch.bfloat16)]
    for number, tensor in enumerate(tensors):
        memory.hold(tensor.untyped_storage(), f"owner {number}")
    assert memory.bytes == 6000
    memory.note_peak("here", 2)
    view = tensors[0][:10]
    assert memory.knows(view.untyped_storage())
    del tensors, tensor
    gc.collect()
    assert memory.bytes == 4000  # the view holds the whole
    del view
    gc.collect()
    assert memory.bytes == 0
    assert memory.peak.bytes == 6000 and memory.peak.by_owner == {"owner 0": 4000, "owner 1": 2000}
