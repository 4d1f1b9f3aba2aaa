"""One trainer rank: `python -m grpo_megatron.trainer.trainer_rank RUN_DIR [ATTEMPT]`.

Rank 0 takes requests from the controller and passes them on; every rank executes them. While it
waits it sends a heartbeat through the group, so that no rank runs into a collective's time-out."""

import contextlib
import gc
import json
import os
import select
import socket
import sys
import traceback
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from grpo_megatron import progress
from grpo_megatron.checkpoints.retention import complete_steps
from grpo_megatron.config.loader import read_resolved
from grpo_megatron.errors import GrpoMegatronError, SetupError, TransferError, as_own_error
from grpo_megatron.network import Endpoint, bind_gloo, own_address, wait_for_endpoint
from grpo_megatron.rundir import RunDir
from grpo_megatron.telemetry.events import append_event
from grpo_megatron.trainer.protocol import encode, error_reply
from grpo_megatron.trainer.requests import (
    AnyRequest,
    FinishCheckpoint,
    SaveCheckpoint,
    Stop,
    read_request,
    to_json_values,
)
from grpo_megatron.weights.carriers import listening_store

if TYPE_CHECKING:  # Megatron looks at the machine when it is imported, see `main`
    from grpo_megatron.trainer.megatron.process_groups import RankInfo
    from grpo_megatron.trainer.service import TrainerService

HEARTBEAT_S = 30.0


class ControllerLink:
    """Rank 0's connection to the controller, which may have ended before it, by an error of its
    own. Raises OSError where the controller's machine is not reached."""

    def __init__(self, endpoint: Endpoint):
        self._socket: socket.socket | None = None
        try:
            self._socket = socket.create_connection((endpoint.host, endpoint.port))
        except ConnectionRefusedError:
            return
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._lines = self._socket.makefile("rb")
        self.send({"token": endpoint.token, "role": "trainer"})

    def send(self, message: dict[str, Any]) -> None:
        """Send one message in the form of `trainer.protocol`; to a controller that has gone,
        nothing: its end is seen by the next `receive`, which ends this rank, and is no crash of
        this rank."""
        if self._socket is None:
            return
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._socket.sendall(encode(message))

    def receive(self, timeout_s: float) -> AnyRequest | None:
        """Wait for the next request; None after `timeout_s`, `Stop` when the controller has gone.

        Raises msgspec.ValidationError for what is no request."""
        if self._socket is None:
            return Stop()
        # a request comes once the one before is answered, so none waits in the file's buffer
        if not select.select([self._socket], [], [], timeout_s)[0]:
            return None
        line = b""
        with contextlib.suppress(ConnectionResetError):
            line = self._lines.readline()
        if not line.endswith(b"\n"):
            return Stop()
        return read_request(json.loads(line))


def rendezvous(run_dir: RunDir, info: "RankInfo", timeout_s: float) -> TCPStore:
    """Open a store on a free port and publish it on rank 0; on the others, read where it is."""
    path = run_dir.endpoints / "trainer.json"
    timeout = timedelta(seconds=timeout_s)
    if info.rank == 0:
        host = own_address()
        store = listening_store(host, info.world_size, timeout)
        Endpoint(host, store.port).write(path)
        return store
    endpoint = wait_for_endpoint(path, timeout_s)
    return TCPStore(endpoint.host, endpoint.port, None, is_master=False, timeout=timeout)


def serve(service: "TrainerService", link: ControllerLink | None, group: Any) -> None:
    """Execute requests until `Stop`; `link` is that of rank 0, `group` has all ranks.

    An error is answered, then raised, which ends this rank; but for that of an engine."""
    progress.enter("waiting", is_waiting=True)
    while True:
        box: list[AnyRequest | None] = [None]
        if link is not None:
            box = [link.receive(HEARTBEAT_S)]
        dist.broadcast_object_list(box, src=0, group=group)
        [request] = box
        if request is None:
            continue
        try:
            with progress.within(_phase(request), _subject(request)):
                answer = service.execute(request)
        except BaseException as error:
            if link is not None:
                link.send(error_reply(error))
            if not isinstance(error, TransferError):  # of an engine: the controller decides
                raise
            traceback.print_exc()
            continue
        if link is not None:
            link.send({"result": to_json_values(answer)})
        if isinstance(request, Stop):
            return


def _phase(request: AnyRequest) -> str:
    """Return under which name the durations of requests are compared: writing a checkpoint may be
    left to later."""
    if isinstance(request, FinishCheckpoint) and not request.wait:
        return "LookForCheckpoint"
    if isinstance(request, SaveCheckpoint) and request.beside:
        return "CopyCheckpoint"
    return request.name


def _subject(request: AnyRequest) -> str:
    """Return which step or checkpoint a request is about; empty: none."""
    directory = getattr(request, "directory", None)
    if isinstance(directory, Path):
        return directory.name
    return ""


def _refuse_other_worlds(info: "RankInfo", num_ranks: int) -> None:
    """SetupError where this process is one of another number of ranks than the recipe has."""
    if info.world_size == num_ranks and 0 <= info.rank < num_ranks:
        return
    raise SetupError(
        f"this process is rank {info.rank} of {info.world_size}, and the trainer of the recipe has "
        f"{num_ranks} ranks",
        where="RANK and WORLD_SIZE, or SLURM_PROCID and SLURM_NTASKS",
        remedy="let `grpo-megatron train` or `submit` start the ranks; unset these variables in "
        "the job's environment",
    )


def main(run_path: str, attempt: str = "") -> None:
    """Run one trainer rank of the run in `run_path` until the controller stops it."""
    run_dir = RunDir(Path(run_path), attempt)
    bind_gloo(own_address())
    config = read_resolved(run_dir.config).config
    from grpo_megatron.trainer.megatron import platform  # before Megatron
    from grpo_megatron.trainer.megatron.policy import describe_kernels
    from grpo_megatron.trainer.megatron.process_groups import RankInfo, initialize, seed_everything
    from grpo_megatron.trainer.service import TrainerService
    from grpo_megatron.weights.gather import all_gathered

    info = RankInfo.from_environment()
    _refuse_other_worlds(info, config.trainer.num_ranks)
    name = f"trainer-{info.rank}"
    progress.start_progress(run_dir.role_progress(name), name)
    timeout_s = config.trainer.command_timeout_s
    initialize(config.trainer, info, rendezvous(run_dir, info, timeout_s))
    seed_everything(config.seed)
    group = dist.new_group(backend="gloo")
    # Weights must exist first: the controller announces itself once the model is on disk.
    endpoint = wait_for_endpoint(run_dir.endpoints / "controller.json", timeout_s)
    if any(all_gathered(bool(complete_steps(run_dir.checkpoints)))):
        config = config.after_a_checkpoint
    service = TrainerService(config, config.model.path or run_dir.model)
    # A million objects of torch, Megatron and the model stay until the end: without this every full
    # collection, of which Megatron asks for some in each checkpoint, looks at all of them (0.3 s).
    gc.freeze()
    kernels = describe_kernels(service.policy, service.config.trainer)
    print(
        f"rank {info.rank}: {platform.BACKEND}, policy kernels: {'; '.join(map(str, kernels))}",
        flush=True,
    )
    link: ControllerLink | None = None
    if info.rank == 0:
        append_event(run_dir.events, "kernels", kernels=[kernel.as_row() for kernel in kernels])
        link = ControllerLink(endpoint)
    serve(service, link, group)
    dist.destroy_process_group()


if __name__ == "__main__":
    code = 0
    try:
        main(*sys.argv[1:])
    except Exception as error:
        told = as_own_error(error, GrpoMegatronError)  # of a crash: CRASHED_EXIT_CODE
        code = told.exit_code
        with contextlib.suppress(OSError):  # the log may be on a full disk
            traceback.print_exc()
            print(f"error: {told}", file=sys.stderr, flush=True)
    with contextlib.suppress(OSError):
        sys.stdout.flush()
    os._exit(code)  # other ranks may be inside a collective; torch's threads may abort an exit
