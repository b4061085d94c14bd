# Mutation tests of code that cargo builds, for the scripts that source this file. Each file is restored, even if the
# script is interrupted.

export PROPTEST_DISABLE_FAILURE_PERSISTENCE=1
# A mutant changes little of the crate: this takes a third of the time.
export CARGO_INCREMENTAL=1
missed=0 count=0 file= tests=() passed=()
# Touches the file, so that cargo rebuilds it.
restore() { [[ ! -e $file.original ]] || { mv "$file.original" "$file" && touch "$file"; }; }
trap restore EXIT

# expect COMMAND..: the command, which must succeed now, that the next mutants must make fail.
expect() {
    tests=("$@")
    [[ " ${passed[*]} " == *" $* "* ]] && return
    "$@" >/dev/null 2>&1 || { echo "fails without a mutation: $*"; exit 1; }
    passed+=("$*")
}

# mutant FILE TEXT REPLACEMENT: TEXT must occur exactly once in a file of src/backend. With the replacement the tests must
# compile and fail, or not end in time.
mutant() {
    local text=$2 replacement=$3 content without log
    file=src/backend/$1
    content=$(cat "$file")
    without=${content//"$text"/}
    [[ $((${#content} - ${#without})) == "${#text}" ]] || { echo "$file: does not occur exactly once: $text"; exit 1; }
    mv "$file" "$file.original"
    printf '%s\n' "${content/"$text"/"$replacement"}" >"$file"
    count=$((count + 1))
    if log=$(timeout 900 "${tests[@]}" 2>&1); then
        echo "MISSED  $file: $text -> $replacement"
        missed=$((missed + 1))
    elif grep -qE 'could not compile|kernels were not compiled' <<<"$log"; then
        printf '%s\n' "$log" | grep -A5 '^error' | head -n 20
        echo "$file: does not compile: $text -> $replacement"
        exit 1
    else
        echo "caught  $file: $text -> $replacement"
    fi
    restore
}

report() {
    echo "$count mutations, $missed missed"
    [[ $missed == 0 ]]
}
