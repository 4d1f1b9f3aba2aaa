"""What a rank with a pretended GPU is asked about the device itself."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from grpo_megatron.config.trainer import TrainerConfig
from grpo_megatron.device_copies import on_the_way_to_host, to_device, wait_for_copies
from grpo_megatron.pretended_cuda.synchronisations import recorded
from grpo_megatron.trainer.megatron import platform
from grpo_megatron.trainer.megatron.process_groups import RankInfo, initialize
from tests.trainer.worker_group import fresh_store


def _on_device(*values: float) -> torch.Tensor:
    return torch.tensor(values).to("cuda")


def where_it_is() -> dict[str, object]:
    """What the trainer's own modules and torch say."""
    values = _on_device(1.0)
    return {
        "has_cuda": platform.HAS_CUDA,
        "backend": platform.BACKEND,
        "device": str(platform.device()),
        "type": values.type(),
        "is_cuda": values.is_cuda,
        "cpu_platform": torch.cuda.current_device() == torch.device("cpu"),
    }


def refusals() -> dict[str, str]:
    """What each mistake is answered with; empty: nothing."""
    info = RankInfo.from_environment()
    initialize(TrainerConfig(num_ranks=1, num_threads=1), info, fresh_store())
    device = _on_device(1.0, 2.0)
    host = torch.ones(2)
    mistakes: dict[str, Callable[[], object]] = {
        "two places": lambda: device + host,
        "host index of a gather": lambda: device.gather(0, torch.tensor([1])),
        "device index of the host": lambda: host[torch.zeros(1, dtype=torch.long, device="cuda")],
        "numpy": lambda: device.numpy(),
        "two devices": lambda: device + torch.ones(2, device="cuda:1"),
        "host tensor to NCCL": lambda: dist.all_reduce(host),
        "pinning a device tensor": lambda: device.pin_memory(),
        "data of another place": lambda: setattr(device, "data", host),
        # and what a GPU takes
        "host number": lambda: device * torch.tensor(2.0),
        "host index": lambda: device[torch.tensor([1])],
        "device tensor to NCCL": lambda: dist.all_reduce(device),
    }
    answers = {}
    for name, mistake in mistakes.items():
        try:
            mistake()
            answers[name] = ""
        except (RuntimeError, TypeError) as error:
            answers[name] = str(error)
    return answers


def waits() -> dict[str, list[str]]:
    """The kinds of waits of each expression."""
    device = _on_device(1.0, -2.0, 3.0)
    host = torch.ones(3)
    pinned = host.pin_memory()
    expressions: dict[str, Callable[[], object]] = {
        "item": lambda: device[0].item(),
        "condition": lambda: bool((device > 0).any()),
        "tolist": lambda: device.tolist(),
        "nonzero": lambda: device.nonzero(),
        "mask": lambda: device[device > 0],
        "bincount": lambda: torch.bincount(device.abs().long()),
        "repeat": lambda: device.repeat_interleave(device.abs().long()),
        "cpu": lambda: device.cpu(),
        "to device": lambda: host.to("cuda"),
        "unpinned, not blocking": lambda: host.to("cuda", non_blocking=True),
        "pinned, converted": lambda: pinned.to("cuda", torch.float64, non_blocking=True),
        "new tensor": lambda: device.new_tensor([1.0]),
        "synchronize": lambda: torch.cuda.synchronize(),
        # and what does not wait
        "arithmetic": lambda: (device * 2 + 1).sum(),
        "where": lambda: torch.where(device > 0, device, 0.0),
        "masked fill": lambda: device.clone().masked_fill_(device > 0, 0.0),
        "repeat of known size": lambda: device.repeat_interleave(2, output_size=6),
        "zeros": lambda: torch.zeros(3, device="cuda"),
        "pinned": lambda: pinned.to("cuda", non_blocking=True),
        "our copy to the device": lambda: to_device(host, torch.device("cuda", 0)),
        "our copy to the host": lambda: on_the_way_to_host(device),
    }
    found = {}
    for name, expression in expressions.items():
        with recorded() as record:
            expression()
        kinds = []
        for site, count in record.counts.items():
            kinds += [f"{site.owner}: {site.kind}"] * count
        found[name] = kinds
    return found


def copies() -> dict[str, list[float]]:
    """A copy to the host before and after the wait, and what the device did meanwhile."""
    device = _on_device(1.0, 2.0)
    arriving = on_the_way_to_host(device)
    device.add_(10.0)  # queued after the copy
    early = arriving.tolist()
    wait_for_copies()
    back = to_device(on_the_way_to_host(device), torch.device("cuda", 0))
    return {"early": early, "late": arriving.tolist(), "back": back.tolist()}


def moved_module() -> dict[str, object]:
    """A module on its way to the device."""
    module = torch.nn.Linear(3, 2)
    before = module.weight
    before.allreduce = False  # type: ignore[attr-defined]  # as Megatron does
    values = before.detach().clone()
    module.to("cuda")
    (module(torch.ones(1, 3, device="cuda")).sum()).backward()
    return {
        "same object": module.weight is before,
        "is a parameter": isinstance(module.weight, torch.nn.Parameter),
        "attribute": module.weight.allreduce,
        "device": str(module.weight.device),
        "values": torch.equal(module.weight.detach().cpu(), values),
        "gradient": module.weight.grad.tolist(),
    }
