#!/usr/bin/env bash
# The comparisons of Kong et al. (2019), "Fast and Simple Mixture of Softmaxes with BPE and Hybrid-LightRNN for Language
# Generation", on a folder of parallel texts as the lab's program `translation` reads it: time, memory and BLEU of 1, 3 and 9 softmaxes
# over words, byte pairs and codes; then the tables of codes and their sizes, with 9 softmaxes.
#
#   scripts/fast_mos.sh DIR [EPOCHS] [FLAG..]
#
# Every run is a process of its own, so that its peak of memory is its own. One softmax is --head softmax, the paper's
# baseline: a mixture of one has a linear layer more. Contexts are as wide as the LSTM at any number of softmaxes, and
# byte pairs are as many as codes, as in the paper. Other flags of the program (--seed 2, --device cuda) are for all runs.
#
# OUT (fast_mos.jsonl) gets a line for each run, and learned tables lie beside it; CODES (1200) is the size of the dictionaries, FEWER_CODES (600) that of
# a smaller one, HIDDEN (256) the number of LSTM units; FEATURES are features of the crate.
set -euo pipefail
if [[ ${1:-} == -h || ${1:-} == --help ]]; then
    sed -n '2,/^set -euo/{/^set/d;s/^# \{0,1\}//;p}' "$0"
    exit
fi
folder=$(realpath "${1:?the folder of the texts: scripts/fast_mos.sh DIR [EPOCHS] [FLAG..]}")
out=$(realpath -m "${OUT:-fast_mos.jsonl}")
cd "$(dirname "$0")/.."
epochs=${2:-4}
[[ $epochs =~ ^[0-9]+$ ]] || { echo "EPOCHS is $epochs, expected a number" >&2; exit 2; }
failed=0
shift $(($# < 2 ? $# : 2))
flags=("$@")
codes=${CODES:-1200}
fewer_codes=${FEWER_CODES:-600}
hidden=${HIDDEN:-256}

cargo build --locked --release ${FEATURES:+--features "$FEATURES"} -p lab --bin translation
translation=${CARGO_TARGET_DIR:-target}/release/translation
touch "$out"
start=$(wc -l <"$out")

# NAME K FLAG..: one run with K softmaxes; its JSON gets its name.
run() {
    local name=$1 components=$2 head
    shift 2
    head=(--head mos --components "$components" --context "$hidden")
    if [ "$components" = 1 ]; then head=(--head softmax); fi
    echo "$name, K = $components" >&2
    "$translation" --data "$folder" --epochs "$epochs" --hidden "$hidden" "${head[@]}" "$@" "${flags[@]}" --samples 0 --json |
        grep '^\[{' | sed "s/^\[{/{\"run\":\"$name\",/; s/}\]$/}/" >>"$out" ||
        { failed=1 && echo "$name, K = $components: failed" >&2; }
}

hybrid=(--vocab hybrid --codes "$codes")
# Learned once for each size.
learned() { table=(--table learned --table-file "${out%.jsonl}-$1.safetensors"); }
for components in 1 3 9; do
    run "words" "$components" --vocab word
    run "byte pairs" "$components" --vocab bpe --vocab-size "$codes"
    learned "$codes"
    run "codes learned" "$components" "${hybrid[@]}" "${table[@]}"
done
run "codes by frequency" 9 "${hybrid[@]}" --table frequency
run "codes at random" 9 "${hybrid[@]}" --table random
learned "$fewer_codes"
run "fewer codes learned" 9 --vocab hybrid --codes "$fewer_codes" "${table[@]}"
learned light
run "LightRNN learned" 9 --vocab light "${table[@]}"
run "LightRNN by frequency" 9 --vocab light --table frequency

python3 - "$out" "$start" <<'TABLE'
import json, sys
print("| target tokens | K | ids | parameters | s/batch | MiB | perplexity per word | BLEU |\n|---|---|---|---|---|---|---|---|")
for line in open(sys.argv[1]).readlines()[int(sys.argv[2]):]:
    row = json.loads(line)
    number = lambda value, digits: "" if value is None else f"{value:.{digits}f}"
    print(f"| {row['run']} | {row['components']} | {row['vocab_size']} | {row['parameters']} "
          f"| {number(row['seconds_per_batch'], 3)} | {number(row['peak_mib'], 0)} "
          f"| {number(row['valid_perplexity'], 2)} | {number(row['scores'].get('bleu'), 1)} |")
TABLE
exit $failed
