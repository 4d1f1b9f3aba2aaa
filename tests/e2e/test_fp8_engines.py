"""Engines that keep their weights in FP8, through the real command.

Their log-probs are transformers' on weights that were rounded to FP8 as a publish rounds them:
every number and every scale arrived, at its place. They are not those of the weights unrounded."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from grpo_megatron.weights.fp8_blocks import dequantise, quantise
from tests.e2e.family_models import differences, wide_settings_of
from tests.e2e.family_runs import train_and_convert
from tests.rollout.engine_models import MATRICES

pytestmark = [pytest.mark.engine]

LAST = 1
FP8 = "rollout.fp8=blockwise"
_SMALL_WEIGHTS = {"initializer_range": 0.05}
"""With large random ones another choice of one expert changes everything."""
TWO_WORKERS = ("rollout.tensor_parallel_size=2",)
TWO_REPLICAS = ("rollout.num_replicas=2",)
WHOLE_EXPERTS = ("rollout.data_parallel_size=2", "rollout.expert_parallel=true")
CASES = [
    ("qwen2", "tp2", TWO_WORKERS),
    ("qwen3", "cp2", TWO_REPLICAS),
    ("llama", "pp2", ("publish.delta=true",)),
    ("seed_oss", "one", TWO_WORKERS),
    ("mistral", "tp2_pp2", ()),
    ("mixtral", "tp2", WHOLE_EXPERTS),
    ("qwen3_moe_all_sparse", "tp2_etp1", TWO_WORKERS),
    ("qwen3_moe_mixed", "pp2_ep2", ()),
    ("deepseek_v2_lite", "ep2", WHOLE_EXPERTS),
    ("deepseek_v3_kernel", "tp2", TWO_WORKERS),
    ("kimi_k2", "pp2_ep2", ()),
    ("glm4_moe", "ep2", TWO_WORKERS),
]


@pytest.mark.families
@pytest.mark.parametrize(("name", "layout", "engines"), CASES)
def test_the_engine_computes_what_transformers_does_with_rounded_weights(
    tmp_path, name, layout, engines
):
    trained, step = train_and_convert(
        tmp_path, wide_settings_of(name) | _SMALL_WEIGHTS, layout, FP8, *engines, last=LAST
    )
    of_weights = differences(trained, step)
    num_rounded = round_to_fp8(trained)
    errors = differences(trained, step)
    print(
        f"{name} {layout}: median {np.median(errors):.2g} from {num_rounded} rounded matrices,"
        f" {np.median(of_weights):.2g} from the weights as they are"
    )
    assert np.median(errors) < 1e-5
    assert (errors > 1e-3).mean() <= 0.01
    assert np.median(of_weights) > 1e-4, "weights are in FP8"


def round_to_fp8(checkpoint: Path) -> int:
    """Make every matrix of a layer what FP8 numbers and scales make of it; returns how many."""
    count = 0
    for file in checkpoint.glob("*.safetensors"):
        weights = load_file(file)
        for name, weight in weights.items():
            if name.endswith(MATRICES):
                weights[name] = dequantise(*quantise(weight), dtype=weight.dtype)
                count += 1
        save_file(weights, file, metadata={"format": "pt"})
    return count
