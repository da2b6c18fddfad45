#!/usr/bin/env bash
# Run a program on hosts that this machine emulates, joined by a switch of known speed.
#
#   emulated_network.sh [OPTIONS] HOSTS RATE mpirun PROGRAM...     a rank per host, Open MPI over TCP
#   emulated_network.sh [OPTIONS] HOSTS RATE torchrun PROGRAM...   a rank per host, with the variables
#                                                                  that torchrun sets; gloo over TCP
#
#   --delay 100ms   how long a frame takes from host to host, one way (us, ms, s)
#   --loss 0.01     the share of frames to lose, at random
#   --sites 2       divide the hosts, in order, into this many sites; the two options above then only
#                   apply between hosts of different sites
#   --seed 1        random seed of the losses
#
# RATE in tc's syntax: 100mbit, 1gbit. The exit code is the program's, or 77 if hosts cannot be
# emulated. Examples:
#
#   sudo mpi_scripts/emulated_network.sh 4 100mbit mpirun gtopk bench collectives --bandwidth 100e6
#   sudo mpi_scripts/emulated_network.sh --delay 15ms --sites 2 4 100mbit torchrun python train.py
#
#   host0   eth0 --RATE--> |        |     A host is a network namespace with one interface, eth0,
#                <--RATE-- | switch |     10.0.0.1, 10.0.0.2, ... Each direction is shaped separately
#   host1   eth0 --RATE--> |        |     (tc tbf): full duplex. The queues are so long that they drop
#                <--RATE-- |        |     nothing; only --loss does.
#   ...
#
# The switch is a bridge or, with options, relay.py beside this script. No other delay is added: the
# rest of the latency is the machine's own time to forward a packet, and depends on its load. The relay
# takes 10 to 20 us of a core for a frame of 1500 bytes: above about 500 Mbit/s of all hosts together,
# it limits the speed instead of RATE. TCP is Reno, which takes every loss for a full queue: with 1 %
# loss, a connection with a round trip of 40 ms reaches 3.5 Mbit/s.
#
# The hosts share this machine's cores and memory; they reach each other and nothing else. Nothing is
# left behind however this script ends, even by kill -9: everything lives in namespaces that the kernel
# removes with their last process.
set -euo pipefail

self=$(readlink -f "${BASH_SOURCE[0]}")

say() { echo "emulated_network: $*" >&2; }
usage() { sed -n '2,/^# RATE/s/^# \{0,1\}//p' "$self" >&2; exit 2; }
cannot() { say "cannot emulate hosts here: $*"; exit 77; }

address() { echo "10.0.0.$(($1 + 1))"; }

# Run a command on a host, with its network and its host name, by which MPI tells hosts apart.
on() {
    exec ip netns exec "host$1" unshare --uts sh -c 'hostname "$0"; exec "$@"' "host$1" "${@:2}"
}

# mpirun calls this instead of ssh to reach another host: [options] ADDRESS COMMAND...
agent() {
    while [[ $1 == -* ]]; do shift; done
    on "$((${1##*.} - 1))" sh -c "${*:2}"
}

connect() {
    local speed burst host
    speed=$(bytes_per_second "$rate")
    # A token bucket lets `burst` bytes pass at once after a pause: 0.5 ms of the rate.
    burst=$((speed < 16000000 ? 8000 : speed > 128000000 ? 64000 : speed / 2000))
    if [ -n "$far" ]; then start_relay; else ip link add switch up type bridge; fi
    for ((host = 0; host < hosts; host++)); do
        ip netns add "host$host"
        if [ -n "$far" ]; then
            ip link set "port$host" netns "host$host" name eth0 txqueuelen 100000
        else
            ip link add "port$host" type veth peer name eth0 netns "host$host"
            ip link set "port$host" master switch up
            tc qdisc add dev "port$host" root tbf rate "$rate" burst "$burst" limit 256mb
        fi
        # Packets larger than the bucket would be cut up one by one.
        ip -n "host$host" link set eth0 gso_max_size "$((burst * 9 / 10))"
        ip -n "host$host" link set lo up
        ip -n "host$host" address add "$(address "$host")/24" dev eth0
        ip -n "host$host" link set eth0 up
        # Without loss, TCP must not mistake the long queues for loss. So its retransmission timer
        # starts at 10 s, not 0.2 s, and it probes no message's tail early: otherwise one connection
        # in twenty sends at a third of the rate for seconds.
        [[ $far == *--loss* ]] || {
            ip -n "host$host" route replace 10.0.0.0/24 dev eth0 rto_min 10s
            ip netns exec "host$host" sh -c 'echo 0 >/proc/sys/net/ipv4/tcp_early_retrans'
        }
        # Acknowledgements queue with data here, so a connection with a smaller window than the
        # opposite one gets only that share of the rate. All start with a window for long messages.
        ip netns exec "host$host" sh -c '
            cd /proc/sys/net/ipv4
            echo reno >tcp_congestion_control
            echo "4096 4194304 6291456" >tcp_rmem
            echo 0 >tcp_slow_start_after_idle
            echo 1 >tcp_no_metrics_save'
        tc -n "host$host" qdisc add dev eth0 root tbf rate "$rate" burst "$burst" limit 256mb
    done
}

# Start the relay, instead of the bridge and its queues; $far holds its options.
start_relay() {
    local output word
    # shellcheck disable=SC2086
    exec {output}< <(exec python3 "${self%/*}/relay.py" "$hosts" "$speed" $far)
    read -r -u "$output" word && [ "$word" = ready ] || cannot "the relay does not start"
    exec {output}<&-
}

bytes_per_second() {
    awk -v rate="$1" 'BEGIN {
        unit = rate ~ /gbit$/ ? 1e9 : rate ~ /mbit$/ ? 1e6 : rate ~ /kbit$/ ? 1e3 : 1
        printf "%d", rate * unit / 8 }'
}

in_seconds() {
    awk -v delay="$1" 'BEGIN { print delay * (delay ~ /us$/ ? 1e-6 : delay ~ /ms$/ ? 1e-3 : 1) }'
}

with_mpirun() {
    local list
    list=$(for ((host = 0; host < hosts; host++)); do echo "$(address "$host"):1"; done | paste -sd,)
    export PRTE_MCA_plm_ssh_agent="$self agent" OMPI_MCA_plm_rsh_agent="$self agent"
    export PRTE_MCA_prte_if_include=eth0 OMPI_MCA_oob_tcp_if_include=eth0
    # TCP between hosts, though they share memory; a waiting rank leaves the cores to the others.
    export OMPI_MCA_pml=ob1 OMPI_MCA_btl=tcp,self OMPI_MCA_btl_tcp_if_include=eth0
    export OMPI_MCA_mpi_yield_when_idle=1 OMPI_MCA_threads_pthreads_yield_strategy=nanosleep
    export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
    export GLOO_SOCKET_IFNAME=eth0  # for a process group of the program's own
    # mpirun names its folders by process ids, which are small and repeat in every emulation: folders
    # of a killed one would be in the way.
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
        far=$2 hosts=$3 rate=$4 launcher=$5
        mount -t tmpfs none /run/netns # `ip netns` keeps its names here: nobody else sees ours
        ip link set lo up
        connect
        "with_$launcher" "${@:6}"
        ;;
    *)
        far='' tools='ip tc unshare setpriv'
        option='^--(delay [0-9.]+(us|ms|s)|loss 0?\.[0-9]+|(sites|seed) [0-9]+)$'
        while [[ ${1:-} == --* ]]; do
            [[ "$1 ${2:-}" =~ $option ]] || usage
            if [ "$1" = --delay ]; then far+=" $1 $(in_seconds "$2")"; else far+=" $1 $2"; fi
            shift 2
        done
        [ $# -ge 4 ] && [[ $1 =~ ^[1-9][0-9]*$ && $1 -le 250 && $3 =~ ^(mpirun|torchrun)$ ]] || usage
        [ "$(id -u)" = 0 ] || cannot "root is required"
        [ -z "$far" ] || tools+=' python3'
        for tool in $tools; do
            [ -n "$(command -v "$tool")" ] ||
                cannot "$tool is required (packages iproute2, util-linux, python3)"
        done
        [ -z "$far" ] || [ -c /dev/net/tun ] || cannot "no TAP devices (/dev/net/tun)"
        mkdir -p /run/netns
        namespaces=(--net --mount --uts --pid --fork --kill-child --mount-proc)
        unshare "${namespaces[@]}" true || cannot "no namespaces"
        # unshare ignores signals, but ends all processes with it when it is killed.
        setpriv --pdeathsig KILL unshare "${namespaces[@]}" "$self" inside "$far" "$@" &
        trap 'kill -KILL $!; exit 130' INT TERM HUP
        wait $!
        ;;
esac
