#!/usr/bin/env bash
# Runs every fuzz target, or the named ones, for SECONDS of CPU time each, and prints the coverage of each.
#
#   fuzz/run.sh [SECONDS] [TARGET...]     60 seconds each by default
#   fuzz/run.sh --merge [TARGET...]       merges the findings of earlier runs into fuzz/corpus, minimised
#
# Needs a stable Rust toolchain and a C++ compiler: coverage is instrumented with stable flags,
# and no sanitiser is used (the parsers have no unsafe code for one to watch). New inputs are kept
# in fuzz/target/found/TARGET between runs; inputs that fail go to fuzz/artifacts/TARGET, and the
# script then exits with status 1.
set -euo pipefail
cd "$(dirname "$0")"

merge=no
seconds=60
if [[ "${1:-}" == --merge ]]; then
    merge=yes
    shift
elif [[ "${1:-}" =~ ^[0-9]+$ ]]; then
    seconds=$1
    shift
fi
targets=("$@")
if [[ ${#targets[@]} -eq 0 ]]; then
    for file in fuzz_targets/*.rs; do targets+=("$(basename "$file" .rs)"); done
fi

# Longer inputs cover nothing new and cost speed.
declare -A max_len=([node_document]=4096 [overlay_document]=4096 [capsule]=1024 [ndn_acks]=512)

# Maximum number of new inputs that a merge keeps for each target.
most_files=100

# Whether the first file equals one of the others.
cmp_any() {
    local file=$1 other
    shift
    for other in "$@"; do cmp --silent "$file" "$other" && return 0; done
    return 1
}

# Named explicitly so that build scripts and macros, which run on this machine, stay uninstrumented.
host=$(rustc -vV | sed -n 's/^host: //p')
out=${CARGO_TARGET_DIR:-$PWD/target}
export CARGO_TARGET_DIR=$out
RUSTFLAGS="--cfg fuzzing -Cpasses=sancov-module -Ccodegen-units=1 \
-Cllvm-args=-sanitizer-coverage-level=4 -Cllvm-args=-sanitizer-coverage-inline-8bit-counters \
-Cllvm-args=-sanitizer-coverage-pc-table -Cllvm-args=-sanitizer-coverage-trace-compares" \
    cargo build --quiet --release --features libfuzzer --bins --target "$host"

found=target/found
logs=target/logs
mkdir -p "$found" "$logs"

if [[ $merge == yes ]]; then
    for target in "${targets[@]}"; do
        merged=$found/$target.merged
        rm -rf "$merged"
        mkdir -p "$found/$target" "$merged" "artifacts/$target"
        # Edges only: hit counts would keep ten times as many files.
        "$out/$host/release/$target" -set_cover_merge=1 -use_counters=0 -max_len="${max_len[$target]:-512}" \
            -artifact_prefix="artifacts/$target/" "$merged" "corpus/$target" "$found/$target" >"$logs/$target.merge" 2>&1
        # Handwritten inputs have names and stay; those of an earlier merge are named by their hash.
        find "corpus/$target" -type f -regextype posix-extended -regex '.*/[0-9a-f]{40}' -delete
        # The engine writes the inputs with the largest coverage first; the last ones add one edge each.
        kept=0
        while read -r file && (( kept < most_files )); do
            if cmp_any "$merged/$file" "corpus/$target"/*; then continue; fi
            cp "$merged/$file" "corpus/$target/"
            kept=$((kept + 1))
        done < <(ls -rt "$merged")
        rmdir --ignore-fail-on-non-empty "artifacts/$target"
        printf '%-18s %5d files%s\n' "$target" "$(find "corpus/$target" -type f | wc -l)" \
            "$([[ -d artifacts/$target ]] && echo ', and inputs that fail: see artifacts' || true)"
    done
    exit 0
fi

# CPU time of a process, in whole seconds.
cpu_seconds() {
    awk -v hz="$(getconf CLK_TCK)" '{ print int(($14 + $15) / hz) }' "/proc/$1/stat" 2>/dev/null || echo 999999
}

status=0
printf '%-18s %8s %8s %8s %8s %12s %9s %6s\n' target seconds edges cov ft runs runs/s corpus
for target in "${targets[@]}"; do
    mkdir -p "$found/$target" "artifacts/$target"
    log=$logs/$target
    verdict=
    extra=()
    # The golden documents are good seeds; their own tests keep them.
    [[ $target == node_document ]] && extra+=(../crates/hermes-model/tests/config/{valid,invalid})
    [[ -f dictionaries/$target ]] && extra+=("-dict=dictionaries/$target")
    "$out/$host/release/$target" -max_len="${max_len[$target]:-512}" \
        -timeout=30 -rss_limit_mb=1024 -print_final_stats=1 -artifact_prefix="artifacts/$target/" \
        "$found/$target" "corpus/$target" ${extra[@]+"${extra[@]}"} >"$log" 2>&1 &
    pid=$!
    # On a shared machine a second of the clock is not a second of work.
    while kill -0 $pid 2>/dev/null && (($(cpu_seconds $pid) < seconds)); do sleep 1; done
    kill -USR1 $pid 2>/dev/null || true # The process ends regularly and prints its figures.
    wait $pid || { verdict=' FAILED'; status=1; }
    edges=$(sed -n 's/.*(\([0-9]*\) inline 8-bit counters).*/\1/p' "$log" | head -1)
    last=$(grep -E 'cov: [0-9]+ ft: [0-9]+ corp: ' "$log" | tail -1 || true)
    field() { sed -n "s|.* $1: \([0-9]*\).*|\1|p" <<<"$last"; }
    stat() { sed -n "s/^stat::$1: *//p" "$log"; }
    printf '%-18s %8s %8s %8s %8s %12s %9s %6s%s\n' "$target" "$seconds" "$edges" \
        "$(field cov)" "$(field ft)" "$(stat number_of_executed_units)" \
        "$(stat average_exec_per_sec)" "$(field corp)" "$verdict"
    if [[ -n $verdict ]]; then grep -aE 'panicked|ERROR|assertion|Test unit' "$log" | head -5; fi
    rmdir --ignore-fail-on-non-empty "artifacts/$target"
done
rmdir --ignore-fail-on-non-empty artifacts 2>/dev/null || true
exit $status
