"""The log-prob head against float64 log_softmax, with gradients."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytestmark = pytest.mark.engine

CASE = "tests.trainer.numbers:head"


def expected_head(
    inputs: dict[str, torch.Tensor],
    temperature: float,
    truncated: bool,
) -> dict[str, np.ndarray]:
    hidden = inputs["hidden"].clone().requires_grad_()
    weight = inputs["weight"].clone().requires_grad_()
    logits = hidden[inputs["rows"], 0] @ weight.t() / temperature
    log_p = logits.log_softmax(-1)
    logprobs = log_p.gather(-1, inputs["targets"][:, None])[:, 0]
    entropies = -(log_p.exp() * log_p).sum(-1)
    found = {"logprobs": logprobs, "entropies": entropies}
    if truncated:
        sets = inputs["sets"].clone()
        sets[[3, 8]] = True
        among = logits.masked_fill(~sets, -torch.inf).log_softmax(-1)
        found["untruncated"] = logprobs
        found["logprobs"] = among.gather(-1, inputs["targets"][:, None])[:, 0]
    sum(part @ inputs[name] for part, name in zip(found.values(), "abc", strict=False)).backward()
    return {
        **{name: part.detach().numpy() for name, part in found.items()},
        "squares": log_p.detach().exp().square().sum(-1).numpy(),
        "hidden": hidden.grad.numpy(),
        "weight": weight.grad.numpy(),
    }


@pytest.mark.parametrize("layout", ["w1", "tp2", "tp2_sp"])
@pytest.mark.parametrize("truncated", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize(("vocab_size", "chunk_tokens"), [(93, 1), (93, 5), (93, 1000), (96, 13)])
def test_head(request, layout, temperature, truncated, vocab_size, chunk_tokens):
    from tests.trainer.head_inputs import head_inputs

    size = 1 if layout == "w1" else 2
    found = request.getfixturevalue(f"world{size}").run(
        CASE,
        layout={"tensor_parallel_size": size},
        seed=vocab_size + chunk_tokens,
        vocab_size=vocab_size,
        temperature=temperature,
        chunk_tokens=chunk_tokens,
        sequence_parallel=layout == "tp2_sp",
        truncated=truncated,
    )
    inputs = head_inputs(vocab_size + chunk_tokens, vocab_size)
    for name, expected in expected_head(inputs, temperature, truncated).items():
        np.testing.assert_allclose(found[name], expected, rtol=1e-4, atol=2e-5, err_msg=name)
    assert not found["padding"].any()
    assert len(found["padding"]) == (1 if vocab_size == 93 and size == 2 else 0)


@pytest.mark.parametrize("layout", ["w1", "tp2_sp"])
@pytest.mark.parametrize("truncated", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_logits_that_are_kept_change_no_bit(request, layout, truncated, dtype):
    size = 1 if layout == "w1" else 2
    found = {}
    for keep_logits in (False, True):
        found[keep_logits] = request.getfixturevalue(f"world{size}").run(
            CASE,
            layout={"tensor_parallel_size": size},
            seed=5,
            vocab_size=93,
            temperature=0.7,
            chunk_tokens=5,
            sequence_parallel=layout == "tp2_sp",
            truncated=truncated,
            keep_logits=keep_logits,
            dtype=dtype,
        )
    computed_twice, kept = found[False], found[True]
    element = 4 if dtype == "float32" else 2
    num_columns = -(-93 // size)
    num_tokens = len(kept["logprobs"])
    assert kept["saved"] - computed_twice["saved"] == num_tokens * num_columns * element
    for name in computed_twice.keys() - {"saved"}:
        np.testing.assert_array_equal(kept[name], computed_twice[name], err_msg=name)
