#!/usr/bin/env bash
# Measure the main figures of docs/performance.md and docs/tuning.md, one after the other: about half
# an hour on 2 cores. Keep the machine quiet. The pages name the commands of the others.
#
#   mpi_scripts/bench.sh [FOLDER]     writes results.md: each command, what it printed and how long
#                                     it took; with JSON files and pictures beside it
#
# Emulated networks take root and iproute2; without them their part is left out, and said to be.
set -euo pipefail

here=$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")
mkdir -p "${1:-report/bench}"
folder=$(readlink -f "${1:-report/bench}")
export PYTHONPATH=$here/..${PYTHONPATH:+:$PYTHONPATH}
python=${PYTHON:-python3}
gtopk=("$python" -m gtopk.cli)
cores=$(env -u OMP_NUM_THREADS -u OMP_THREAD_LIMIT nproc) # nproc obeys these

# measure TITLE COMMAND...: run it, and add it to the results, a failure too.
measure() {
    local title=$1 begun=$SECONDS code=0
    shift
    echo "bench: $title" >&2
    "$@" >"$folder/.printed" 2>"$folder/.said" || code=$?
    {
        printf '\n## %s\n\n`%s`, %s s, load %s' "$title" "${*/#$here/mpi_scripts}" \
            $((SECONDS - begun)) "$(cut -d' ' -f1 /proc/loadavg)"
        [ $code = 0 ] || printf ', **ended with exit code %s**' $code
        printf '\n\n```\n'
        cat "$folder/.printed"
        [ $code = 0 ] || tail -20 "$folder/.said"
        printf '```\n'
    } >>"$folder/results.md"
}

{
    echo "# Measured on $(date -u +%Y-%m-%dT%H:%MZ)"
    printf '\n```\n'
    "${gtopk[@]}" doctor
    printf '```\n'
} >"$folder/results.md"

measure "Selection" "${gtopk[@]}" bench selection --json "$folder/selection.json"
measure "Messages" "${gtopk[@]}" bench wire --json "$folder/wire.json"
measure "The engine on 2 ranks" "${gtopk[@]}" run -n 2 -m gtopk.cli bench engine \
    --json "$folder/engine.json"
measure "The optimizer on 1 rank" "${gtopk[@]}" bench optimizer --model resnet20 \
    --json "$folder/optimizer.json"
measure "Recipes on 16 ranks" "$python" "$here/convergence.py" --ranks 16 --seeds 3 --jobs "$cores" \
    --recipes dense "PowerSGD, rank 2" topk published gtopk "gtopk, momentum after" "gtopk, int8" \
    --json "$folder/convergence.json"
measure "Trees of many hosts, simulated" "$python" "$here/simulated_scaling.py" --ranks 8 32 128 \
    --methods dense topk-allgather gtopk-tree gtopk --plot "$folder/simulated.svg"
if "$here/emulated_network.sh" 1 1gbit mpirun true 2>/dev/null; then
    measure "Collectives between emulated hosts" "$here/bench_network.sh" "$folder/network"
    measure "Forecasts" "$here/bench_predictions.sh" "$folder/predictions"
    measure "Forecasts by SimGrid" "$python" "$here/predictions.py" --simulate \
        "$folder/predictions"/*.json
    measure "Training on emulated hosts" "$python" "$here/bench_scaling.py" "$folder/scaling" \
        --rate 100mbit --scale 10
else
    echo "Networks cannot be emulated here (root, iproute2): left out." >>"$folder/results.md"
fi
rm -f "$folder/.printed" "$folder/.said"
echo "$folder/results.md"
