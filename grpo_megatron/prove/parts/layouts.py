"""Part `layouts`: every way to share the model over two ranks computes what one rank does."""

from grpo_megatron.errors import TrainerError
from grpo_megatron.prove.compare import FLOAT32, compare_steps
from grpo_megatron.prove.part import Job
from grpo_megatron.prove.random_weights import write_model
from grpo_megatron.prove.ranks import WITHOUT_TF32, Asked, Launch, on_this_machine
from grpo_megatron.prove.requests import TrainedSteps, TrainerTable, TrainSteps
from grpo_megatron.prove.settings import NUM_UPDATES, sizes_for
from grpo_megatron.prove.workload import models, write_step

LAYOUTS: dict[str, TrainerTable] = {
    "TP 2 with sequence parallelism": {"tensor_parallel_size": 2},
    "PP 2": {"pipeline_parallel_size": 2},
    "EP 2": {"expert_parallel_size": 2},
    "CP 2": {"context_parallel_size": 2},
    "DP 2, communication beside computation": {"overlap_communication": True},
}
ONE_RANK: TrainerTable = {"precision": "float32", "max_tokens_per_microbatch": 512}
"""Several micro-batches, so that pipelines and data parallelism have something to share."""


def request_of(job: Job) -> TrainSteps:
    """Return what one rank and all layouts train: a mixture of experts in float32, torch's
    layers."""
    sizes = sizes_for(job.conditions)
    hf = models(sizes.model)["moe"]
    table = dict(ONE_RANK)
    if job.conditions.device != "cuda":
        table["max_tokens_per_microbatch"] = 64
    job.recorder.note(f"Allowed differences over {NUM_UPDATES} optimizer steps: {FLOAT32}.")
    return TrainSteps(
        model=write_model(job.folder / "model", hf),
        samples=write_step(
            job.folder / "samples",
            hf,
            sizes.lengths,
            num_groups=sizes.num_groups,
            group_size=sizes.group_size,
            num_updates=NUM_UPDATES,
        ),
        trainer=table,
        torch_layers=True,
    )


def run(job: Job) -> None:
    """Train on one rank, then at each layout of two."""
    compare_layouts(job, on_this_machine(2, WITHOUT_TF32))


def compare_layouts(job: Job, two_ranks: Launch) -> None:
    """Train on one rank of this machine, and at each layout on `two_ranks`; record whether they
    compute the same."""
    request = request_of(job)
    one_rank = Asked([request], TrainedSteps, job.folder / "one", on_this_machine(1, WITHOUT_TF32))
    expected = one_rank.answer()
    wanted = [with_layout(request, layout) for layout in LAYOUTS.values()]
    found = Asked(wanted, TrainedSteps, job.folder / "two", two_ranks).answers()
    for name, of_layout in zip(LAYOUTS, found, strict=True):
        if isinstance(of_layout, TrainerError):
            job.recorder.check(f"{name}: the ranks compute", False, str(of_layout))
        else:
            compare_steps(job.recorder, name, of_layout, expected, FLOAT32)


def with_layout(request: TrainSteps, layout: TrainerTable) -> TrainSteps:
    """Return the same request at another layout."""
    return TrainSteps(
        model=request.model,
        samples=request.samples,
        trainer={**request.trainer, **layout},
        torch_layers=request.torch_layers,
    )
