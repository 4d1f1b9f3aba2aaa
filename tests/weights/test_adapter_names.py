"""Names of adapters' tensors in a publish."""

from __future__ import annotations

import pytest

from grpo_megatron.weights.adapter_names import parts_of_name, published_name

NAME = "model.layers.0.self_attn.q_proj.lora_A.weight"


@pytest.mark.parametrize("domain", ["", "math", "code, easy/hard"])
def test_a_name_says_the_domain(domain):
    assert parts_of_name(published_name(domain, NAME)) == (domain, NAME)


def test_adapters_of_all_domains_have_the_names_of_peft():
    assert published_name("", NAME) == NAME
    assert published_name("math", NAME) == f"math/{NAME}"
