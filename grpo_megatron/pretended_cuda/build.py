"""Compile `guard.cpp` for the torch that is installed, on first use."""

import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch

from grpo_megatron.errors import SetupError

SOURCE = Path(__file__).with_name("guard.cpp")
_COMPILERS = ("g++", "c++", "clang++")


def library() -> Path:
    """Return the compiled library, from the cache where it was compiled before (10 s).

    Raises SetupError without a C++ compiler, or where it fails."""
    path = _cache() / f"{_key()}.so"
    if not path.exists():
        _compile(path)
    return path


def _cache() -> Path:
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "grpo_megatron" / "pretended_cuda"


def _key() -> str:
    """Name what the library depends on: this source, and torch's classes."""
    described = f"{torch.__version__} {torch.__file__}".encode()
    return hashlib.sha256(described + SOURCE.read_bytes()).hexdigest()[:16]


def _compiler() -> str:
    """Find a C++ compiler: `CXX`, or a usual one."""
    for name in (os.environ.get("CXX"), *_COMPILERS):
        if name and shutil.which(name):
            return name
    raise SetupError(
        "the pretended CUDA device has a part in C++, and there is no C++ compiler",
        remedy="install one (Debian: apt-get install g++), or name one in CXX",
    )


def _compile(path: Path) -> None:
    """Compile to `path`, which appears whole: other ranks may be doing the same."""
    compiler = _compiler()
    root = Path(torch.__file__).parent
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        made = Path(folder) / path.name
        command = [
            compiler,
            *("-O1", "-shared", "-fPIC", "-std=c++20", "-w"),
            f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
            f"-I{root / 'include'}",
            str(SOURCE),
            *("-o", str(made)),
            f"-L{root / 'lib'}",
            *("-lc10", "-ltorch_cpu", f"-Wl,-rpath,{root / 'lib'}"),
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SetupError(
                f"{compiler} cannot compile {SOURCE.name} for torch {torch.__version__}:\n"
                f"{_first_errors(done.stderr)}",
                where=str(SOURCE),
                remedy="give a compiler that knows C++20 in CXX",
            )
        os.replace(made, path)


def _first_errors(text: str) -> str:
    lines = text.strip().splitlines()
    return "\n".join(lines[:10])
