#!/usr/bin/env bash
# Run a program on hosts that this machine emulates, joined by a switch of known speed.
#
#   emulated_network.sh HOSTS RATE mpirun PROGRAM...     a rank per host, Open MPI over TCP
#   emulated_network.sh HOSTS RATE torchrun PROGRAM...   a rank per host, with the variables that
#                                                        torchrun sets; gloo over TCP
#
# RATE as tc knows it: 100mbit, 1gbit. Ends with the program's exit code; with 77 where hosts cannot
# be emulated. Example:
#
#   sudo mpi_scripts/emulated_network.sh 4 100mbit mpirun gtopk bench collectives --bandwidth 100e6
#
#   host0   eth0 --RATE--> |        |     A host is a network namespace with one interface, eth0,
#                <--RATE-- | switch |     10.0.0.1, 10.0.0.2, ... Each direction is shaped by itself
#   host1   eth0 --RATE--> | (a     |     (tc tbf): full duplex. The queues are so long that nothing
#                <--RATE-- | bridge)|     is dropped. No delay is added: the latency is what the
#   ...                                   machine takes to pass a packet on, and it says more of the
#                                         machine's load than of any network.
#
# The hosts share this machine's cores and memory; they reach each other and nothing else. Nothing is
# left behind, whatever ends this script, kill -9 included: everything lives in namespaces that the
# kernel removes with their last process.
set -euo pipefail

self=$(readlink -f "${BASH_SOURCE[0]}")

say() { echo "emulated_network: $*" >&2; }
usage() { sed -n '2,/^# RATE/s/^# \{0,1\}//p' "$self" >&2; exit 2; }
cannot() { say "cannot emulate hosts here: $*"; exit 77; }

address() { echo "10.0.0.$(($1 + 1))"; }

# Become a command on a host: its network, its host name. MPI tells hosts apart by their names.
on() {
    exec ip netns exec "host$1" unshare --uts sh -c 'hostname "$0"; exec "$@"' "host$1" "${@:2}"
}

# How mpirun reaches another host, as it would by ssh: [options] ADDRESS COMMAND...
agent() {
    while [[ $1 == -* ]]; do shift; done
    on "$((${1##*.} - 1))" sh -c "${*:2}"
}

connect() {
    local burst host
    # A token bucket lets `burst` bytes pass at once after a pause.
    burst=$(bucket_bytes "$rate")
    ip link add switch type bridge
    ip link set switch up
    for ((host = 0; host < hosts; host++)); do
        ip netns add "host$host"
        ip link add "port$host" type veth peer name eth0 netns "host$host"
        ip link set "port$host" master switch up
        # Larger packets than the bucket would be cut up one by one.
        ip -n "host$host" link set eth0 gso_max_size "$((burst * 9 / 10))"
        ip -n "host$host" link set lo up
        ip -n "host$host" address add "$(address "$host")/24" dev eth0
        ip -n "host$host" link set eth0 up
        # The long queues must not look like loss to TCP, whose timer starts at 0.2 s.
        ip -n "host$host" route replace 10.0.0.0/24 dev eth0 rto_min 10s
        ip netns exec "host$host" sh -c '
            cd /proc/sys/net/ipv4
            echo reno >tcp_congestion_control
            echo 0 >tcp_slow_start_after_idle
            echo 1 >tcp_no_metrics_save'
        tc -n "host$host" qdisc add dev eth0 root tbf rate "$rate" burst "$burst" limit 256mb
        tc qdisc add dev "port$host" root tbf rate "$rate" burst "$burst" limit 256mb
    done
}

# Half a millisecond of a rate, in bytes: 8 kB to 64 kB.
bucket_bytes() {
    awk -v rate="$1" 'BEGIN {
        unit = rate ~ /gbit$/ ? 1e9 : rate ~ /mbit$/ ? 1e6 : rate ~ /kbit$/ ? 1e3 : 1
        bytes = rate * unit / 8 * 0.0005
        printf "%d", (bytes < 8000 ? 8000 : bytes > 64000 ? 64000 : bytes) }'
}

with_mpirun() {
    local list
    list=$(for ((host = 0; host < hosts; host++)); do echo "$(address "$host"):1"; done | paste -sd,)
    export PRTE_MCA_plm_ssh_agent="$self agent" OMPI_MCA_plm_rsh_agent="$self agent"
    export PRTE_MCA_prte_if_include=eth0 OMPI_MCA_oob_tcp_if_include=eth0
    # TCP between hosts, though they share a memory; who waits leaves the cores to the others.
    export OMPI_MCA_pml=ob1 OMPI_MCA_btl=tcp,self OMPI_MCA_btl_tcp_if_include=eth0
    export OMPI_MCA_mpi_yield_when_idle=1 OMPI_MCA_threads_pthreads_yield_strategy=nanosleep
    export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
    # Its folders are named by processes, whose small numbers come again in every emulation: those
    # of one that was killed would be in the way.
    mkdir /run/netns/.of-mpirun
    export PRTE_MCA_prte_tmpdir_base=/run/netns/.of-mpirun
    (on 0 mpirun --host "$list" --map-by ppr:1:node --bind-to none "$@")
}

with_torchrun() {
    local host code=0
    local -a running=()
    for ((host = 0; host < hosts; host++)); do
        (
            export RANK=$host LOCAL_RANK=0 WORLD_SIZE=$hosts LOCAL_WORLD_SIZE=1
            export MASTER_ADDR=10.0.0.1 MASTER_PORT=29500 GLOO_SOCKET_IFNAME=eth0
            on "$host" "$@"
        ) &
        running+=($!)
    done
    for host in "${running[@]}"; do wait "$host" || code=$?; done
    return "$code"
}

case ${1:-} in
    agent) agent "${@:2}" ;;
    inside)
        hosts=$2 rate=$3 launcher=$4
        mount -t tmpfs none /run/netns # `ip netns` keeps its names here: ours are seen by us alone
        ip link set lo up
        connect
        "with_$launcher" "${@:5}"
        ;;
    *)
        [ $# -ge 4 ] && [[ $1 =~ ^[1-9][0-9]*$ && $1 -le 250 && $3 =~ ^(mpirun|torchrun)$ ]] || usage
        [ "$(id -u)" = 0 ] || cannot "it takes root"
        for tool in ip tc unshare setpriv; do
            [ -n "$(command -v $tool)" ] || cannot "it takes $tool (packages iproute2 and util-linux)"
        done
        mkdir -p /run/netns
        namespaces=(--net --mount --uts --pid --fork --kill-child --mount-proc)
        unshare "${namespaces[@]}" true || cannot "no namespaces"
        # unshare itself takes no notice of signals, and takes all with it when it is killed.
        setpriv --pdeathsig KILL unshare "${namespaces[@]}" "$self" inside "$@" &
        trap 'kill -KILL $!; exit 130' INT TERM HUP
        wait $!
        ;;
esac
