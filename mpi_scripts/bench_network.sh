#!/usr/bin/env bash
# Measure the collectives on 8 emulated hosts of 100 Mbit/s, over MPI and over gloo: 5 minutes.
#
#   sudo mpi_scripts/bench_network.sh [FOLDER]     writes mpirun.json, torchrun.json and
#                                                  results.txt, the tables of both
#
# The size is ResNet-50's. Keep the machine quiet: the hosts share its cores, and 8 ranks need all of
# 2 cores.
set -euo pipefail

here=$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")
mkdir -p "${1:-report}"
folder=$(readlink -f "${1:-report}")
bench=("${PYTHON:-python3}" "$here/bench_collectives.py")
export PYTHONPATH=$here/..${PYTHONPATH:+:$PYTHONPATH}

cores=$(env -u OMP_NUM_THREADS -u OMP_THREAD_LIMIT nproc) # nproc obeys these
for launcher in mpirun torchrun; do
    "$here/emulated_network.sh" 8 100mbit "$launcher" "${bench[@]}" \
        --ranks 2 4 8 --lengths 25557032 --formats bf16 exact raw+exact --rounds 3 --budget-seconds 12 \
        --bandwidth 100e6 --shared-cores "$cores" --interface eth0 \
        --json "$folder/$launcher.json"
done | tee "$folder/results.txt"
