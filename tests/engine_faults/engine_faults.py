"""vLLM plugin of the tests: an engine that computes with other weights than it was sent.

The error is in what follows the transfer (name mapping, sharding, repacking): digests of the wire
cannot see it, comparing log-probs must. Noise `mlp.gate:0.05` adds numbers of this standard
deviation, always the same, to tensors with this in their name: at every publish with
`ENGINE_FAULTS_NOISE`, at the next one after `sabotage_next_update`.

Another one has no memory for its next batch once there is the file that `ENGINE_FAULTS_MEMORY`
names, which it removes."""

import contextlib
import os

NOISE_VARIABLE = "ENGINE_FAULTS_NOISE"
MEMORY_VARIABLE = "ENGINE_FAULTS_MEMORY"


def register() -> None:
    """Called by vLLM in each of its processes."""
    from grpo_megatron.rollout.plugin.stream_engine import StreamWeightTransferEngine
    from grpo_megatron.rollout.plugin.worker_extension import WorkerExtension

    load = StreamWeightTransferEngine.load
    finish = StreamWeightTransferEngine.finish_weight_update

    def load_with_noise(engine, tensors):
        load(engine, with_noise(tensors, _noise_of(engine)))

    def finish_and_forget(engine):
        finish(engine)
        engine.noise = ""

    def sabotage_next_update(worker, noise):
        worker.weight_transfer_engine.noise = noise

    if MEMORY_VARIABLE in os.environ:
        _run_out_of_memory(os.environ[MEMORY_VARIABLE])
    StreamWeightTransferEngine.load = load_with_noise
    StreamWeightTransferEngine.finish_weight_update = finish_and_forget
    WorkerExtension.sabotage_next_update = sabotage_next_update


def _run_out_of_memory(file):
    import torch
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    execute = WorkerWrapperBase.execute_model

    def execute_or_fail(worker, *arguments, **more):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(file)
            raise torch.OutOfMemoryError("there is no memory for this batch (a test)")
        return execute(worker, *arguments, **more)

    WorkerWrapperBase.execute_model = execute_or_fail


def with_noise(tensors, noise):
    import torch

    part, _, deviation = noise.rpartition(":")
    if not part:
        return tensors
    generator = torch.Generator().manual_seed(0)
    changed = []
    for entry, parts in tensors:
        if part in entry.name:
            parts = {
                box: tensor + float(deviation) * torch.randn(tensor.shape, generator=generator)
                for box, tensor in parts.items()
            }
        changed.append((entry, parts))
    return changed


def _noise_of(engine) -> str:
    return getattr(engine, "noise", "") or os.environ.get(NOISE_VARIABLE, "")
