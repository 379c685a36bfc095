#!/usr/bin/env bash
# Builds the program for the traffic that it has: scripts/profiled.sh TARGET
#
# In: the sources, and llvm-profdata of the Rust toolchain. Out: TARGET/profiled/release/hermes. The compiler first builds a program that
# counts which of its code runs. That program carries the traffic of the benchmarks, as root. A second build then has frequent code inlined
# and together. It takes twice the time of a release build and a minute, and saves a quarter of the program's own CPU time a request.
set -euo pipefail
cd "$(dirname "$0")/.."
: "${CARGO:=cargo}"
target=$(realpath -m "${1:-target}")
profiled=$target/profiled
counts=$profiled/counts

tools=$(echo "$(rustc --print sysroot)"/lib/rustlib/*/bin)
[ -x "$tools/llvm-profdata" ] || rustup component add llvm-tools >&2
[ -x "$tools/llvm-profdata" ] || { echo "profiled: llvm-profdata is missing; run rustup component add llvm-tools" >&2; exit 1; }
[ "$(id -u)" = 0 ] || { echo "profiled: the traffic needs network namespaces; run this as root" >&2; exit 1; }

CARGO_TARGET_DIR=$target "$CARGO" build --release -p hermes-bench
rm -rf "$counts"
CARGO_TARGET_DIR=$profiled RUSTFLAGS="-Cprofile-generate=$counts" "$CARGO" build --release -p hermes
cp "$profiled/release/hermes" "$profiled/hermes-counting"
for traffic in throughput figure10 tunnels; do
  "$target/release/hermes-bench" "$traffic" --quick --only hermes --hermes "$profiled/hermes-counting" --out "$profiled/traffic"
done
"$tools/llvm-profdata" merge --sparse -o "$profiled/hermes.profdata" "$counts"/*.profraw
CARGO_TARGET_DIR=$profiled RUSTFLAGS="-Cprofile-use=$profiled/hermes.profdata" "$CARGO" build --release -p hermes
echo "profiled: $profiled/release/hermes"
