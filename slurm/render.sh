#!/usr/bin/env bash
# Prints the batch script of a run: train.sbatch with a site's settings and a recipe's nodes.
# `grpo-megatron submit` calls it.
#
#   render.sh SITE RUN_DIRECTORY NAME TRAINER_NODES ROLLOUT_NODES ENVIRONMENT_NODES GPUS_PER_NODE
#             RANKS_PER_NODE [ARGUMENT…]
#
# RANKS_PER_NODE: tasks of the largest step on a node. ARGUMENTs of the job's script: by default the run directory.
set -euo pipefail
site=$1 run=$2 name=$3 trainer_nodes=$4 rollout_nodes=$5 environment_nodes=$6 gpus=$7 ranks=$8
arguments=("${@:9}")
((${#arguments[@]})) || arguments=("$run")
refuse() { echo "$1" >&2; exit 1; }

# read_names: every NAME of `$NAME`, `${NAME:-…}` and the like that the site reads when it is read;
# what its functions read, they read on a node.
read_names() {
    sed -E '/^ *#/d; /^[A-Za-z_]+ *\(\).*\} *$/d; /^[A-Za-z_]+ *\(\)/,/^\}/d' "$site" |
        sed 's/\$/\n&/g' | sed -nE 's/^\$\{?([A-Z][A-Z0-9_]*).*/\1/p' | sort -u
}
# default_names: those of them that have a default, or must be set
default_names() {
    sed 's/\${/\n&/g' "$site" | sed -nE 's/^\$\{([A-Z][A-Z0-9_]*):?[-?].*/\1/p' | sort -u
}
declare -A environment=()  # what the site reads of it
for setting in $(read_names); do
    if [[ $(declare -p "$setting" 2>/dev/null) == "declare -x"* ]]; then
        environment[$setting]=${!setting}
    fi
done

# What the site prints is no part of the script. It need not care for unset variables, nor for the
# exit code of its last line.
set +u
trap 'echo "its line $LINENO failed with exit code $?: $BASH_COMMAND" >&2' ERR
# shellcheck source=/dev/null
source <(cat "$site"; printf '\n:\n') >&2
trap - ERR
set -u
declare -F activate >/dev/null || refuse "activate() is missing: what a shell on a node needs first"

# seconds LIMIT: of a time as sbatch takes it: D-H[:M[:S]], H:M:S, M:S or M
seconds() {
    local days=0 hours=0 minutes=0 rest=$1 s=0
    if [[ $rest == *-* ]]; then
        days=${rest%%-*}
        IFS=: read -r hours minutes s <<<"${rest#*-}"
    elif [[ $rest == *:*:* ]]; then
        IFS=: read -r hours minutes s <<<"$rest"
    else
        IFS=: read -r minutes s <<<"$rest"
    fi
    echo $((10#$days * 86400 + 10#$hours * 3600 + 10#${minutes:-0} * 60 + 10#${s:-0}))
}

# The patterns come first: arithmetic of what is no number fails without an end of this script.
early_s=60  # Slurm looks for notices that are due once a minute
limit=${TIME_LIMIT:-60} notice=${NOTICE_S:-600} restarts=${MAX_RESTARTS:-20}
digits='[0-9]{1,6}'
timed="^$digits(-$digits)?(:$digits){0,2}$"
endless='^([Uu][Nn][Ll][Ii][Mm][Ii][Tt][Ee][Dd]|[Ii][Nn][Ff][Ii][Nn][Ii][Tt][Ee]|-1)$'
if [[ ! $notice =~ ^[1-9][0-9]{0,4}$ ]] || ((notice > 65535)); then
    refuse "NOTICE_S=$notice is no number of seconds from 1 to 65535, as sbatch takes them"
fi
if [[ ! $restarts =~ ^(0|[1-9][0-9]{0,8})$ ]]; then
    refuse "MAX_RESTARTS=$restarts is no number of restarts: 0 or more, in digits"
fi
if [[ $limit =~ $timed ]]; then
    limit_s=$(seconds "$limit")
    # of 0 seconds: Slurm takes it as no limit
    if ((limit_s > 0 && limit_s <= notice + early_s)); then
        said="NOTICE_S=$notice seconds, and the $early_s by which Slurm may be early, are the whole"
        said+=" TIME_LIMIT=$limit: a job would only be requeued"
        if ((limit_s > early_s + 1)); then said+="; NOTICE_S may be $((limit_s - early_s - 1))"; fi
        refuse "$said"
    fi
elif [[ ! $limit =~ $endless ]]; then
    refuse "TIME_LIMIT=$limit is no time of sbatch: minutes, M:S, H:M:S, D-H[:M[:S]] or UNLIMITED"
fi

# directives WORD…: one a line, quoted as sbatch reads them, which is not as bash does: outside of
# "…" a backslash does not keep a blank, and it knows no $'…'.
directives() {
    local word
    for word; do
        if [[ $word == *[[:cntrl:]]* ]]; then
            refuse "sbatch reads no line with a control character: $(printf %q "$word")"
        fi
        if [[ $word == *[!a-zA-Z0-9_@%+=:,./-]* ]]; then
            word=${word//\\/\\\\}
            word=\"${word//\"/\\\"}\"
        fi
        printf '#SBATCH %s\n' "$word"
    done
}

# Options of sbatch that this script sets: short (- for none), long, and what says them. What says the
# same as the script, such as --requeue, may stay.
own_options=(
    "-J --job-name the name of the recipe"
    "-p --partition PARTITION or ROLLOUT_PARTITION"
    "-N --nodes [placement] of the recipe"
    "-t --time TIME_LIMIT"
    "- --signal NOTICE_S"
    "-o --output runs_dir of the recipe: logs are in the run's directory"
    "-D --chdir the directory in which you submit"
    "- --open-mode nothing: every attempt appends to one log"
    "- --no-requeue MAX_RESTARTS=0"
    "-a --array several recipes: a run is one job"
)
if [[ ${ACCOUNT:-} ]]; then own_options+=("-A --account ACCOUNT"); fi
if ((gpus)); then own_options+=("- --gpus-per-node placement.gpus_per_node of the recipe"); fi
# refuse_own WORD: sbatch takes -X… and --long…, also shortened
refuse_own() {
    local given=${1%%=*} row short long meaning
    if [[ $1 == --open-mode=append ]]; then return; fi
    for row in "${own_options[@]}"; do
        read -r short long meaning <<<"$row"
        if [[ $short != - && $1 == "$short"* && $1 != --* ]] ||
            [[ $given == --?* && $given != --gpus && $long == "$given"* ]]; then
            refuse "$1 in SBATCH_FLAGS would override this script's own $long; what says it is $meaning"
        fi
    done
}

# split_flags TEXT: into the array `flags`, at blanks outside of quotes, as a shell does; nothing in it is
# replaced.
split_flags() {
    local text=$1 word='' quote='' begun='' c next i
    for ((i = 0; i < ${#text}; i++)); do
        c=${text:i:1} next=${text:i+1:1}
        if [[ $c == \\ && $quote != \' && (! $quote || $next == [\"\\]) ]]; then
            word+=$next begun=1
            ((++i))
        elif [[ $quote && $c == "$quote" ]]; then
            quote=''
        elif [[ ! $quote && $c == [\'\"] ]]; then
            quote=$c begun=1
        elif [[ ! $quote && $c == [[:space:]] ]]; then
            if [[ $begun ]]; then flags+=("$word"); fi
            word='' begun=''
        else
            word+=$c begun=1
        fi
    done
    if [[ $quote ]]; then refuse "SBATCH_FLAGS has a quote without its end: $text"; fi
    if [[ $begun ]]; then flags+=("$word"); fi
}

# SBATCH_FLAGS is an array of words, or a text: words between blanks, quoted where they have some.
flags=()
if [[ $(declare -p SBATCH_FLAGS 2>/dev/null) == "declare -a"* ]]; then
    flags=("${SBATCH_FLAGS[@]}")
else
    split_flags "${SBATCH_FLAGS:-}"
fi
for word in "${flags[@]}"; do refuse_own "$word"; done

# Of a node that it shares a job has one CPU, and srun makes no step with more tasks on a node than
# the job has CPUs there. Tasks of the job (--ntasks-per-node) would say it too, but they multiply
# --cpus-per-task, and steps inherit their number. A site that says it otherwise is left alone.
mincpus=()
if ((ranks > 1)); then mincpus=("--mincpus=$ranks"); fi
for word in "${flags[@]}"; do
    case $word in
        --exclusive | --mincpus* | --cpus-per-gpu* | --overcommit | -O) mincpus=() ;;
    esac
done

# component PARTITION NODES [GPUS]: of the job; all of it, or one part of a hetjob
component() {
    directives --job-name="$name" --partition="$1" --nodes="$2" --time="$limit" \
        ${ACCOUNT:+"--account=$ACCOUNT"} "${flags[@]}"
    if ((${3:-$gpus})); then directives --gpus-per-node="$gpus"; fi
}

# With one Slurm takes them all away, and replaces neither %% nor %j.
if [[ $run == *\\* ]]; then refuse "Slurm writes no log below a path with a backslash: $run"; fi
echo '#!/usr/bin/env bash'
sed -n '2,/^#$/{/^#$/!p}' "${BASH_SOURCE[0]%/*}/train.sbatch"
# The directory of a run's modules and relative paths is where it was submitted first, also when it
# is resumed from elsewhere.
directives --requeue --open-mode=append --signal="B:USR1@$notice" --chdir="$PWD" \
    --output="${run//%/%%}/logs/slurm-%j.out"
# Nodes without a partition of their own are the last ones of the part before them.
first=$trainer_nodes second=0 third=0
if [[ ${ROLLOUT_PARTITION:-} ]]; then second=$rollout_nodes; else ((first += rollout_nodes)); fi
if [[ ${ENVIRONMENT_PARTITION:-} ]]; then
    third=$environment_nodes
elif ((second)); then
    ((second += environment_nodes))
else
    ((first += environment_nodes))
fi
component "${PARTITION:?the partition to submit to}" "$first"
directives "${mincpus[@]}"
if ((second)); then
    echo '#SBATCH hetjob'
    component "$ROLLOUT_PARTITION" "$second"
fi
if ((third)); then
    echo '#SBATCH hetjob'
    component "$ENVIRONMENT_PARTITION" "$third" 0
fi

if [[ ! ${TIME_LIMIT:-} ]]; then echo '# The site has no TIME_LIMIT: 60 minutes.'; fi

# What the site takes from the environment has the values that it has now, also when the job is
# resumed from another shell; secrets stay there, from where sbatch passes them on. A setting with a
# default has its own value: what the default is made of may be another one later.
printf '\n# --- the site: %s\n' "$site"
for setting in $(default_names); do
    if [[ ${!setting+set} ]]; then environment[$setting]=${!setting}; fi
done
for setting in $(printf '%s\n' "${!environment[@]}" | sort); do
    case $setting in
        *KEY* | *TOKEN* | *SECRET* | *PASSWORD*) continue ;;
        # each node's and job's own
        SLURM_* | *_VISIBLE_DEVICES | TMPDIR | HOSTNAME | HOME | USER | PWD | OLDPWD) continue ;;
    esac
    printf 'export %s=%q\n' "$setting" "${environment[$setting]}"
done
cat "$site"
printf '\nslurm_notice_s=%s  # that of --signal above\n' "$notice"
printf 'set --'
printf ' %q' "${arguments[@]}"
echo
sed -n '/^# --- the job$/,$p' "${BASH_SOURCE[0]%/*}/train.sbatch"
