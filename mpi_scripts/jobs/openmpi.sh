#!/usr/bin/env bash
# Train on the hosts of a file, with Open MPI:
#
#     mpi_scripts/jobs/openmpi.sh HOSTFILE RANKS --preset resnet20-cifar10 --data DIR --density 0.001
#
# HOSTFILE has a line such as "node1 slots=4" for each host, with a slot per GPU. This checkout, DIR and
# the active environment must have the same paths on all hosts.
set -euo pipefail

if (($# < 2)); then
    echo "usage: $0 HOSTFILE RANKS [arguments of train.py]" >&2
    exit 2
fi
hostfile=$1 ranks=$2
shift 2
root=$(cd "$(dirname "$0")/../.." && pwd)
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

forwarded=()
for name in PATH LD_LIBRARY_PATH PYTHONPATH OMP_NUM_THREADS "${!GTOPK_@}"; do
    if [[ -v $name ]]; then
        forwarded+=(-x "$name")
    fi
done

exec mpirun -np "$ranks" --hostfile "$hostfile" --bind-to none "${forwarded[@]}" \
    python "$root/mpi_scripts/train.py" "$@"
