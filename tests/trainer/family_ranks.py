"""What the worker groups execute for the families."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist

from grpo_megatron.checkpoints.hf_import import HFReader
from grpo_megatron.trainer.megatron import platform  # noqa: F401  (before anything of Megatron)

# isort: split
from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

from grpo_megatron.config.trainer import TrainerConfig
from grpo_megatron.trainer.megatron.context_parallel import found_by_all
from grpo_megatron.trainer.megatron.model_config import transformer_config
from grpo_megatron.trainer.megatron.policy import PolicyModel
from grpo_megatron.trainer.steps.optimizer_step import logprob_pass, train_step
from tests.trainer.trainer_ranks import OPTIMIZER, Setup, loss_of


class LogitsModel(PolicyModel):
    """Answers with the logits of the wanted positions, fp32 [n, vocabulary]."""

    def _postprocess(self, hidden_states, *args, **kwargs):
        if not self.post_process:
            return hidden_states
        tied = self.share_embeddings_and_output_weights
        logits, _ = self.output_layer(
            hidden_states, weight=self.shared_embedding_or_output_weight() if tied else None
        )
        logits = gather_from_tensor_model_parallel_region(logits)
        own_logits = logits[self._own.predicting, 0, : self.real_vocab_size]
        return found_by_all(own_logits.t().contiguous(), self._own).t()


def parity(model: str, samples: str, layout: dict[str, Any]) -> dict[str, Any]:
    """Largest error of the logits, and tensors that come back other than they were."""
    setup = Setup(model, layout)
    for chunk in setup.policy.models:
        chunk.__class__ = LogitsModel
    batch, expected = setup.batch(samples), np.load(Path(model) / "logits.npy")
    starts = np.concatenate([[0], np.cumsum(_counts(samples))])
    errors = []
    for microbatch, found in zip(
        batch.microbatches, logprob_pass(setup.policy, batch), strict=True
    ):
        if found.shape[-1] != expected.shape[1]:
            continue  # not the last stage
        wanted = np.concatenate(
            [expected[starts[row] : starts[row + 1]] for row in microbatch.table_rows]
            or [expected[:0]]
        )
        errors.append(float(np.abs(found.numpy() - wanted).max(initial=0.0)))
    tensors, world = setup.gather(setup.shards), [None] * dist.get_world_size()
    dist.all_gather_object(world, errors)
    if tensors is None:
        return {}
    reader = HFReader(Path(model))
    wrong = [
        name
        for name in sorted(reader.names() | tensors.keys())
        if name not in tensors
        or name not in reader.names()
        or not np.array_equal(tensors[name], reader.tensor(name).float().numpy())
    ]
    return {
        "error": max(e for part in world for e in part),
        "wrong": wrong,
        "num_tensors": len(tensors),
    }


def gradients(model: str, samples: str, layout: dict[str, Any]) -> dict[str, Any]:
    """One step: loss, pre-clip gradient norm and, on rank 0, the averaged gradients."""
    setup = Setup(model, {**layout, "distributed_optimizer": False})
    batch = setup.batch(samples)
    stats = train_step(setup.policy, batch, loss_of(setup, samples)).result()
    scale = max(stats["grad/norm"] / OPTIMIZER.clip_grad, 1.0)  # undo the clipping
    return {
        "losses": [stats["loss/value"]],
        "norms": [stats["grad/norm"]],
        "tensors": setup.gather(
            [
                replace(s, tensor=s.tensor.main_grad * scale)
                for s in setup.shards
                if hasattr(s.tensor, "main_grad")
            ]
        ),
    }


def selection_biases(model: str, samples: str) -> dict[str, list[str]]:
    """GroupFilter biases of a bfloat16 model that are not those of the checkpoint."""
    setup = Setup(model, {"precision": "bfloat16"})

    def wrong() -> list[str]:
        reader, tensors = HFReader(Path(model)), setup.gather(setup.shards)
        biases = [name for name in tensors if name.endswith("correction_bias")]
        assert biases
        return [
            name
            for name in biases
            if not np.array_equal(tensors[name], reader.tensor(name).numpy())
        ]

    found = {"imported": wrong()}
    train_step(setup.policy, setup.batch(samples), loss_of(setup, samples))
    return found | {"trained": wrong()}


def build_configs(presets: list[tuple[dict, dict]]) -> list[str]:
    """Megatron's own checks of released models at their recommended layouts."""
    return [
        type(transformer_config(hf, TrainerConfig(**layout))).__name__ for hf, layout in presets
    ]


def _counts(samples: str) -> np.ndarray:
    from grpo_megatron.batching.store import SampleTable

    return SampleTable(Path(samples)).completion_lengths
