"""`doctor`: what is missing here and how to get it. Imports no engine: a child process does."""

import ctypes.util
import importlib.metadata
import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import typer

from grpo_megatron.errors import SetupError

Status = Literal["ok", "missing", "warning", "optional"]
"""optional: only some uses need it."""
_STYLE: dict[str, dict[str, Any]] = {
    "ok": {"fg": "green"},
    "missing": {"fg": "red", "bold": True},
    "warning": {"fg": "yellow"},
    "optional": {"dim": True},
}
_CUDA_ONLY = ("torchvision", "torchaudio", "torchcodec")
"""Published builds of these are for CUDA and break `import vllm` beside a CPU torch."""


@dataclass(frozen=True, slots=True)
class FusedPath:
    """A fused path of training: imported, because a build for another torch or driver is no use."""

    what: str
    module: str
    remedy: str


_FUSED_PATHS = (
    FusedPath(
        "Transformer Engine",
        "transformer_engine.pytorch",
        "its fused layers, Adam and grouped GEMM: make setup-gpu (docs/gpus.md)",
    ),
    FusedPath(
        "Apex FusedAdam",
        "amp_C",
        "not needed beside Transformer Engine, which has its own; NVIDIA Apex comes from its "
        "source, the package of that name in the index is unrelated",
    ),
    FusedPath(
        "flash attention",
        "flash_attn",
        "attention of Transformer Engine is faster with it: pip install flash-attn",
    ),
    FusedPath(
        "grouped GEMM",
        "transformer_engine.pytorch.module.grouped_linear",
        "without Transformer Engine's, experts are multiplied one by one",
    ),
)
_SYSTEM_REMEDIES = {
    "libnuma": "apt-get install libnuma1 (or the numactl-libs package)",
    "lscpu": "apt-get install util-linux",
}
_WANTED_GIB = {"memory": 8, "/dev/shm": 1, "disk": 5}
_SIZE_REMEDIES = {
    "memory": "the demo wants 8 GiB",
    "/dev/shm": "engines exchange tensors there; start the container with --shm-size=8g",
    "disk": "run directories and checkpoints need more room",
}


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report."""

    what: str
    status: Status
    found: str
    remedy: str = ""


def run_doctor(*, as_json: bool = False) -> int:
    """Print what this machine has and lacks; returns the exit code."""
    findings = all_findings()
    if as_json:
        print(json.dumps([asdict(finding) for finding in findings], indent=2))
    else:
        _print(findings)
    if _missing(findings):
        return SetupError.exit_code
    return 0


def _missing(findings: list[Finding]) -> list[str]:
    return [finding.what for finding in findings if finding.status == "missing"]


def _print(findings: list[Finding]) -> None:
    for finding in findings:
        status = typer.style(f"{finding.status:<9}", **_STYLE[finding.status])
        typer.echo(f"{status}{finding.what:<24}{finding.found}")
        if finding.status != "ok" and finding.remedy:
            typer.secho(f"{'':<9}  {finding.remedy}", dim=True)
    missing = _missing(findings)
    typer.echo()
    if missing:
        typer.echo(f"missing: {', '.join(missing)}")
    else:
        typer.echo("nothing required is missing")


def all_findings() -> list[Finding]:
    """Look at everything that a run may need."""
    on_gpu = Path("/proc/driver/nvidia/version").exists() or Path("/dev/nvidia0").exists()
    build: Literal["cpu", "gpu"] = "cpu"
    if on_gpu:
        build = "gpu"
    return [
        python_version(),
        *packages(build),
        torch_works(on_gpu=on_gpu),
        *modules(on_gpu=on_gpu),
        *system_tools(on_gpu=on_gpu),
        code_sandbox(),
        *sizes(),
    ]


def _required(*, good: bool) -> Status:
    if good:
        return "ok"
    return "missing"


def python_version() -> Finding:
    """Whether this Python is one that the lock is for."""
    good = (3, 11) <= sys.version_info[:2] <= (3, 12)
    return Finding(
        "python",
        _required(good=good),
        platform.python_version(),
        "Python 3.12 or 3.11",
    )


def packages(build: Literal["cpu", "gpu"]) -> Iterator[Finding]:
    """What the installed metadata requires, with the extra `build`."""
    from packaging.requirements import Requirement

    try:
        texts = importlib.metadata.requires("grpo-megatron") or []
    except importlib.metadata.PackageNotFoundError:
        yield Finding(
            "grpo-megatron",
            "missing",
            "not installed",
            "run `make setup`, or `pip install --no-deps -e .` in the checkout",
        )
        return
    for text in texts:
        wanted = Requirement(text)
        is_needed = True
        if wanted.marker is not None:
            is_needed = any(wanted.marker.evaluate({"extra": extra}) for extra in ("", build))
        if not is_needed or wanted.name == "transformer-engine":  # that one: modules
            continue
        try:
            version = importlib.metadata.version(wanted.name)
            good = wanted.specifier.contains(version, prereleases=True)
        except importlib.metadata.PackageNotFoundError:
            version = "not installed"
            good = False
        named = f"{wanted.name}{wanted.specifier}"
        yield Finding(
            wanted.name,
            _required(good=good),
            version,
            f"{named} is required: run `make setup`, or `pip install '{named}'`",
        )


def torch_works(*, on_gpu: bool) -> Finding:
    """Import torch in a child process, so that a broken build is a finding and not a crash."""

    def missing(found: str, remedy: str) -> Finding:
        return Finding("torch runtime", "missing", found, remedy)

    try:
        done = subprocess.run(
            [sys.executable, "-m", "grpo_megatron.trainer.torch_probe"],
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        )
    except subprocess.CalledProcessError as error:
        return missing(_last_line(error.stderr), "run `make setup`")
    except subprocess.TimeoutExpired:
        return missing(
            "importing torch takes more than 120 s", "check the file system of the environment"
        )
    facts = json.loads(done.stdout)
    if on_gpu and not facts["devices"]:
        return missing(
            f"{facts['version']} sees no GPU",
            "install the CUDA build of torch that matches the driver",
        )
    device = "CPU"
    collectives = "gloo"
    if facts["devices"]:
        device = f"CUDA {facts['cuda']}, {facts['devices']} GPU(s)"
        collectives = "nccl"
    if not facts[collectives]:
        return missing(
            f"{device}, {collectives} not available", f"install a build of torch with {collectives}"
        )
    return Finding("torch runtime", "ok", f"{device}, {collectives}")


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    if not lines:
        return "died"
    return lines[-1]


def modules(*, on_gpu: bool) -> Iterator[Finding]:
    """CUDA builds that break `import vllm` beside a CPU torch, and the fused paths of training."""
    if not on_gpu:
        yield from _misplaced_cuda_builds()
    for fused in _FUSED_PATHS:
        yield _fused_path(fused, on_gpu=on_gpu)


def _misplaced_cuda_builds() -> Iterator[Finding]:
    for name in _CUDA_ONLY:
        if importlib.util.find_spec(name) is not None:
            yield Finding(
                name,
                "missing",
                "installed: its CUDA build breaks vLLM's CPU build",
                f"remove it: pip uninstall {name}",
            )


def _fused_path(fused: FusedPath, *, on_gpu: bool) -> Finding:
    package = fused.module.partition(".")[0]
    if importlib.util.find_spec(package) is None:
        found = "not installed"
        if not on_gpu:
            found = "not installed (no GPU)"
        return Finding(fused.what, "optional", found, fused.remedy)
    done = subprocess.run(
        [sys.executable, "-c", f"import torch, {fused.module}"],
        text=True,
        capture_output=True,
        check=False,
    )
    if done.returncode != 0:
        return Finding(fused.what, "optional", f"broken: {_last_line(done.stderr)}", fused.remedy)
    return Finding(fused.what, "ok", "works", fused.remedy)


def system_tools(*, on_gpu: bool) -> Iterator[Finding]:
    """What vLLM's CPU build looks for on the machine."""
    places = {"libnuma": ctypes.util.find_library("numa"), "lscpu": shutil.which("lscpu")}
    absent: Status = "missing"
    if on_gpu:
        absent = "optional"
    for name, place in places.items():
        if place:
            yield Finding(name, "ok", place, _SYSTEM_REMEDIES[name])
        else:
            yield Finding(name, absent, "not found", _SYSTEM_REMEDIES[name])


def code_sandbox() -> Finding:
    """Whether an isolated program runs; needed by the reward `code_tests` only."""
    from grpo_megatron.rewards import sandbox

    reason = sandbox.why_not()
    remedy = f"without it the reward code_tests is refused: {sandbox.REMEDY}"
    if not reason:
        return Finding("code sandbox", "ok", "bubblewrap works", remedy)
    return Finding("code sandbox", "optional", reason, remedy)


def sizes() -> Iterator[Finding]:
    """Memory and disk space, against what the demo wants."""
    shared = Path("/dev/shm")
    free = {
        "memory": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "/dev/shm": 0,
        "disk": shutil.disk_usage(Path.cwd()).free,
    }
    if shared.is_dir():
        free["/dev/shm"] = shutil.disk_usage(shared).free
    for what, num_bytes in free.items():
        gib = num_bytes / 2**30
        status: Status = "ok"
        if gib < _WANTED_GIB[what]:
            status = "warning"
        yield Finding(what, status, f"{gib:.1f} GiB", _SIZE_REMEDIES[what])
