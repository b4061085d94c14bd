#!/usr/bin/env bash
# What came after the mixture of softmaxes, on Penn Treebank: the heads softmax, moc and mos, a sampled mos, softmax and
# mos with sigsoftmax, Mixtape, and a mixture that is grown from the softmax, with its control, the softmax trained on
# for the same epochs. Each runs at three learning rates with seed 1, and at the best of them with seed 2; then
# `bottleneck` measures the rank of the log-probabilities of every best model.
#
#   scripts/successors.sh DIR [OUT]            DIR has train.txt and valid.txt; OUT (successors) gets what is written
#   scripts/successors.sh --built-in [OUT]     the same with the built-in language, to try the script
#
# OUT/NAME.jsonl has the lines of --results of a run, OUT/ranks.jsonl those of `bottleneck`, and OUT/table.md the table.
# EPOCHS (3) is the number of epochs of a run, MINUTES (1000000) the time after which the script stops: the same command
# continues. FLAGS are more flags of every run, RATES (10 20 30; built-in: 0.01 0.02 0.03) the learning rates, and
# CONTEXTS (2000) the contexts of `bottleneck`. The grown mixture and its control begin with the rate that the softmax
# has reached by its decay, DECAY (0.7) an epoch. BIN is a folder with the programs; without it they are built.
#
# Needs jq.
set -euo pipefail
data=${1:?the folder of the texts: scripts/successors.sh DIR [OUT]}
out=$(realpath -m "${2:-successors}")
if [[ $data == --built-in ]]; then
    texts=() rates="0.01 0.02 0.03"
else
    texts=(--data "$(realpath "$data")" --preset small) rates="10 20 30"
fi
cd "$(dirname "$0")/.."
epochs=${EPOCHS:-3} decay=${DECAY:-0.7} contexts=${CONTEXTS:-2000}
read -ra rates <<<"${RATES:-$rates}"
read -ra more <<<"${FLAGS:-}"
if [[ -z ${BIN:-} ]]; then
    cargo build --quiet --locked --release -p lab --bin language_model --bin bottleneck
    BIN=${CARGO_TARGET_DIR:-target}/release
fi
mkdir -p "$out"
end=$(awk -v now="$(date +%s)" -v minutes="${MINUTES:-1000000}" 'BEGIN { printf "%.0f", now + 60 * minutes }')

# NAME EPOCHS LR SEED FLAG..: one run, unless it is over. The script ends if the time is up.
run() {
    local name=$1 total=$2 lr=$3 seed=$4 left
    shift 4
    [[ -e $out/$name.done ]] && return
    left=$(awk -v end="$end" -v now="$(date +%s)" 'BEGIN { print (end - now) / 60 }')
    if awk -v left="$left" 'BEGIN { exit left > 0 }'; then stop; fi
    # A leg has the state of a run that began from another file.
    if [[ ${1:-} == --resume && -e $out/$name.leg.safetensors ]]; then shift 2; fi
    echo "== $name"
    local status=0
    "$BIN/language_model" ${texts[@]+"${texts[@]}"} "$@" ${more[@]+"${more[@]}"} --epochs "$total" --decay "$decay" \
        --lr "$lr" --seed "$seed" --save "$out/$name.safetensors" --results "$out/$name.jsonl" --minutes "$left" 2>&1 |
        tee "$out/$name.log" || status=$?
    if grep -q '^The time is up' "$out/$name.log"; then stop; fi
    # A run that diverges is over; any other failure is one of the script.
    if ((status)) && ! grep -q 'diverged in epoch' "$out/$name.log"; then exit "$status"; fi
    rm -f "$out/$name.leg.safetensors"
    touch "$out/$name.done"
}

stop() {
    echo "The time of MINUTES is up: the same command continues."
    exit 0
}

# FILE: the lowest validation perplexity of a run, or 1e300 if there is none.
lowest() {
    jq -s '[.[].valid_ppl | select(. != null)] | min // 1e300' "$1"
}

# SYSTEM: the learning rate with the lowest perplexity.
best() {
    local lr
    for lr in "${rates[@]}"; do
        echo "$(lowest "$out/$1-$lr-1.jsonl") $lr"
    done | sort -g | head -1 | cut -d ' ' -f 2
}

# SYSTEM FLAG..: all runs of a system.
system() {
    local name=$1 lr
    shift
    for lr in "${rates[@]}"; do run "$name-$lr-1" "$epochs" "$lr" 1 "$@"; done
    lr=$(best "$name")
    run "$name-$lr-2" "$epochs" "$lr" 2 "$@"
}

system softmax --head softmax
system moc --head moc
system mos --head mos
system mos-sampled --head mos --output sampled
system softmax-sigsoftmax --head softmax --logit-function sigsoftmax
system mos-sigsoftmax --head mos --logit-function sigsoftmax
system mixtape --head mixtape

# The grown mixture begins where the best softmax of the seed is, and the control resumes it.
from=$(best softmax)
# SEED LR: both runs from the softmax of this seed.
grow() {
    local softmax=$out/softmax-$from-$1 first
    first=$(jq -s 'map(select(.valid_ppl != null)) | min_by(.valid_ppl).epoch' "$softmax.jsonl")
    run "grown-$2-$1" "$epochs" "$(awk -v lr="$2" -v d="$decay" -v n="$first" 'BEGIN { print lr * d ^ n }')" "$1" \
        --grow "$softmax.safetensors"
    # The decay of the control counts the epochs of the softmax too.
    run "control-$2-$1" "$((first + epochs))" "$2" "$1" --resume "$softmax.safetensors" --head softmax
}
for lr in "${rates[@]}"; do grow 1 "$lr"; done
best_grown=$(best grown) best_control=$(best control)
for lr in $(printf '%s\n' "$best_grown" "$best_control" | sort -u); do grow 2 "$lr"; done

systems=(softmax moc mos mos-sampled softmax-sigsoftmax mos-sigsoftmax mixtape grown control)
[[ -e $out/ranks.jsonl ]] || : >"$out/ranks.jsonl"
for name in "${systems[@]}"; do
    if grep -q "\"system\":\"$name\"" "$out/ranks.jsonl"; then continue; fi
    file=$out/$name-$(best "$name")-1.safetensors
    [[ -e $file ]] || continue
    "$BIN/bottleneck" --json --contexts "$contexts" "$file" | tail -1 |
        jq -c --arg name "$name" '.[0] | { system: $name, rank, context, contexts }' >>"$out/ranks.jsonl"
done

{
    echo "| system | learning rate | parameters | validation perplexity, seed 1 | seed 2 | seconds an epoch | rank |"
    echo "|---|---|---|---|---|---|---|"
    for name in "${systems[@]}"; do
        lr=$(best "$name")
        file=$out/$name-$lr
        number() { awk -v x="$1" 'BEGIN { if (x < 1e299) printf "%.2f", x; else print "diverged" }'; }
        second=-
        if [[ -e $file-2.jsonl ]]; then second=$(number "$(lowest "$file-2.jsonl")"); fi
        echo "| $name | $lr | $(jq -s '.[0].parameters' "$file-1.jsonl") |" \
            "$(number "$(lowest "$file-1.jsonl")") | $second |" \
            "$(jq -s 'map(.seconds) | add / length | . * 10 | round / 10' "$file-1.jsonl") |" \
            "$(jq -r --arg name "$name" 'select(.system == $name).rank' "$out/ranks.jsonl") |"
    done
} >"$out/table.md"
cat "$out/table.md"
