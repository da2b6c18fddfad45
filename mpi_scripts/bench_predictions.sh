#!/usr/bin/env bash
# How well is a reduction's time predicted? 30 emulated networks of 2 to 8 hosts; takes 15 minutes.
#
#   sudo mpi_scripts/bench_predictions.sh [FOLDER]          writes RATE-HOSTS.json; prints the tables
#   mpi_scripts/predictions.py --simulate FOLDER/*.json     what SimGrid would have predicted
#
# The program is not given the links' speed: it measures their latency and bandwidth, as at the start of
# a training, and compares the prediction with the clock. It does so with 25,000 entries a rank, as for
# ResNet-50 at density 0.001, and with 5,000, where calls and encoding on cores that all hosts share take
# as long as the wire.
set -euo pipefail

here=$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")
mkdir -p "${1:-report/predictions}"
folder=$(readlink -f "${1:-report/predictions}")
export PYTHONPATH=$here/..${PYTHONPATH:+:$PYTHONPATH}

cores=$(env -u OMP_NUM_THREADS -u OMP_THREAD_LIMIT nproc) # nproc obeys these
files=()
for rate in 5mbit 10mbit 20mbit 40mbit 80mbit 160mbit; do
    # As many hosts as take part: the others would look for messages, and take the cores' time.
    for hosts in 2 3 4 6 8; do
        name=$folder/$rate-$hosts
        "$here/emulated_network.sh" "$hosts" "$rate" mpirun "${PYTHON:-python3}" -m gtopk \
            bench collectives --lengths 500000 --densities 0.01 0.05 --formats exact packed+int8 \
            --algorithms dense topk-allgather gtopk oktopk --baselines --rounds 3 \
            --shared-cores "$cores" --json "$name.json" >"$name.md"
        files+=("$name.json")
    done
done
"${PYTHON:-python3}" "$here/predictions.py" "${files[@]}"
