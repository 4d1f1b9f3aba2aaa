#!/usr/bin/env bash
# Builds .venv in the checkout: the exact lock, then grpo-megatron itself (editable).
# Idempotent; a second run with the same lock and pyproject.toml returns at once.
#
#   PYTHON           interpreter to use (default: a Python 3.12, else 3.11, on PATH or of pyenv)
#   TORCH_INDEX_URL  index that serves CPU builds of torch, if the default index does not
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

lock=requirements/cpu.txt
cuda_libraries=requirements/cuda-libraries.txt
venv=.venv
stamp=$venv/.setup-stamp
wanted=$(cat "$lock" "$cuda_libraries" pyproject.toml scripts/setup.sh scripts/find_python.sh |
    sha256sum | cut -d' ' -f1)

# shellcheck source=scripts/find_python.sh
source scripts/find_python.sh

is_ready() {
    [[ -x $venv/bin/grpo-megatron && $(cat "$stamp" 2>/dev/null) == "$wanted" ]] || return 1
    [[ -z ${PYTHON:-} || $(version_of "$PYTHON") == "$(version_of "$venv/bin/python")" ]]
}
is_ready && exit 0

# --- one set-up at a time: two pips in one environment leave half-installed packages behind
if command -v flock >/dev/null; then
    exec 9>.setup.lock
    flock -n 9 || { say "waiting for another set-up of this checkout"; flock 9; }
    is_ready && exit 0
fi

# --- interpreter
python=${PYTHON:-$(find_python 3.12 3.11)}
[[ -n $python ]] ||
    fail "no Python 3.12 or 3.11 on PATH or among pyenv's versions" "install one (apt-get install \
python3.12-venv where the system has it, else pyenv install 3.12 or uv python install 3.12), or \
set PYTHON to its path, and run make setup again"
version=$(version_of "$python")
[[ -n $version ]] || fail "$python does not run" "set PYTHON to a Python 3.12 or 3.11"
[[ $version == 3.12 || $version == 3.11 ]] ||
    fail "$python is Python $version, but $lock is for 3.12 and 3.11" \
        "set PYTHON to a Python 3.12 or 3.11"
say "using Python $version ($python)"

# --- system libraries that vLLM's CPU build loads or runs
has_libnuma() {
    ldconfig -p 2>/dev/null | grep -q 'libnuma\.so\.1' ||
        compgen -G '/usr/lib*/libnuma.so.1' >/dev/null ||
        compgen -G '/usr/lib/*/libnuma.so.1' >/dev/null
}
missing=()
has_libnuma || missing+=(libnuma1)
command -v lscpu >/dev/null || missing+=(util-linux)
if ((${#missing[@]})); then
    if [[ $(id -u) == 0 ]] && command -v apt-get >/dev/null; then
        say "installing ${missing[*]}"
        apt-get update -qq
        apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null ||
            fail "apt-get could not install ${missing[*]}" "install them by hand"
    else
        fail "missing system packages: ${missing[*]}" \
            "sudo apt-get install ${missing[*]} (RPM systems: numactl-libs util-linux)"
    fi
fi

# --- optional: the sandbox in which the reward code_tests runs programs
if ! command -v bwrap >/dev/null; then
    if [[ $(id -u) == 0 ]] && command -v apt-get >/dev/null && apt-get update -qq &&
        apt-get install -y -qq --no-install-recommends bubblewrap >/dev/null; then
        say "installed bubblewrap"
    else
        say "no bubblewrap: recipes with the reward code_tests will be refused (apt-get install \
bubblewrap)"
    fi
fi

# --- optional: the browser in which the tests open the report page
if ! command -v chromium >/dev/null || ! command -v chromedriver >/dev/null; then
    if [[ $(id -u) == 0 ]] && command -v apt-get >/dev/null && apt-get update -qq &&
        apt-get install -y -qq --no-install-recommends chromium chromium-driver >/dev/null; then
        say "installed chromium"
    else
        say "no chromium: the tests that open the report page in a browser will be skipped \
(apt-get install chromium chromium-driver)"
    fi
fi

# --- virtual environment
if [[ $(version_of "$venv/bin/python") != "$version" ]] ||
    ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
    say "creating $venv"
    "$python" -m venv --clear "$venv" ||
        fail "$python cannot create virtual environments" "apt-get install python$version-venv"
fi
rm -f "$stamp"

# --- packages: torch first, because its absence from an index has a remedy of its own
pip=("$venv/bin/python" -m pip --disable-pip-version-check)
index=()
if [[ -n ${TORCH_INDEX_URL:-} ]]; then
    index=(--extra-index-url "$TORCH_INDEX_URL")
fi
torch=$(grep '^torch==' "$lock")
say "installing $(grep -c '==' "$lock") packages (about 2 minutes, 3 GB)"
"${pip[@]}" install -q --no-deps "${index[@]}" "$torch" ||
    fail "could not install $torch" "if the index has no build of torch for Python $version, set \
TORCH_INDEX_URL to PyTorch's CPU wheel index (PyTorch's installation page names it)"
if compgen -G "$venv/lib/python*/site-packages/torch/lib/libtorch_cuda.so" >/dev/null; then
    say "no CPU build of torch for Python $version here: adding what its CUDA build loads (3 GB; \
TORCH_INDEX_URL avoids it)"
    "${pip[@]}" install -q --no-deps -r "$cuda_libraries" ||
        fail "could not install $cuda_libraries" "see the message above; the disk needs 8 GB"
fi
"${pip[@]}" install -q --no-deps "${index[@]}" -r "$lock" ||
    fail "could not install the lock" "see the message above; the disk needs 5 GB"
for name in torchvision torchaudio torchcodec; do  # CUDA builds: they break vLLM beside CPU torch
    if "${pip[@]}" show -q "$name" 2>/dev/null; then
        say "removing $name"
        "${pip[@]}" uninstall -q -y "$name"
    fi
done
"${pip[@]}" install -q --no-deps --no-build-isolation -e . ||
    fail "could not install the checkout" "see the message above"

"$venv/bin/grpo-megatron" --version >/dev/null ||
    fail "the installed command does not start" "rm -rf $venv and run make setup again"
echo "$wanted" >"$stamp"
say "ready: $venv/bin/grpo-megatron"
