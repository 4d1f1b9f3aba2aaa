"""What carries the messages of a publish: gloo through host memory, NCCL between GPUs, or CUDA IPC
where a receiver can read the sender's GPU memory, with gloo where it cannot.

gloo's and NCCL's are process groups outside of torch's global one, of one stream each; IPC has one
of gloo for its handles. Which carrier is chosen: `RunConfig.publish_carrier`."""

import os
import socket
from datetime import timedelta
from ipaddress import ip_address
from typing import Any

import torch
from torch import distributed
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from grpo_megatron.errors import TransferError
from grpo_megatron.weights.carrier_names import Carrier

_REMEDY = "look for the first error in the logs of the trainer and of the engines"


def message_device(carrier: Carrier) -> torch.device:
    """Return where messages lie: in host memory, or on this process's GPU."""
    is_on_gpu = carrier == "nccl" or (carrier == "ipc" and torch.cuda.is_available())
    if is_on_gpu:
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def listening_store(host: str, num_clients: int, timeout: timedelta) -> TCPStore:
    """Open a store on a free port of `host` only: TCPStore by itself listens on every interface."""
    listener = socket.create_server((host, 0), backlog=max(128, num_clients))
    return TCPStore(
        host,
        listener.getsockname()[1],
        None,
        is_master=True,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


def gloo_group(store: TCPStore, own_host: str, rank: int, size: int, timeout_s: float) -> Any:
    """Make a gloo group; blocks until all members have come."""
    gloo: Any = distributed.ProcessGroupGloo
    options = gloo._Options()
    options._timeout = timedelta(seconds=timeout_s)
    # Left alone gloo listens at what the host name resolves to; a site may name an interface.
    if os.environ.get("GLOO_SOCKET_IFNAME") and not ip_address(own_host).is_loopback:
        options._devices = [gloo.create_default_device()]
    else:
        options._devices = [gloo.create_device(hostname=own_host)]
    return gloo(PrefixStore("weights", store), rank, size, options)


def nccl_group(store: TCPStore, rank: int, size: int, timeout_s: float) -> Any:
    """Make an NCCL group; blocks until all members have come.

    NCCL itself connects two members when they first exchange something, and waits for the other
    without an end: so everybody is here before."""
    nccl: Any = distributed.ProcessGroupNCCL
    _meet(store, rank, size)
    options = nccl.Options()
    # Waits have a limit of their own (`NcclWork`); NCCL's watchdog would end the whole process.
    options._timeout = timedelta(seconds=10 * timeout_s)
    return nccl(PrefixStore("weights", store), rank, size, options)


def _meet(store: TCPStore, rank: int, size: int) -> None:
    """Wait for all members, within the store's time limit."""
    here = PrefixStore("here", store)
    here.set(str(rank), "")
    here.wait([str(other) for other in range(size)])


class Naming:
    """Turn errors of groups and stores into one that says what was waited for, and for whom.

    No `contextmanager`: since Python 3.12 such an error and contextlib's frame hold each other, and
    with them frames whose works keep the group open, until garbage is collected."""

    def __init__(self, what: str):
        self._what = what

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, RuntimeError):  # none of ours is one
            first_line = str(error).splitlines()[0]
            raise TransferError(f"{self._what}: {first_line}", remedy=_REMEDY) from error
