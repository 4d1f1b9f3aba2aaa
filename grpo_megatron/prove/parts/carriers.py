"""Part `carriers`: weights between processes by each carrier, without an engine."""

from collections.abc import Mapping

from grpo_megatron.errors import TrainerError
from grpo_megatron.prove.conditions import Conditions
from grpo_megatron.prove.part import Job
from grpo_megatron.prove.ranks import MEMBER, Asked, on_this_machine
from grpo_megatron.prove.requests import CarriedWeights, CarryWeights
from grpo_megatron.weights.carrier_names import Carrier

NUM_MEMBERS = 3
"""One that sends, one that receives and passes on, one that receives."""
_MIB_ON_GPU = 2048
_MIB_ON_CPU = 4


def run(job: Job) -> None:
    """Send the same weights by each carrier that is possible here; record what arrived, and how
    fast."""
    requests = []
    for carrier, gpus in carriers_of(job.conditions).items():
        if len(gpus) < 2:
            job.recorder.impossible(_label(carrier), "it needs 2 GPUs: NCCL takes none twice")
            continue
        requests.append(_request(job.conditions, carrier, gpus))
    asked = Asked(
        requests,
        CarriedWeights,
        job.folder / "members",
        on_this_machine(NUM_MEMBERS, module=MEMBER),
    )
    for request, found in zip(requests, asked.answers(), strict=True):
        if isinstance(found, TrainerError):
            job.recorder.check(_label(request.carrier), False, str(found))
        else:
            _record(job, request, found)
    job.recorder.note(
        "A link is one from the sender to the first receiver, or between receivers. Rates are of "
        "the second publish, digests on both sides included."
    )


def carriers_of(conditions: Conditions) -> Mapping[Carrier, list[int]]:
    """Return the GPU of each member, by carrier: NCCL takes no GPU twice, IPC is tried on one GPU
    and, where there is another, between two."""
    last = min(conditions.num_gpus, NUM_MEMBERS) - 1
    return {
        "gloo": [0] * NUM_MEMBERS,
        "ipc": [0, 0, min(last, 1)],
        "nccl": list(range(last + 1)),
    }


def _request(conditions: Conditions, carrier: Carrier, gpus: list[int]) -> CarryWeights:
    mib = _MIB_ON_CPU
    if conditions.device == "cuda":
        mib = _MIB_ON_GPU
    return CarryWeights(carrier=carrier, mib=mib, gpus=gpus)


def _label(carrier: Carrier) -> str:
    return f"{carrier}: every tensor arrives as it was sent"


def _record(job: Job, request: CarryWeights, found: CarriedWeights) -> None:
    recorder = job.recorder
    is_equal = all(digests == found.sent for digests in found.received)
    is_whole = bool(found.sent) and len(found.received) == len(request.gpus) - 1
    links = ", ".join(f"{count} by {kind}" for kind, count in sorted(found.links.items()))
    recorder.check(
        _label(request.carrier),
        is_equal and is_whole and not found.changed,
        f"{len(found.sent)} messages to {len(found.received)} receivers; links: {links}"
        + "".join(f"; {name} changed" for name in found.changed),
    )
    if request.carrier == "ipc":
        num_read = found.links.get("gpu memory", 0)
        recorder.check(
            "ipc: receivers read the sender's GPU memory",
            num_read == len(request.gpus) - 1,
            f"{num_read} of {len(request.gpus) - 1} links",
        )
    recorder.figure(
        f"{request.carrier}, {request.mib} MiB to {len(found.received)} receivers",
        request.mib / 1024 / found.seconds,
        "GiB/s",
    )
