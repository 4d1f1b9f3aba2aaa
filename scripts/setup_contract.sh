#!/usr/bin/env bash
# Puts the CUDA builds of requirements/contract.txt into .contract/packages, for tests that ask them
# without a GPU, and a libcuda.so.1 into .contract/lib, whose functions all fail: the extensions of
# those builds load with it. The sources of Transformer Engine's compiled half, which has no build
# without nvcc, go to .contract/sources: they say which functions it has. Idempotent; needs .venv
# with torch's CUDA build, and a C compiler.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

packages=.contract/packages
library=.contract/lib/libcuda.so.1
stamp=.contract/.setup-stamp
wanted=$(cat requirements/contract.txt scripts/setup_contract.sh | sha256sum | cut -d' ' -f1)

fail() {  # fail MESSAGE REMEDY
    printf 'setup: error: %s\n  remedy: %s\n' "$1" "$2" >&2
    exit 3
}
[[ $(cat "$stamp" 2>/dev/null) == "$wanted" ]] && exit 0

compgen -G ".venv/lib/python*/site-packages/torch/lib/libtorch_cuda.so" >/dev/null ||
    fail ".venv has a CPU build of torch, which vLLM's CUDA build cannot load" \
        "set up a second checkout with Python 3.12 and without TORCH_INDEX_URL, and run it there"
for tool in cc readelf; do
    command -v "$tool" >/dev/null ||
        fail "no $tool" "apt-get install gcc libc6-dev binutils"
done

printf 'setup: installing CUDA builds for the contract tier (about 1 minute, 2 GB)\n'
rm -rf .contract
mkdir -p "$(dirname "$library")"
.venv/bin/python -m pip --disable-pip-version-check install -q --no-deps --target "$packages" \
    -r requirements/contract.txt ||
    fail "could not install requirements/contract.txt" "see the message above"

compiled_half=$(grep '^transformer-engine==' requirements/contract.txt |
    sed 's/transformer-engine/transformer-engine-torch/')
.venv/bin/python -m pip --disable-pip-version-check download -q --no-deps --no-build-isolation \
    --no-binary transformer-engine-torch -d .contract/sources "$compiled_half" ||
    fail "could not download the sources of $compiled_half" "see the message above"
tar -xzf .contract/sources/*.tar.gz -C .contract/sources

# Every function of CUDA's driver that an extension refers to, whether it is called or not.
functions=$(find "$packages/vllm" -name '*.so' -exec readelf -W --dyn-syms {} + |
    awk '$7 == "UND" && $8 ~ /^cu[A-Z]/ { print $8 }' | sort -u)
cuda_error_no_device=100
for function in $functions; do
    printf 'int %s(void) { return %d; }\n' "$function" "$cuda_error_no_device"
done | cc -shared -fPIC -Wl,-soname,libcuda.so.1 -o "$library" -x c -
echo "$wanted" >"$stamp"
