#!/usr/bin/env bash
# Train with torchrun; run the same line on every host:
#
#     mpi_scripts/jobs/torchrun.sh FIRST_HOST HOSTS RANKS_PER_HOST --preset lstm-ptb --data DIR
#
# FIRST_HOST is the name of the host where they meet, on port ${PORT:-29500}. With --checkpoint FOLDER
# on a disk that all hosts share, a restarted job resumes from its last checkpoint.
set -euo pipefail

if (($# < 3)); then
    echo "usage: $0 FIRST_HOST HOSTS RANKS_PER_HOST [arguments of train.py]" >&2
    exit 2
fi
first_host=$1 hosts=$2 ranks_per_host=$3
shift 3
root=$(cd "$(dirname "$0")/../.." && pwd)
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

exec torchrun --nnodes="$hosts" --nproc-per-node="$ranks_per_host" --max-restarts="${RESTARTS:-0}" \
    --rdzv-id="${JOB:-gtopk}" --rdzv-backend=c10d --rdzv-endpoint="$first_host:${PORT:-29500}" \
    -- "$root/mpi_scripts/train.py" "$@"
