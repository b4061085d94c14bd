#!/usr/bin/env bash
# The small runs of lab/README.md: every head with its own best of two to four trials, then two seeds of the best; what
# came after the mixture of softmaxes, and the bottleneck of each; all heads for equal time; translation over words,
# byte pairs and codes; captions of drawn images; words spelled letter by letter. Two runs at a time, each with one
# thread. Appends a JSON line for each run to benches/results/runs.jsonl; `cargo run --release -p lab --bin figures`
# makes the tables and the picture of them.
#
#   lab/run_all.sh [--ptb DIR] [--multi30k DIR] [--switchboard FILE.jsonl] [--results FILE] [--minutes N] [NAME..]
#
#   --ptb DIR           Penn Treebank: train.txt and valid.txt
#   --multi30k DIR      train.de, train.en, valid.de and valid.en
#   --switchboard FILE  a dialogue per line, as `translation --dialogue` reads it
#   --results FILE      appends the lines to this file, which says what is done, in place of benches/results/runs.jsonl
#   --minutes N         stops after N minutes; the same command continues where it stopped
#   --jobs N            runs at a time (2)
#   --device cuda       trains on a GPU, which needs nvcc; the lines have the GPU's name
#   --force             runs code that is not committed
#   --list              prints the runs, those that are done with their results
#   --seconds           only measures the seconds of a step, of the presets on all cores and of the runs of equal time on
#                       one, which need them; ten minutes in which the machine should have nothing else to do. With
#                       names, only of these runs
#   NAME..              only these runs, and what they need
#
# A run whose data are not given is left out, and one whose line is in the results is not repeated. What a run writes until
# then is in RUNS (target/runs). Needs python3.
set -euo pipefail
usage() { sed -n '2,/^set -euo/{/^set/d;s/^# \{0,1\}//;p}' "$0"; }
arguments=() build=1 features=()
while (($#)); do
    case $1 in
    -h | --help) usage; exit ;;
    --ptb | --multi30k | --switchboard) arguments+=("$1" "$(realpath "${2:?its path}")"); shift ;;
    --results) LAB_RESULTS=$(realpath -m "${2:?its path}"); export LAB_RESULTS; shift ;;
    --device) [[ ${2:?cpu or cuda} != cuda ]] || features=(--features cuda); arguments+=("$1" "$2"); shift ;;
    --list) build=0 arguments+=("$1") ;;
    *) arguments+=("$1") ;;
    esac
    shift
done
[[ -z ${RUNS:-} ]] || export RUNS=$(realpath -m "$RUNS")
cd "$(dirname "$0")/.."
((!build)) || cargo build --locked --release -p lab "${features[@]}" --bin language_model --bin translation --bin captions --bin bottleneck
exec python3 lab/run_all.py "${arguments[@]}"
