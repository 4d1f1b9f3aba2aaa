"""How the processes of a run find each other: addresses in files of the run directory.

Ports are chosen by the kernel; a process that listens publishes where, and others wait for the
file. On one machine everything is on loopback; in a Slurm job of several nodes on the network that
connects them (`GRPO_MEGATRON_NODES`), or on `GRPO_MEGATRON_INTERFACE` where the site says so."""

import contextlib
import json
import os
import secrets
import socket
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Self

import psutil

from grpo_megatron.errors import GrpoMegatronError, SetupError, TrainerError

LOOPBACK = "127.0.0.1"
NODES_VARIABLE = "GRPO_MEGATRON_NODES"
INTERFACE_VARIABLE = "GRPO_MEGATRON_INTERFACE"


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a process listens, and the secret that opens it, if any."""

    host: str
    port: int
    token: str = field(default="", repr=False)

    def write(self, path: Path) -> None:
        """Atomically, readable by the owner only."""
        temporary = path.with_suffix(".tmp")
        temporary.touch(mode=0o600)
        temporary.write_text(json.dumps(asdict(self)))
        temporary.replace(path)

    @classmethod
    def read(cls, path: Path) -> Self:
        """What another process has written."""
        return cls(**json.loads(path.read_text()))


def carries_token(authorization: str, token: str) -> bool:
    """Whether the header `Authorization` of a request is `Bearer` and this token. The comparison
    takes equally long for every wrong token, so that it does not reveal how much of one is
    right."""
    scheme, _, given = authorization.partition(" ")
    is_right = secrets.compare_digest(given.strip().encode(errors="replace"), token.encode())
    return is_right and scheme.lower() == "bearer"


def wait_for_endpoint(
    path: Path,
    timeout_s: float,
    is_alive: Callable[[], bool] = lambda: True,
    error: type[GrpoMegatronError] = TrainerError,
) -> Endpoint:
    """Poll for a published address; `error` once its process has ended, or after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    # Listing asks the file server; a look-up may be answered from the client's cache for long.
    while path.name not in os.listdir(path.parent):
        if not is_alive():
            raise error(f"{path.stem} ended before it was ready", where=str(path))
        if time.monotonic() > deadline:
            raise error(
                f"nobody published {path.name} within {timeout_s:.0f} s",
                where=str(path),
                remedy="look at the other processes' logs",
            )
        time.sleep(0.05)
    return Endpoint.read(path)


def reserve_port(host: str) -> socket.socket:
    """Bind a free port for a server that is yet to start: it binds beside this socket, and no other
    process is given the port until the socket is closed."""
    holder = socket.socket()
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # the server sets it too
    holder.bind((host, 0))  # never listens, so it takes no connection
    return holder


def own_address() -> str:
    """Return the address at which the other processes of the run reach this one. Raises SetupError
    where the site's interface does not exist here, or no route leads to another node."""
    name = os.environ.get(INTERFACE_VARIABLE)
    if name:
        addresses = psutil.net_if_addrs().get(name, ())
        found = [str(a.address) for a in addresses if a.family == socket.AF_INET]
        if not found:
            raise SetupError(
                f"this node has no network interface {name!r} with an IPv4 address",
                where=f"{INTERFACE_VARIABLE} on {socket.gethostname()}",
                remedy="interfaces here: " + ", ".join(psutil.net_if_addrs()),
            )
        return found[0]
    nodes = os.environ.get(NODES_VARIABLE, "").split()
    for node in nodes:
        with (
            contextlib.suppress(OSError),
            socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe,
        ):
            probe.connect((node, 9))  # sends nothing: only the route is chosen
            address = str(probe.getsockname()[0])
            if not address.startswith("127."):
                return address
    if len(nodes) > 1:
        raise SetupError(
            f"no route from {socket.gethostname()} to the other nodes of the job",
            where=f"{NODES_VARIABLE}={' '.join(nodes)}",
            remedy=f"set {INTERFACE_VARIABLE} in the site's file",
        )
    return LOOPBACK


def bind_gloo(address: str) -> None:
    """Have gloo listen at `address` too; left alone it takes what the host name resolves to."""
    if address == LOOPBACK:
        return
    for name, addresses in psutil.net_if_addrs().items():
        if address in [a.address for a in addresses]:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
