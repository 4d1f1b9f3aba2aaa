#!/usr/bin/env bash
# For scripts of jobs, after `activate`: words of a site's setting, as Python's shlex has them, which is
# how a run reads them.

# words_of NAME ARRAY: of the variable into the array. A setting that has no words ends the script.
words_of() {
    local -n words_of_name=$2
    # shellcheck disable=SC2034  # the array has another name where it is used
    mapfile -d '' -t words_of_name < <(python "${BASH_SOURCE[0]%/*}/words.py" "$1" "${!1:-}")
    wait $! || exit 2
}
