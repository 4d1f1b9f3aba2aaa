"""Which samples become the responses of a data set."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np

from grpo_megatron.config.run import RejectionConfig
from grpo_megatron.controller.rejection import _responses
from grpo_megatron.data.dataset_answers import unsampled

WORDS = SimpleNamespace(encode=lambda text: text.split())


def test_empty_samples_are_no_responses():
    """Also where their reward calls them correct."""
    texts = ["", "5", " \n", "five", "5 "]
    completions = [unsampled([1], 0, "stop", text) for text in texts]
    group = SimpleNamespace(group=SimpleNamespace(completions=completions))
    selection = SimpleNamespace(correct=lambda group: np.ones(len(texts)))
    assert _responses(group, selection, RejectionConfig(), WORDS) == ["5", "five"]
