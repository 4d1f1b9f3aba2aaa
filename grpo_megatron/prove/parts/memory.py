"""Part `memory`: what an update takes, against what `plan` says of it."""

from grpo_megatron.prove.part import Job
from grpo_megatron.prove.planned import planned_memory
from grpo_megatron.prove.ranks import Asked, on_this_machine
from grpo_megatron.prove.requests import MeasuredMemory, MeasureMemory, TrainerTable
from grpo_megatron.prove.shapes import QWEN3_0_6B
from grpo_megatron.prove.workload import NARROW, Lengths, models, write_step

_TOLERANCE = 0.2
"""By which share measured and planned memory may differ."""
_NUM_SAMPLES = 4
_GIB = 2**30


def run(job: Job) -> None:
    """Measure an update of one micro-batch of 16384 tokens, four samples of 4096."""
    on_gpu = job.conditions.device == "cuda"
    hf = QWEN3_0_6B
    longest = 4096
    if not on_gpu:
        hf = models(NARROW)["dense"]
        longest = 64
    trainer: TrainerTable = {
        "precision": "bfloat16",
        "max_tokens_per_microbatch": _NUM_SAMPLES * longest,
        "share_prefixes": False,  # `plan` takes samples that share nothing
    }
    samples = write_step(
        job.folder / "samples",
        hf,
        Lengths(prompt=longest // 2, shortest=longest // 2, longest=longest // 2),
        num_groups=1,
        group_size=_NUM_SAMPLES,
    )
    planned = planned_memory(
        job.folder / "plan",
        hf,
        trainer,
        num_samples=_NUM_SAMPLES,
        longest=longest,
        num_gpus=int(on_gpu),
    )
    request = MeasureMemory(hf=hf, samples=samples, trainer=trainer)
    asked = Asked([request], MeasuredMemory, job.folder / "rank", on_this_machine(1))
    measured = asked.answer()
    recorder = job.recorder
    recorder.figure("model built", measured.after_build / _GIB, "GiB")
    recorder.figure("highest in the first update", measured.after_first_step / _GIB, "GiB")
    recorder.figure(
        "highest in the second update",
        measured.peak / _GIB,
        "GiB",
        f"plan: {planned.total / _GIB:.3g} GiB",
    )
    for name, num_bytes in planned.parts.items():
        recorder.figure(f"planned: {name}", num_bytes / _GIB, "GiB")
    if not on_gpu:
        recorder.note(
            "Without a GPU these are figures of the whole process, which say nothing of the plan "
            "for GPUs; nothing is compared."
        )
        recorder.check("all figures were produced", measured.peak > 0 and planned.total > 0)
        return
    share = measured.peak / planned.total - 1
    recorder.check(
        "measured memory is what `plan` says",
        abs(share) <= _TOLERANCE,
        f"{share:+.0%} of {planned.total / _GIB:.1f} GiB, allowed {_TOLERANCE:.0%} either way",
    )
