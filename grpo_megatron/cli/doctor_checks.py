"""What `doctor` looks at. Engines are looked up or started in a child process, never imported."""

import ctypes
import importlib.metadata
import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

_MIN_MEMORY_GIB, _MIN_DISK_GIB, _MIN_SHM_GIB = 8, 5, 1
_TORCH_PROBE = """
import json, torch
print(json.dumps({"version": torch.__version__, "cuda": torch.version.cuda,
                  "devices": torch.cuda.device_count(),
                  "gloo": torch.distributed.is_gloo_available(),
                  "nccl": torch.distributed.is_nccl_available()}))
"""


@dataclass(frozen=True, slots=True)
class Finding:
    """One checked thing."""

    what: str
    status: Literal["ok", "missing", "warning", "optional"]
    """`missing`: required. `optional`: absent, and only some uses need it."""
    found: str
    remedy: str = ""


def all_findings() -> list[Finding]:
    """Run every check; takes some seconds, because torch is started once."""
    on_gpu = has_nvidia_gpu()
    return [python_version(), *packages("gpu" if on_gpu else "cpu"), torch_works(on_gpu=on_gpu),
            *unwanted_packages(on_gpu=on_gpu), *gpu_extras(on_gpu=on_gpu),
            *system_tools(on_gpu=on_gpu), code_sandbox(), memory(), shared_memory(), disk()]


def has_nvidia_gpu() -> bool:
    """Whether the driver shows a device."""
    return Path("/proc/driver/nvidia/version").exists() or Path("/dev/nvidia0").exists()


def python_version() -> Finding:
    found = platform.python_version()
    good = (3, 11) <= sys.version_info[:2] <= (3, 12)
    return Finding("python", "ok" if good else "missing", found,
                   "use Python 3.11 or 3.12 and run `make setup`")


def packages(build: str) -> Iterator[Finding]:
    """Check what the installed metadata of grpo-megatron requires.

    Args:
        build: The extra that holds the engine build of this machine, `cpu` or `gpu`.
    """
    from packaging.requirements import Requirement

    try:
        texts = importlib.metadata.requires("grpo-megatron") or []
    except importlib.metadata.PackageNotFoundError:
        yield Finding("grpo-megatron", "missing", "not installed",
                      "run `make setup`, or `pip install --no-deps -e .` in the checkout")
        return
    for requirement in map(Requirement, texts):
        marker = requirement.marker
        needed = marker is None or any(marker.evaluate({"extra": extra}) for extra in ("", build))
        if needed and requirement.name != "transformer-engine":  # that one: gpu_extras
            yield _package(requirement.name, requirement.specifier)


def _package(name: str, specifier) -> Finding:
    wanted = f"{name}{specifier}"
    try:
        version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return Finding(name, "missing", "not installed",
                       f"run `make setup`, or `pip install '{wanted}'`")
    good = specifier.contains(version, prereleases=True)
    return Finding(name, "ok" if good else "missing", version,
                   f"{wanted} is required: run `make setup`, or `pip install '{wanted}'`")


def torch_works(*, on_gpu: bool) -> Finding:
    """Import torch in a child process, so that a broken build is a finding and not a crash."""
    try:
        done = subprocess.run([sys.executable, "-c", _TORCH_PROBE], capture_output=True, text=True,
                              timeout=120, check=True)
    except subprocess.CalledProcessError as error:
        reason = (error.stderr.strip().splitlines() or ["died"])[-1]
        return Finding("torch runtime", "missing", reason, "run `make setup`")
    except subprocess.TimeoutExpired:
        return Finding("torch runtime", "missing", "importing torch takes more than 120 s",
                       "check the file system of the environment")
    facts = json.loads(done.stdout)
    if on_gpu and not facts["devices"]:
        return Finding("torch runtime", "missing", f"{facts['version']} sees no GPU",
                       "install the CUDA build of torch that matches the driver")
    device = f"CUDA {facts['cuda']}, {facts['devices']} GPU(s)" if facts["devices"] else "CPU"
    collectives = "nccl" if facts["devices"] else "gloo"
    return Finding("torch runtime", "ok" if facts[collectives] else "missing",
                   f"{device}, {collectives}{'' if facts[collectives] else ' not available'}",
                   f"install a build of torch with {collectives}")


def unwanted_packages(*, on_gpu: bool) -> Iterator[Finding]:
    """CUDA builds that break `import vllm` beside a CPU torch."""
    if on_gpu:
        return
    for name in ("torchvision", "torchaudio", "torchcodec"):
        if importlib.util.find_spec(name) is not None:
            yield Finding(name, "missing", "installed: its CUDA build breaks vLLM's CPU build",
                          f"remove it: pip uninstall {name}")


def gpu_extras(*, on_gpu: bool) -> Iterator[Finding]:
    """Libraries that only GPU training uses."""
    remedies = {
        "transformer_engine": "context parallelism and fast kernels need it: "
                              "pip install 'grpo-megatron[gpu]'",
        "apex": "NVIDIA Apex comes from its source or an NGC container; the package of that name "
                "in the index is unrelated",
        "flash_attn": "packed attention without Transformer Engine: pip install flash-attn",
    }
    for module, remedy in remedies.items():
        found = importlib.util.find_spec(module) is not None
        yield Finding(module, "ok" if found else "optional",
                      "installed" if found else "not installed" + ("" if on_gpu else " (no GPU)"),
                      remedy)


def system_tools(*, on_gpu: bool) -> Iterator[Finding]:
    """What vLLM's CPU build loads or runs."""
    absent = "optional" if on_gpu else "missing"
    numa = _loads("libnuma.so.1")
    yield Finding("libnuma", "ok" if numa else absent, "libnuma.so.1" if numa else "not found",
                  "apt-get install libnuma1 (or the numactl-libs package)")
    lscpu = shutil.which("lscpu")
    yield Finding("lscpu", "ok" if lscpu else absent, lscpu or "not found",
                  "apt-get install util-linux")


def _loads(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def code_sandbox() -> Finding:
    """Whether an isolated program runs; needed by the reward `code_tests` only."""
    from grpo_megatron.rewards import sandbox

    reason = sandbox.why_not()
    return Finding("code sandbox", "optional" if reason else "ok", reason or "bubblewrap works",
                   f"without it the reward code_tests is refused: {sandbox.REMEDY}")


def memory() -> Finding:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return _room("memory", total, _MIN_MEMORY_GIB, f"the demo wants {_MIN_MEMORY_GIB} GiB")


def shared_memory() -> Finding:
    path = Path("/dev/shm")
    free = shutil.disk_usage(path).free if path.is_dir() else 0
    return _room("/dev/shm", free, _MIN_SHM_GIB, "engines exchange tensors there; start the "
                 "container with --shm-size=8g")


def disk() -> Finding:
    return _room("disk", shutil.disk_usage(Path.cwd()).free, _MIN_DISK_GIB,
                 "run directories and checkpoints need more room")


def _room(what: str, num_bytes: int, minimum: float, remedy: str) -> Finding:
    gib = num_bytes / 2**30
    return Finding(what, "ok" if gib >= minimum else "warning", f"{gib:.1f} GiB", remedy)
