"""Models and recorded steps of the parts are what transformers and the store take them for."""

from __future__ import annotations

import numpy as np
import pytest

from grpo_megatron.batching.store import SampleTable
from grpo_megatron.plan.model_facts import facts_from_hf
from grpo_megatron.prove.random_weights import weight_shapes, write_model
from grpo_megatron.prove.workload import ENGINE_NARROW, NARROW, WIDE, Lengths, models, write_step
from grpo_megatron.routing.shape import RouteShape, RouteStatus

SIZES = {"wide": WIDE, "narrow": NARROW, "engine": ENGINE_NARROW}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", ["dense", "moe", "latent"])
def test_weights_are_those_of_transformers(tmp_path, size, name):
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    hf = models(SIZES[size])[name]
    write_model(tmp_path / "model", hf)
    config = AutoConfig.from_pretrained(tmp_path / "model", local_files_only=True)
    model, report = AutoModelForCausalLM.from_pretrained(
        tmp_path / "model",
        config=config,
        dtype=torch.float32,
        local_files_only=True,
        output_loading_info=True,
    )
    assert not report["missing_keys"] and not report["unexpected_keys"]
    assert not report["mismatched_keys"]
    num_elements = sum(int(np.prod(shape)) for _, shape in weight_shapes(hf))
    stored = list(model.parameters())
    stored += [buffer for key, buffer in model.named_buffers() if "e_score_correction" in key]
    assert sum(tensor.numel() for tensor in stored) == num_elements


def test_a_step_has_its_lengths_updates_and_routes(tmp_path):
    hf = models(NARROW)["moe"]
    directory = write_step(
        tmp_path / "step",
        hf,
        Lengths(prompt=5, shortest=4, longest=9),
        num_groups=6,
        group_size=2,
        num_updates=3,
        with_routes=True,
    )
    table = SampleTable(directory)
    assert len(table) == 12 and set(table.prompt_lengths) == {5}
    assert table.completion_lengths.min() >= 4 and table.completion_lengths.max() <= 9
    assert np.bincount(table.update).tolist() == [4, 4, 4]
    facts = facts_from_hf(hf)
    shape = RouteShape(facts.moe_layers, facts.num_experts_per_token, facts.num_experts)
    for row in range(len(table)):
        ids, status = table.routes(row, shape.layers, shape)
        assert (status == RouteStatus.OK).all()
        assert ids.shape[1] == 5 + table.completion_lengths[row] - 1
