#!/usr/bin/env bash
# Builds .venv-gpu: torch, Transformer Engine and vLLM for CUDA 13.0, Megatron-Core, and
# grpo-megatron itself (editable). Needs Python 3.12, a C++ compiler and 20 GB of disk; no CUDA
# toolkit, since compiler and headers are among the packages, and no GPU (a login node will do).
# Idempotent; a second run with the same lock returns at once.
#
#   PYTHON     interpreter to use (default: a Python 3.12 on PATH or of pyenv)
#   MAX_JOBS   compilers at a time (default: one for every 4 GB of memory, at most one a core)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=scripts/find_python.sh
source scripts/find_python.sh

lock=requirements/gpu.txt
venv=.venv-gpu
stamp=$venv/.setup-stamp
wanted=$(cat "$lock" pyproject.toml scripts/setup_gpu.sh scripts/find_python.sh | sha256sum |
    cut -d' ' -f1)
[[ -x $venv/bin/grpo-megatron && $(cat "$stamp" 2>/dev/null) == "$wanted" ]] && exit 0

[[ $(uname -sm) == "Linux x86_64" ]] ||
    fail "$lock is for Linux x86_64, this is $(uname -sm)" \
        "resolve requirements/gpu.in for it, as the head of $lock says"
python=${PYTHON:-$(find_python 3.12)}
[[ -n $python && $(version_of "$python") == 3.12 ]] ||
    fail "the GPU packages are for Python 3.12, and there is none" "install it (apt-get install \
python3.12-venv python3.12-dev, pyenv install 3.12 or uv python install 3.12), or set PYTHON to \
its path, and run make setup-gpu again"
command -v g++ >/dev/null ||
    fail "no C++ compiler, which Transformer Engine and vLLM's kernels need" "apt-get install g++"
include=$("$python" -c 'import sysconfig; print(sysconfig.get_path("include"))')
[[ -f $include/Python.h ]] ||
    fail "$python has no headers ($include/Python.h)" "apt-get install python3.12-dev"
if command -v nvidia-smi >/dev/null && driver=$(nvidia-smi --query-gpu=driver_version \
    --format=csv,noheader 2>/dev/null | head -1) && [[ -n $driver ]]; then
    ((${driver%%.*} >= 580)) ||
        fail "the driver is $driver, and CUDA 13.0 needs 580 or newer" "update the driver"
else
    say "no GPU here: packages are installed all the same; grpo-megatron prove needs one"
fi
say "using Python 3.12 ($python)"

rm -f "$stamp"
if [[ $(version_of "$venv/bin/python") != 3.12 ]]; then
    "$python" -m venv --clear "$venv" ||
        fail "$python cannot create virtual environments" "apt-get install python3.12-venv"
fi
pip=("$venv/bin/python" -m pip --disable-pip-version-check)
say "installing $(grep -c '==' "$lock") packages (2 to 5 minutes, 9 GB)"
"${pip[@]}" install -q --no-deps -r "$lock" ||
    fail "could not install $lock" "see the message above; the disk needs 20 GB"

# --- the half of Transformer Engine that is compiled against torch
version=$(sed -n 's/^transformer-engine==//p' "$lock")
if [[ $("${pip[@]}" list --format=freeze | sed -n 's/^transformer[_-]engine[_-]torch==//p') != "$version" ]]; then
    libraries=$("$venv/bin/python" -c 'import nvidia; print(nvidia.__path__[0])')
    memory_gb=$(($(sed -n 's/^MemTotal: *\([0-9]*\) kB/\1/p' /proc/meminfo) >> 20))
    jobs=$((memory_gb / 4 > 0 ? memory_gb / 4 : 1))
    jobs=$((jobs < $(nproc) ? jobs : $(nproc)))
    export MAX_JOBS=${MAX_JOBS:-$jobs}
    say "building Transformer Engine $version for torch: 37 files, $MAX_JOBS at a time, a minute each"
    CUDA_HOME=$libraries/cu13 NVTE_BUILD_USE_NVIDIA_WHEELS=1 NVTE_PYTORCH_FORCE_BUILD=TRUE \
        PATH="$PWD/$venv/bin:$PATH" "${pip[@]}" install -q --no-deps --no-build-isolation \
        --no-binary transformer-engine-torch "transformer-engine-torch==$version" ||
        fail "could not build transformer-engine-torch $version" \
            "see the message above; where the compiler was killed, set MAX_JOBS=1"
fi
"${pip[@]}" install -q --no-deps --no-build-isolation -e . ||
    fail "could not install the checkout" "see the message above"

"$venv/bin/grpo-megatron" --version >/dev/null ||
    fail "the installed command does not start" "rm -rf $venv and run make setup-gpu again"
echo "$wanted" >"$stamp"
say "ready: $venv/bin/grpo-megatron; next: $venv/bin/grpo-megatron prove"
