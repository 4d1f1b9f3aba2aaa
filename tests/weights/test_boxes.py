"""Boxes of tensors, and the views that show them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from grpo_megatron.weights.boxes import Box, box_of_view, whole_box

SHAPE = (4, 6, 5)


def numbers(shape=SHAPE) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel()).view(shape)


def boxes(shape=SHAPE):
    """Any box of a tensor of `shape`."""

    def axis(size):
        return st.integers(0, size - 1).flatmap(
            lambda start: st.tuples(st.just(start), st.integers(1, size - start))
        )

    return st.tuples(*map(axis, shape)).map(
        lambda axes: Box(tuple(a[0] for a in axes), tuple(a[1] for a in axes))
    )


def elements(box: Box) -> set[int]:
    return set(box.view_in(whole_box(SHAPE), numbers()).flatten().tolist())


@given(one=boxes(), other=boxes())
@example(one=Box((0, 0, 0), (2, 6, 5)), other=Box((2, 0, 0), (2, 6, 5)))  # side by side
@settings(max_examples=300, deadline=None)
def test_intersections_are_those_of_their_elements(one, other):
    common = one.intersect(other)
    expected = elements(one) & elements(other)
    assert (common is None) == (not expected)
    assert (elements(common) if common else set()) == expected
    assert one.contains(other) == (elements(other) <= elements(one))
    if common:
        held = one.view_in(whole_box(SHAPE), numbers()).clone()
        assert set(common.view_in(one, held).flatten().tolist()) == expected


@given(box=boxes())
@settings(max_examples=300, deadline=None)
def test_a_view_of_a_box_is_recognised(box):
    view = box.view_in(whole_box(SHAPE), numbers())
    assert box_of_view(SHAPE, view.shape, view.stride(), view.storage_offset()) == box
    assert box.num_elements == view.numel()


@pytest.mark.parametrize(
    ("view", "expected"),
    [
        (lambda t: t[1], Box((1, 0, 0), (1, 6, 5))),
        (lambda t: t[1, 2:4].flatten(), Box((1, 2, 0), (1, 2, 5))),
        (lambda t: t.view(24, 5)[6:12], Box((1, 0, 0), (1, 6, 5))),
        (lambda t: t.view(2, 2, 6, 5)[1], Box((2, 0, 0), (2, 6, 5))),
        (lambda t: t.view(-1)[7:8], Box((0, 1, 2), (1, 1, 1))),
        (lambda t: t[:, 3].unsqueeze(1), Box((0, 3, 0), (4, 1, 5))),
        (lambda t: t.view(-1)[3:9], None),  # the end of one row and the begin of the next
        (lambda t: t.view(24, 5)[5:7], None),
        (lambda t: t.transpose(1, 2), None),  # in another order
        (lambda t: t[:, ::2], None),
        (lambda t: t[:0], None),
        (lambda t: t[:1].expand(4, 6, 5), None),
    ],
)
def test_views_that_are_boxes_and_others(view, expected):
    seen = view(numbers())
    found = box_of_view(SHAPE, seen.shape, seen.stride(), seen.storage_offset())
    assert found == expected
    if expected is not None:
        shown = expected.view_in(whole_box(SHAPE), numbers())
        assert torch.equal(shown.reshape(seen.shape), seen)


def test_a_number_is_a_box():
    assert box_of_view((), (), (), 0) == whole_box(())
    assert whole_box(()).num_elements == 1
