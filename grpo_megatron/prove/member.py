"""One member of a weight stream: `python -m grpo_megatron.prove.member FOLDER`, of part `carriers`.

Rank 0 sends, the others receive, each on the GPU that a request gives it; rank 0 writes the
answers."""

import os
from datetime import timedelta
from pathlib import Path

import msgspec

from grpo_megatron import pretended_cuda
from grpo_megatron.network import Endpoint, bind_gloo, own_address, wait_for_endpoint
from grpo_megatron.prove.answering import run_and_exit, write_answer
from grpo_megatron.prove.ranks import REQUESTS_FILE
from grpo_megatron.prove.requests import CarryWeights

_LIMIT = timedelta(seconds=60)
"""How long members wait for each other."""


def main(folder: Path) -> None:
    """Take part in the requests in `folder`, one after another."""
    requests = msgspec.json.decode((folder / REQUESTS_FILE).read_bytes(), type=list[CarryWeights])
    rank = int(os.environ["RANK"])
    num_members = int(os.environ["WORLD_SIZE"])
    host = own_address()
    bind_gloo(host)
    pretended_cuda.install_if_wanted()
    from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

    from grpo_megatron.prove.computed.carried_weights import receive, send
    from grpo_megatron.weights.carriers import listening_store

    meeting = folder / "meeting.json"
    if rank == 0:
        store = listening_store(host, num_members, _LIMIT)
        Endpoint(host, store.port).write(meeting)
    else:
        there = wait_for_endpoint(meeting, _LIMIT.total_seconds())
        store = TCPStore(there.host, there.port, None, is_master=False, timeout=_LIMIT)
    for number, request in enumerate(requests):
        of_request = PrefixStore(f"request-{number}", store)
        if rank == 0:
            answer = send(request, of_request, host)
            write_answer(folder, number, answer)
        elif rank < len(request.gpus):
            receive(request, of_request, host, rank)
    store.set(f"done/{rank}", "")
    if rank == 0:
        store.wait([f"done/{other}" for other in range(num_members)])


if __name__ == "__main__":
    run_and_exit(main)
