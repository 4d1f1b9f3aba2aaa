#!/usr/bin/env bash
# Several recipes, each after the one before has succeeded. A stage that fails cancels the rest.
#
#   slurm/stage_chain.sh SITE RECIPE [RECIPE…] [-- KEY=VALUE…]      (the settings go to every stage)
#
# A stage starts from what another exported: model.path = "runs/<name of that stage>/export".
# Prints the job ids. A stage that is requeued keeps its id, so the next one waits for its end.
set -euo pipefail
site=${1:?a site}
shift
recipes=() settings=()
while (($#)) && [[ $1 != -- ]]; do recipes+=("$1"); shift; done
if (($#)); then settings=("${@:2}"); fi
((${#recipes[@]})) || { echo "usage: stage_chain.sh SITE RECIPE..." >&2; exit 2; }

jobs=()
cancel_all() { if ((${#jobs[@]})); then scancel "${jobs[@]}"; fi; }
trap 'echo "a stage could not be submitted: the others are cancelled" >&2; cancel_all' ERR
for recipe in "${recipes[@]}"; do
    after=()
    if ((${#jobs[@]})); then after=(--after "${jobs[-1]}"); fi
    job=$(grpo-megatron submit "$recipe" --site "$site" "${after[@]}" "${settings[@]}")
    jobs+=("$job")
    echo "$job $recipe"
done
