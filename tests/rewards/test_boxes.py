"""Boxes in images: overlap by hand, in the pixels of the file, and the form of an answer."""

from __future__ import annotations

import math

import pytest

from grpo_megatron.errors import DataError
from grpo_megatron.rewards.boxes import box_iou, format_box

SQUARE = "[10, 20, 30, 40]"


@pytest.mark.parametrize(
    ("completion", "score"),
    [
        (SQUARE, 1),
        ('```json\n[{"bbox_2d": [10,20,30,40], "label": "a cat"}]\n```', 1),
        ("[10.0, 20.0, 30.0, 40.0]", 1),
        ("[20, 20, 40, 40]", 200 / 600),  # half of each
        ("[10, 20, 20, 40], then [10, 20, 30, 40]", 0.5),  # the first one counts
        ("[0, 0, 40, 60]", 400 / 2400),
        ("[30, 20, 50, 40]", 0),  # they touch
        ("[30, 40, 10, 20]", 0),  # right before left
        ("[010, 020.0, 30, 0040]", 1),
        (f"[10, 20, 30, {'4' * 5000}]", 0),
        (f"[{'1' * 400}, 20, {'1' * 400}, 40]", 0),
        ("[10, 20, 30]", 0),
        ("nowhere", 0),
        ("", 0),
    ],
)
def test_overlap(completion, score):
    assert box_iou(completion, SQUARE, metadata={}) == pytest.approx(score)


@pytest.mark.parametrize(
    "answer", ["", "a cat", "[1, 2, 3]", "[5, 5, 5, 9]", "[9, 9, 1, 1]", f"[1, 1, 2, {'9' * 400}]"]
)
def test_an_answer_that_is_no_box_cannot_be_scored(answer):
    assert math.isnan(box_iou(SQUARE, answer, metadata={}))


def test_only_the_answer_counts():
    thought = f"<think>{SQUARE}</think>"
    assert box_iou(f"{thought} none", SQUARE, metadata={}, answer_tag="answer") == 0
    given = f"{thought}<answer>{SQUARE}</answer>"
    assert box_iou(given, SQUARE, metadata={}, answer_tag="answer") == 1


def test_boxes_are_scaled_back_to_the_pixels_of_the_file():
    """A file of 100 x 50 is seen as 112 x 56: 4 x 2 tokens of 28 pixels."""
    sizes = {"width": 100, "height": 50}
    given = "[11.2, 22.4, 33.6, 44.8]"
    fields = ("width", "height")
    scaled = box_iou(given, SQUARE, metadata=sizes, size_fields=fields)
    assert scaled == pytest.approx(1)
    assert box_iou(given, SQUARE, metadata=sizes) < 0.9
    # at most 2 tokens: 56 x 28, so that the same numbers are another box
    small = box_iou(given, SQUARE, metadata=sizes, size_fields=fields, max_pixels=2 * 28 * 28)
    assert small < 0.5


@pytest.mark.parametrize("sizes", [{}, {"width": 100}, {"width": 100, "height": "50"}])
def test_a_row_that_does_not_say_its_size(sizes):
    with pytest.raises(DataError, match="expected pixels of its image") as caught:
        box_iou(SQUARE, SQUARE, metadata=sizes, size_fields=("width", "height"))
    assert "size_fields" in caught.value.remedy


@pytest.mark.parametrize(
    ("completion", "score"),
    [
        (f"<think>there</think><answer>{{'bbox': {SQUARE}}}</answer>", 1),
        (f"<think>there</think>\n<answer>[{{'bbox': {SQUARE}}}]</answer>", 1),
        (f"<think>there</think><answer>{SQUARE}</answer>", 0),  # no object
        ("<think>there</think><answer>{'bbox': [1, 2, 3]}</answer>", 0),
        (f"<think>{{{SQUARE}}}</think><answer>there</answer>", 0),
        (f"<think></think><answer>{{{SQUARE}}}</answer>", 0),
        (f"<answer>{{{SQUARE}}}</answer>", 0),
        (f"<think>a</think><answer>{{{SQUARE}}}</answer> so", 0),
    ],
)
def test_the_form_of_an_answer(completion, score):
    assert format_box(completion, "") == score
