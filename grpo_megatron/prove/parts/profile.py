"""Part `profile`: where the time of one optimizer step goes, by Kineto."""

from grpo_megatron.prove.part import Job
from grpo_megatron.prove.ranks import Asked, on_this_machine
from grpo_megatron.prove.requests import MeasuredSpeed, MeasureSpeed
from grpo_megatron.prove.shapes import QWEN3_0_6B
from grpo_megatron.prove.workload import NARROW, Lengths, models, write_step

TRACE_FILE = "step.trace.json"
"""For chrome://tracing or ui.perfetto.dev."""


def run(job: Job) -> None:
    """Trace one optimizer step on 4096 tokens; the trace lies beside the page."""
    hf = QWEN3_0_6B
    tokens = 4096
    if job.conditions.device != "cuda":
        hf = models(NARROW)["dense"]
        tokens = 64
    half = tokens // 4
    samples = write_step(
        job.folder / "samples",
        hf,
        Lengths(prompt=half, shortest=half, longest=half),
        num_groups=1,
        group_size=2,
    )
    trace = job.folder / TRACE_FILE
    request = MeasureSpeed(
        hf=hf,
        samples=[samples],
        trainer={"precision": "bfloat16", "max_tokens_per_microbatch": tokens},
        repeats=1,
        trace=trace.absolute(),
    )
    asked = Asked([request], MeasuredSpeed, job.folder / "rank", on_this_machine(1))
    found = asked.answer()
    recorder = job.recorder
    total = sum(micros for _, micros, _ in found.top_kernels)
    recorder.check("a trace was written", trace.exists() and trace.stat().st_size > 0, TRACE_FILE)
    recorder.check("something took time in it", total > 0)
    for name, micros, calls in found.top_kernels:
        share = micros / total
        recorder.figure(name[:120], micros / 1000, f"ms in {calls} calls, {share:.0%}")
    recorder.note("Shares are of the kernels that are listed; open the trace in ui.perfetto.dev.")
    if job.conditions.device != "cuda":
        recorder.note("Without a GPU these are operations of the CPU, not kernels.")
