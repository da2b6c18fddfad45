#!/usr/bin/env bash
# Train with Horovod's launcher, if Horovod is installed:
#
#     mpi_scripts/jobs/horovodrun.sh node1:4,node2:4 8 --preset vgg16-cifar10 --data DIR
#
# Over gloo. With Open MPI 5, --mpi also needs --binding-args="--bind-to none --map-by slot".
set -euo pipefail

if (($# < 2)); then
    echo "usage: $0 HOSTS RANKS [arguments of train.py]" >&2
    exit 2
fi
hosts=$1 ranks=$2
shift 2
root=$(cd "$(dirname "$0")/../.." && pwd)
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

exec horovodrun --gloo -np "$ranks" -H "$hosts" python "$root/mpi_scripts/train.py" "$@"
