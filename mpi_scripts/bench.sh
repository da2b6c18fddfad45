#!/usr/bin/env bash
# Measure the tables and pictures of docs/measured, but only the main one of convergence.md: about
# 40 minutes on 2 cores. Keep the machine quiet. The pages give the commands of the other tables.
#
#   mpi_scripts/bench.sh [FOLDER]     writes results.md (each command, its output and its duration),
#                                     and JSON files and pictures beside it
#
# Emulated networks need root and iproute2; without them their part is left out, and results.md says so.
set -euo pipefail

here=$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")
mkdir -p "${1:-report/bench}"
folder=$(readlink -f "${1:-report/bench}")
export PYTHONPATH=$here/..${PYTHONPATH:+:$PYTHONPATH}
python=${PYTHON:-python3}
gtopk=("$python" -m gtopk)
cores=$(env -u OMP_NUM_THREADS -u OMP_THREAD_LIMIT nproc) # nproc obeys these

# measure TITLE COMMAND...: run the command and add it to the results, even if it fails.
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

measure "Selection" "$python" "$here/bench_selection.py" --data training gaussian laplace \
    --json "$folder/selection.json"
measure "Selection misled" "$python" "$here/bench_selection.py" --data adverse \
    --methods gtopk-compiled gtopk-reference --json "$folder/misled.json"
measure "Messages" "$python" "$here/bench_wire.py" --json "$folder/wire.json"
for ranks in 2 3; do
    measure "The engine on $ranks ranks" "${gtopk[@]}" run -n "$ranks" \
        "$here/bench_engine.py" --json "$folder/engine-$ranks.json"
done
measure "The optimizer on 1 rank" "${gtopk[@]}" bench optimizer --model resnet20 \
    --json "$folder/optimizer.json"
for model in one-50m resnet50-shapes 160x1000 1000x10; do
    measure "A step of $model on 1 rank" "${gtopk[@]}" bench optimizer --model "$model" --rounds 9 \
        --json "$folder/step-1-$model.json"
    measure "A step of $model on 2 ranks" "${gtopk[@]}" run -n 2 -m gtopk bench optimizer \
        --model "$model" --rounds 9 --ways none fp16 gtopk auto ddp ddp-gtopk ddp-powersgd \
        --json "$folder/step-2-$model.json"
done
measure "Recipes on 16 ranks" "$python" "$here/convergence.py" --ranks 16 --seeds 3 --jobs "$cores" \
    --recipes dense "PowerSGD, rank 2" topk published gtopk "gtopk, unmasked" \
    "gtopk, unmasked, int8, growth 4" \
    --json "$folder/convergence.json"
measure "Trees of many hosts, simulated" "$python" "$here/simulated_scaling.py" --ranks 8 32 128 \
    --methods dense topk-allgather gtopk-tree gtopk --plot "$folder/simulated.svg"
if "$here/emulated_network.sh" 1 1gbit mpirun true 2>/dev/null; then
    emulated=(--shared-cores "$cores" --interface eth0 --bandwidth 100e6)
    scaling=("$python" "$here/bench_scaling.py")
    measure "Collectives between emulated hosts" "$here/bench_network.sh" "$folder/network"
    measure "Dense between emulated hosts" "$here/emulated_network.sh" 8 100mbit mpirun \
        "${gtopk[@]}" bench collectives --ranks 4 8 --lengths 4000 16384 65536 262144 524288 1500000 \
        --algorithms dense --baselines dense-library --rounds 5 "${emulated[@]}"
    measure "The optimizer on 4 emulated hosts" "$here/emulated_network.sh" 4 100mbit mpirun \
        "${gtopk[@]}" bench optimizer --model resnet18 --rounds 2
    measure "Forecasts" "$here/bench_predictions.sh" "$folder/predictions"
    measure "Forecasts by SimGrid" "$python" "$here/predictions.py" --simulate \
        "$folder/predictions"/*.json
    measure "Training on emulated hosts" "${scaling[@]}" "$folder/scaling" --scale 10 \
        --models resnet20 vgg16 lstm-ptb -- --rounds 3 --budget-seconds 5
    measure "Training on 16 emulated hosts" "${scaling[@]}" "$folder/scaling16" --scale 10 \
        --models alexnet --ranks 16 -- --rounds 2 --budget-seconds 5
    measure "Training on emulated hosts that compute" "${scaling[@]}" "$folder/computing" \
        --models resnet20 -- --compute real --batch 8 --rounds 3
else
    echo "Networks cannot be emulated here (root, iproute2): left out." >>"$folder/results.md"
fi
rm -f "$folder/.printed" "$folder/.said"
echo "$folder/results.md"
