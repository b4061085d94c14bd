#!/usr/bin/env bash
# Measures the time and memory that README.md and benches/RESULTS.md show: this crate and PyTorch in turn, at one commit
# on one machine. Appends JSON lines to benches/results; `cargo run --release -p lab --bin figures` makes the tables and
# pictures of them. An hour on two cores, which should have nothing else to do.
#
#   scripts/measure.sh [FLAG..] [LEG..]     measures these legs, or all
#   scripts/measure.sh --check              lists the tables that are older than the code that they measure; fails if
#                                           README.md shows one
#
# Legs: steps, without-gradients, dtypes, instruction-sets, positions, memory, outputs, decoding, language-model,
# fine-tune, confident, assignment, budget.
#
#   --data DIR    Penn Treebank (train.txt, valid.txt) for language-model, which is left out without it (MOS_HEAD_DATA)
#   --quick       small sizes and one repetition, to try the script: writes to target/measure/quick instead
#   --ours        leaves PyTorch out
#   --force       measures code that is not committed, under the commit that it is based on
#
# MOS_HEAD_PYTHON     a Python with the packages of benches/peers/requirements.txt; without it, one is made in
#                     target/measure/venv
# MOS_HEAD_PROCESSOR  the processor's name in the tables, in place of the one of /proc/cpuinfo
set -euo pipefail
# Paths are those of the folder in which the command is called.
[[ -z ${MOS_HEAD_DATA:-} ]] || MOS_HEAD_DATA=$(realpath "$MOS_HEAD_DATA")
# A link, as that of a virtual environment, stays one.
[[ ${MOS_HEAD_PYTHON:-} != */* ]] || MOS_HEAD_PYTHON=$(realpath -s "$MOS_HEAD_PYTHON")
arguments=()
while (($#)); do
    case $1 in
    --data) arguments+=("--data=$(realpath "${2:?the folder of Penn Treebank}")"); shift ;;
    --data=*) arguments+=("--data=$(realpath "${1#*=}")") ;;
    *) arguments+=("$1") ;;
    esac
    shift
done
cd "$(dirname "$0")/.."

usage() { sed -n '2,/^set -euo/{/^set/d;s/^# \{0,1\}//;p}' "$0"; }

peers=1
for argument in "${arguments[@]}"; do
    case $argument in
    -h | --help) usage; exit ;;
    --check) exec python3 scripts/measure/legs.py --check ;;
    --ours) peers=0 ;;
    esac
done
python3 scripts/measure/legs.py --dry-run "${arguments[@]}"

python=${MOS_HEAD_PYTHON:-target/measure/venv/bin/python}
if ((peers)); then
    if [[ -z ${MOS_HEAD_PYTHON:-} && ! -x $python ]]; then
        python3 -m venv target/measure/venv
        "$python" -m pip install --quiet --requirement benches/peers/requirements.txt
    fi
    "$python" -c 'import torch, numpy' || { echo "$python: lacks benches/peers/requirements.txt"; exit 1; }
fi
exec python3 scripts/measure/legs.py --python "$python" "${arguments[@]}"
