#!/usr/bin/env bash
# Compares the exact results of two commits: scripts/compare-bits.sh BEFORE [AFTER], where AFTER is HEAD by default. Runs
# the cases of tests/bits.rs of each commit with each instruction set of this machine, on one thread and on two, and prints
# each case whose bits differ or which AFTER lacks. Cases that only AFTER has are counted. Ends with 1 if a case differs.
#
#     MOS_HEAD_SIMD_SETS="avx512 scalar" scripts/compare-bits.sh main~3     # fewer instruction sets
set -euo pipefail
[[ ${1:-} != --help ]] || { sed -n '2,/^set -euo/{/^set/d;s/^# \{0,1\}//;p}' "$0"; exit; }
cd "$(dirname "$0")/.."

[ $# -ge 1 ] || { sed -n '2,6s/^# \{0,1\}//p' "$0" >&2; exit 2; }
commits=("$(git rev-parse --verify "$1^{commit}")" "$(git rev-parse --verify "${2:-HEAD}^{commit}")")
target=$(realpath -m "${CARGO_TARGET_DIR:-target}/compare-bits")
folder=$(mktemp -d)
trap 'for name in before after; do git worktree remove --force "$folder/$name" >/dev/null 2>&1 || true; done; rm -rf "$folder"' EXIT

names=(before after)
for i in 0 1; do
    tree=$folder/${names[$i]}
    git worktree add --quiet --detach "$tree" "${commits[$i]}"
    echo "== building ${names[$i]}, $(git log -1 --format='%h %s' "${commits[$i]}")" >&2
    # The path of the test's program, which cargo names.
    (cd "$tree" && CARGO_TARGET_DIR=$target cargo test --quiet --release --test bits --no-run --message-format=json) |
        grep -o '"executable":"[^"]*/bits-[^"]*"' | tail -n 1 | cut -d '"' -f 4 >"$folder/program-${names[$i]}"
    # The next build may have the same name.
    cp "$(cat "$folder/program-${names[$i]}")" "$folder/bits-${names[$i]}"
done

sets=${MOS_HEAD_SIMD_SETS:-amx avx512bf16 avx512 avx2 neon scalar}

status=0
for set in $sets; do
    for threads in 1 2; do
        for name in "${names[@]}"; do
            if ! MOS_HEAD_SIMD=$set RAYON_NUM_THREADS=$threads MOS_HEAD_BITS=$folder/$name.txt \
                "$folder/bits-$name" >"$folder/log" 2>&1; then
                # An instruction set that the machine lacks is an error of the first case.
                grep -q 'MOS_HEAD_SIMD: expected' "$folder/log" && echo "skipped: $set: this machine lacks it" && continue 3
                cat "$folder/log" >&2
                exit 2
            fi
            sort "$folder/$name.txt" -o "$folder/$name.txt"
        done
        # Cases of BEFORE, with the bits of both; a dash where AFTER has none.
        join -a 1 -e - -o 0,1.2,2.2 "$folder/before.txt" "$folder/after.txt" >"$folder/both"
        awk '$2 != $3 { print "  " $1 ": " $2 " " $3 }' "$folder/both" >"$folder/differing"
        all=$(wc -l <"$folder/before.txt") differing=$(wc -l <"$folder/differing")
        new=$(join -v 2 "$folder/before.txt" "$folder/after.txt" | wc -l)
        echo "$set, $threads thread(s): $differing of $all cases differ, $new are new"
        cat "$folder/differing"
        [ "$differing" = 0 ] || status=1
    done
done
exit $status
