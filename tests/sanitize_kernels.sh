#!/usr/bin/env bash
# Run the CUDA kernels' tests on a GPU under each of compute-sanitizer's tools: memory, races in
# shared memory, reads of what was never written, barriers.
set -euo pipefail
cd "$(dirname "$0")/.."

python=${1:-python3}
for tool in memcheck racecheck initcheck synccheck; do
    echo "== $tool"
    # A sanitized kernel is up to a hundred times slower, and CuPy's pool would hide overruns.
    compute-sanitizer --tool "$tool" --error-exitcode 1 --target-processes all \
        env GTOPK_TEST_WITHOUT_POOL=1 "$python" -m pytest -m gpu -x --timeout 1800 \
        tests/collectives/kernels/device
done
