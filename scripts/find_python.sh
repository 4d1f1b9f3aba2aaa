# shellcheck shell=bash
# Sourced by the set-up scripts: which interpreter they use, and how they say what is wrong.
say() { printf 'setup: %s\n' "$*"; }

fail() {  # fail MESSAGE REMEDY
    printf 'setup: error: %s\n  remedy: %s\n' "$1" "$2" >&2
    exit 3
}

version_of() {  # version_of PYTHON: 3.12, or nothing if it does not run
    "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null || true
}

find_python() {  # find_python VERSION...: the first that runs, on PATH or of pyenv
    local wanted_version candidate
    for wanted_version in "$@"; do
        # a shim of pyenv may be on PATH for a version that is not there, so ask each one
        for candidate in "python$wanted_version" \
            "${PYENV_ROOT:-${HOME:-}/.pyenv}"/versions/"$wanted_version".*/bin/python; do
            if [[ $(version_of "$candidate") == "$wanted_version" ]]; then
                echo "$candidate"
                return
            fi
        done
    done
}
