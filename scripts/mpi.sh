#!/usr/bin/env bash
# Runs tests/mpi.rs with 1 to 4 processes. Needs an MPI and libclang, on Debian `apt-get install openmpi-bin libopenmpi-dev
# libclang-dev`.
set -euo pipefail
cd "$(dirname "$0")/.."
build=(cargo test --locked --features mpi --test mpi --no-run --message-format json)
test=$("${build[@]}" | grep -o '"executable":"[^"]*"' | tail -n 1 | cut -d '"' -f 4)
# Of Open MPI: more processes than cores, and as root.
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMPI_MCA_rmaps_base_oversubscribe=1
for processes in 1 2 3 4; do
    RAYON_NUM_THREADS=1 timeout 300 mpirun -n "$processes" "$test"
done
