"""One trainer rank of a part: `python -m grpo_megatron.prove.rank FOLDER`.

It executes the requests of `FOLDER/requests.json` one after another; rank 0 writes the answers."""

import gc
from pathlib import Path

from grpo_megatron.config.trainer import TrainerConfig
from grpo_megatron.network import bind_gloo, own_address
from grpo_megatron.prove.answering import run_and_exit, write_answer
from grpo_megatron.prove.ranks import REQUESTS_FILE
from grpo_megatron.prove.requests import (
    Answer,
    MeasureMemory,
    MeasureSpeed,
    Request,
    TrainSteps,
    decode_requests,
)
from grpo_megatron.rundir import RunDir

_RENDEZVOUS_S = 60.0
_COLLECTIVES_S = 100.0
"""How long ranks wait for each other."""


def main(folder: Path) -> None:
    """Execute the requests in `folder` together with the other ranks."""
    requests = decode_requests((folder / REQUESTS_FILE).read_bytes())
    bind_gloo(own_address())
    from grpo_megatron.trainer.megatron import platform  # before Megatron

    if any(isinstance(request, TrainSteps) and request.torch_layers for request in requests):
        # before the modules that look at it are imported
        platform.HAS_TRANSFORMER_ENGINE = False
    from torch.distributed import PrefixStore  # type: ignore[attr-defined]

    from grpo_megatron.trainer.megatron.process_groups import (
        RankInfo,
        initialize,
        seed_everything,
        shutdown,
    )
    from grpo_megatron.trainer.trainer_rank import rendezvous

    info = RankInfo.from_environment()
    run_dir = RunDir(folder)
    run_dir.endpoints.mkdir(exist_ok=True)
    store = rendezvous(run_dir, info, _RENDEZVOUS_S)
    for number, request in enumerate(requests):
        layout = layout_of(request, info.world_size)
        initialize(layout, info, PrefixStore(f"request-{number}", store))
        seed_everything(1)
        answer = execute(request, layout)
        if info.rank == 0:
            write_answer(folder, number, answer)
        gc.collect()
    shutdown()


def layout_of(request: Request, world_size: int) -> TrainerConfig:
    """Return the layout that the request asks for, with the ranks that were started."""
    settings = {
        "num_ranks": world_size,
        "command_timeout_s": _COLLECTIVES_S,
        **request.trainer,
    }
    return TrainerConfig.model_validate(settings)


def execute(request: Request, layout: TrainerConfig) -> Answer:
    """Compute what is asked for; collective."""
    match request:
        case TrainSteps():
            from grpo_megatron.prove.computed.train_steps import train_steps

            return train_steps(request, layout)
        case MeasureMemory():
            from grpo_megatron.prove.computed.memory import measure_memory

            return measure_memory(request, layout)
        case MeasureSpeed():
            from grpo_megatron.prove.computed.speed import measure_speed

            return measure_speed(request, layout)


if __name__ == "__main__":
    run_and_exit(main)
