#!/usr/bin/env bash
# Builds .venv in the checkout: the exact lock, then grpo-megatron itself (editable).
# Idempotent; a second run with the same lock and pyproject.toml returns at once.
#
#   PYTHON           interpreter to use (default: python3.11)
#   TORCH_INDEX_URL  index that serves CPU builds of torch, if the default index does not
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

lock=requirements/cpu.txt
venv=.venv
stamp=$venv/.setup-stamp
wanted=$(cat "$lock" pyproject.toml scripts/setup.sh | sha256sum | cut -d' ' -f1)

say() { printf 'setup: %s\n' "$*"; }
fail() {  # fail MESSAGE REMEDY
    printf 'setup: error: %s\n  remedy: %s\n' "$1" "$2" >&2
    exit 3
}

is_ready() { [[ -x $venv/bin/grpo-megatron && $(cat "$stamp" 2>/dev/null) == "$wanted" ]]; }
is_ready && exit 0

# --- one set-up at a time: two pips in one environment leave half-installed packages behind
if command -v flock >/dev/null; then
    exec 9>.setup.lock
    flock -n 9 || { say "waiting for another set-up of this checkout"; flock 9; }
    is_ready && exit 0
fi

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
python=${PYTHON:-python3.11}
command -v "$python" >/dev/null ||
    fail "no $python" "install Python 3.11 (or set PYTHON to its path) and run make setup again"
version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
[[ $version == 3.11 ]] ||
    fail "$python is Python $version, but $lock is for 3.11" "set PYTHON to a Python 3.11"
if [[ ! -x $venv/bin/python ]] || ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
    say "creating $venv"
    "$python" -m venv --clear "$venv" ||
        fail "$python cannot create virtual environments" "apt-get install python3.11-venv"
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
    fail "could not install $torch" "if the index has no CPU builds of torch, set \
TORCH_INDEX_URL to PyTorch's CPU wheel index (PyTorch's installation page names it)"
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
