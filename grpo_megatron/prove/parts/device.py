"""Part `device`: the GPU computes in float32 what the CPU does."""

from grpo_megatron.errors import TrainerError
from grpo_megatron.prove.compare import FLOAT32, compare_steps
from grpo_megatron.prove.part import Job
from grpo_megatron.prove.random_weights import write_model
from grpo_megatron.prove.ranks import ON_CPU, WITHOUT_TF32, Asked, on_this_machine
from grpo_megatron.prove.requests import TrainedSteps, TrainSteps
from grpo_megatron.prove.settings import NUM_UPDATES, sizes_for
from grpo_megatron.prove.workload import models, write_step


def run(job: Job) -> None:
    """Train each tiny model on both; torch's layers, for which alone float32 says something."""
    sizes = sizes_for(job.conditions)
    job.recorder.note(f"Allowed differences over {NUM_UPDATES} optimizer steps: {FLOAT32}.")
    requests = {}
    for name, hf in models(sizes.model).items():
        folder = job.folder / name
        requests[name] = TrainSteps(
            model=write_model(folder / "model", hf),
            samples=write_step(
                folder / "samples",
                hf,
                sizes.lengths,
                num_groups=sizes.num_groups,
                group_size=sizes.group_size,
                num_updates=NUM_UPDATES,
            ),
            trainer={"precision": "float32", "max_tokens_per_microbatch": 2048},
            torch_layers=True,
        )
    wanted = list(requests.values())
    on_cpu = Asked(wanted, TrainedSteps, job.folder / "cpu", on_this_machine(1, ON_CPU))
    on_device = Asked(wanted, TrainedSteps, job.folder / "device", on_this_machine(1, WITHOUT_TF32))
    expected = on_cpu.answers()
    found = on_device.answers()
    for name, here, there in zip(requests, found, expected, strict=True):
        if isinstance(here, TrainerError):
            job.recorder.check(f"{name}: the device computes", False, str(here))
        elif isinstance(there, TrainerError):
            job.recorder.check(f"{name}: the CPU computes", False, str(there))
        else:
            compare_steps(job.recorder, name, here, there, FLOAT32)
