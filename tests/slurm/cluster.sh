#!/usr/bin/env bash
# A real Slurm cluster on one Debian machine, for tests: one slurmctld, and one slurmd per "node".
# A node is a set of namespaces (network, host name, mounts, processes): it has an address, a /tmp,
# a /dev/shm and a process table of its own. Needs root. No cgroups, no accounting.
#
#   cluster.sh up            start it (or leave a running one alone); prints SLURM_CONF=...
#   cluster.sh down          end every process of it
#   cluster.sh crash NODE    the node's power goes: all of its processes die at once
#   cluster.sh revive NODE   start a crashed node again
#   cluster.sh cut A B       packets between two nodes are lost, in both directions
#   cluster.sh mend A B      they arrive again
#
# CLUSTER_NUMBER  several clusters may run at once, each with a number of its own (0)
# CLUSTER_DIR     state (default /var/lib/grpo-megatron-slurm, and its number unless that is 0)
# CLUSTER_NODES   number of nodes (4)      CLUSTER_CPUS  cores that each claims (8)
# CLUSTER_SHARED  directories below /tmp, separated by colons, that all nodes share
set -euo pipefail

number=${CLUSTER_NUMBER:-0}
dir=${CLUSTER_DIR:-/var/lib/grpo-megatron-slurm${number#0}}
nodes=${CLUSTER_NODES:-4}
cpus=${CLUSTER_CPUS:-8}
shared=${CLUSTER_SHARED:-}
network=10.$((78 + number)).0
bridge=gmslurm$number
namespace=gm${number#0}-
cable=gmv${number#0}
if ((number)); then cable+=x; fi
patience=300  # seconds, with what hangs: a busy machine must not come near it
nobody=02:00:00:00:00:99  # no node has this address
port=$((6917 + 2 * number))
self=$(readlink -f "${BASH_SOURCE[0]}")
export SLURM_CONF=$dir/slurm.conf

fail() { echo "cluster: error: $*" >&2; exit 3; }
address() { echo "$network.$((10 + ${1#node}))"; }
all_nodes() { seq -f 'node%.0f' "$nodes"; }

# retry SECONDS COMMAND...: until it succeeds
retry() {
    local end=$((SECONDS + $1)); shift
    until "$@" >/dev/null 2>&1; do
        ((SECONDS < end)) || return 1
        sleep 0.1
    done
}

# end PIDFILE NAME: kill the process that a file names, if it still is that program
end() {
    local pid
    pid=$(cat "$1" 2>/dev/null) || return 0
    if [[ $(cat "/proc/$pid/comm" 2>/dev/null) == "$2" ]]; then kill -KILL "$pid"; fi
    rm -f "$1"
}

# ready [NODE]: all nodes, or this one, answer and are not down
ready() {
    local which=() count=$nodes
    if [[ ${1:-} ]]; then which=(-n "$1") count=1; fi
    [[ $(timeout 30 sinfo -h -N -r -p main "${which[@]}" -t idle,alloc,mix,comp -o %N | wc -l) == "$count" ]]
}

# came_up NODE SINCE: its slurmd began then or later and is known to slurmctld, which may not have
# missed the one before it
came_up() {
    local node
    node=$(SLURM_TIME_FORMAT=%s timeout 30 scontrol --oneliner show node "$1")
    [[ $node =~ SlurmdStartTime=([0-9]+) ]] && ((BASH_REMATCH[1] >= $2)) && ready "$1"
}

# gone NODE: none of its processes is left
gone() { [[ ! -e /run/netns/$namespace$1 || -z $(ip netns pids "$namespace$1") ]]; }

install_packages() {
    local packages=(slurmctld slurmd slurm-client munge iproute2 util-linux)
    dpkg -s "${packages[@]}" >/dev/null 2>&1 && return
    local guard=/usr/sbin/policy-rc.d made=
    if [[ ! -e $guard ]]; then  # the packages must not start daemons of their own
        printf '#!/bin/sh\nexit 101\n' >$guard; chmod 755 $guard; made=1
    fi
    apt-get update -qq
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends \
        "${packages[@]}" >/dev/null || fail "apt-get could not install ${packages[*]}"
    if [[ $made ]]; then rm -f $guard; fi
}

write_configuration() {
    { echo "127.0.0.1 localhost"; echo "$network.1 $(hostname -s)"
      for node in $(all_nodes); do echo "$(address "$node") $node"; done; } >"$dir/hosts"
    : >"$dir/resolv.conf"  # a name server that cannot be reached costs seconds a look-up
    : >"$dir/plugstack.conf"
    cat >"$SLURM_CONF" <<CONF
ClusterName=test
SlurmctldHost=$(hostname -s)($network.1)
SlurmctldPort=$port
SlurmdPort=$((port + 1))
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket=$dir/munge.socket
StateSaveLocation=$dir/state
SlurmdSpoolDir=$dir/spool-%n
SlurmctldPidFile=$dir/slurmctld.pid
SlurmdPidFile=$dir/slurmd-%n.pid
SlurmctldLogFile=$dir/log/slurmctld.log
SlurmdLogFile=$dir/log/slurmd-%n.log
PlugStackConfig=$dir/plugstack.conf
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1,sched_interval=2,sched_min_interval=0,batch_sched_delay=0
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmctldParameters=preempt_send_user_signal
JobRequeue=1
MinJobAge=86400
KillWait=5
CompleteWait=0
MessageTimeout=30
SlurmctldTimeout=10
SlurmdTimeout=30
BatchStartTimeout=10
UnkillableStepTimeout=300
InactiveLimit=0
ReturnToService=2
AccountingStorageType=accounting_storage/none
NodeName=node[1-$nodes] NodeAddr=$network.[11-$((10 + nodes))] CPUs=$cpus RealMemory=8000
PartitionName=main Nodes=ALL Default=YES DefaultTime=20 PriorityTier=10 PreemptMode=OFF
PartitionName=spot Nodes=ALL DefaultTime=20 PriorityTier=1 PreemptMode=REQUEUE GraceTime=300
CONF
}

# Runs as process 1 of a node: sets it up, becomes slurmd.
node_init() {
    local node=$1 private=$dir/tmp-$1 folder
    hostname "$node"
    mount --make-rprivate /
    mount --bind "$dir/hosts" /etc/hosts
    mount --bind "$dir/resolv.conf" /etc/resolv.conf
    mount -t tmpfs -o mode=1777 tmpfs /dev/shm
    mkdir -p -m 1777 "$private"
    for folder in ${shared//:/ }; do
        mkdir -p "$private/${folder#/tmp/}"
        mount --rbind "$folder" "$private/${folder#/tmp/}"
    done
    mount --rbind "$private" /tmp
    cd /
    slurmd -D -N "$node" -f "$SLURM_CONF" </dev/null >>"$dir/log/$node.out" 2>&1 &
    while kill -0 $! 2>/dev/null; do wait $! || true; done  # bash reaps what is orphaned
}

start_node() {
    local node=$1 ns=$namespace$1 link=$cable${1#node}
    ip netns del "$ns" 2>/dev/null || true
    ip link del "$link" 2>/dev/null || true
    ip netns add "$ns"
    ip link add "$link" type veth peer name eth0 netns "$ns"
    ip link set "$link" master $bridge up
    ip -n "$ns" addr add "$(address "$node")/24" dev eth0
    ip -n "$ns" link set lo up
    ip -n "$ns" link set eth0 up
    mkdir -p "$dir/spool-$node"
    nsenter --net="/run/netns/$ns" setsid unshare --uts --mount --ipc --pid --fork --kill-child \
        --mount-proc "$self" node-init "$node" </dev/null >>"$dir/log/$node.out" 2>&1 &
    echo $! >"$dir/$node.pid"
}

up() {
    [[ $(id -u) == 0 ]] || fail "needs root"
    install_packages
    local shape  # a directory that was made again is another one to the nodes
    shape="$nodes $cpus $shared $(stat -c %i ${shared//:/ } /)"
    if [[ $(cat "$dir/shape" 2>/dev/null) != "$shape" ]] || ! ready; then
        down
        mkdir -p "$dir"/{state,log}
        chmod 755 "$dir"
        write_configuration
        (umask 077; [[ -s $dir/munge.key ]] || head -c 128 /dev/urandom >"$dir/munge.key")
        munged --force --key-file="$dir/munge.key" --socket="$dir/munge.socket" \
            --pid-file="$dir/munged.pid" --log-file="$dir/log/munged.log" \
            --seed-file="$dir/munge.seed" 2>/dev/null
        ip link add $bridge type bridge
        ip addr add $network.1/24 dev $bridge
        ip link set $bridge up
        slurmctld -c -f "$SLURM_CONF"
        for node in $(all_nodes); do start_node "$node"; done
        retry $patience ready || { tail -n 5 "$dir"/log/*; fail "the nodes did not come up"; }
        echo "$shape" >"$dir/shape"
    fi
    echo "SLURM_CONF=$SLURM_CONF"
}

down() {
    local file
    for file in "$dir"/node*.pid; do end "$file" unshare; done
    for file in $(all_nodes); do retry $patience gone "$file" || echo "cluster: $file has processes left" >&2; done
    end "$dir/slurmctld.pid" slurmctld
    end "$dir/munged.pid" munged
    for file in $(ip netns list 2>/dev/null | grep -o "^${namespace}node[0-9]*"); do ip netns del "$file"; done
    for file in $(ip -o link | grep -o "$cable[0-9]*" | sort -u); do ip link del "$file" || true; done
    ip link del $bridge 2>/dev/null || true
    sleep 0.3
    rm -rf --one-file-system "$dir"/{state,shape,log} "$dir"/spool-* "$dir"/tmp-*
}

# lose A B: what A sends to B gets nowhere, and A is not told
lose() { ip -n "$namespace$1" neigh replace "$(address "$2")" lladdr $nobody dev eth0 nud permanent; }
find_again() { ip -n "$namespace$1" neigh del "$(address "$2")" dev eth0; }

case ${1:-} in
    up) up ;;
    down) down ;;
    crash)
        end "$dir/$2.pid" unshare
        ip link del "$cable${2#node}"
        retry $patience gone "$2" || fail "$2 has processes left"
        ;;
    revive)
        now=$(date +%s)
        start_node "$2"
        retry $patience came_up "$2" "$now" || fail "$2 did not come up"
        ;;
    cut) lose "$2" "$3"; lose "$3" "$2" ;;
    mend) find_again "$2" "$3"; find_again "$3" "$2" ;;
    node-init) node_init "$2" ;;
    *) sed -n '2,/^set/{/^set/!s/^# \{0,1\}//p}' "$self"; exit 2 ;;
esac
