"""Part `machine`: what is installed, and which kernels follow from it."""

from grpo_megatron.prove.part import Job
from grpo_megatron.prove.random_weights import write_model
from grpo_megatron.prove.ranks import Asked, on_this_machine
from grpo_megatron.prove.requests import TrainedSteps, TrainSteps
from grpo_megatron.prove.settings import sizes_for
from grpo_megatron.prove.workload import models, write_step

_WORTH_HAVING = {
    "transformer-engine": "wanted for fused layers, grouped experts and FP8",
    "flash-attn": "Transformer Engine may use it for attention",
    "deep-ep": "faster dispatch of tokens to experts on other GPUs",
    "triton": "torch's compiler needs it on a GPU",
    "driver": "version of the kernel module",
}


def run(job: Job) -> None:
    """Record what the probe found, then let a rank say which kernels it chose."""
    conditions = job.conditions
    recorder = job.recorder
    recorder.check(
        "the machine could be looked at",
        not conditions.problem,
        conditions.problem,
    )
    sees_gpu = conditions.device != "none"
    detail = f"{conditions.num_gpus} x {conditions.gpu_name}"
    if not sees_gpu:
        detail = "is the driver loaded (nvidia-smi), and torch a CUDA build?"
    recorder.check("torch sees a GPU", sees_gpu, detail)
    if sees_gpu:
        recorder.figure("GPUs", conditions.num_gpus)
        recorder.figure("memory of a GPU", conditions.memory_bytes / 2**30, "GiB")
        free = conditions.free_bytes / 2**30
        recorder.figure("free memory of the fullest GPU", free, "GiB", "nearly all of it")
        recorder.figure("compute capability", ".".join(map(str, conditions.capability)))
    for name, version in conditions.versions.items():
        recorder.figure(name, version or "not there", expected=_WORTH_HAVING.get(name, ""))
    if conditions.why_no_transformer_engine:
        what = "Transformer Engine can be used"
        is_broken = "cannot be imported" in conditions.why_no_transformer_engine
        if is_broken:
            recorder.check(what, False, conditions.why_no_transformer_engine)
        else:
            recorder.impossible(what, conditions.why_no_transformer_engine)
    if sees_gpu:
        _kernels(job)


def _kernels(job: Job) -> None:
    """Train one step of a mixture of experts in bfloat16 and record which kernels did it."""
    sizes = sizes_for(job.conditions)
    hf = models(sizes.model)["moe"]
    request = TrainSteps(
        model=write_model(job.folder / "model", hf),
        samples=write_step(job.folder / "samples", hf, sizes.lengths, num_groups=2, group_size=2),
        trainer={"precision": "bfloat16", "max_tokens_per_microbatch": 2048},
    )
    asked = Asked([request], TrainedSteps, job.folder / "rank", on_this_machine(1))
    found = asked.answer()
    for kernel in found.kernels:
        part, _, chosen = kernel.partition(" ")
        job.recorder.figure(f"kernel: {part}", chosen)
