#!/bin/sh
# Bugs that are made on purpose: each patch in scripts/mutants breaks one promise of the control plane, in a copy of the last
# commit, and the test that its second line names (its test binary, then itself) must fail by that. Prints killed or survived for each;
# fails where one survives.
#   scripts/mutants.sh [NAME...]
set -eu
root=$(cd "$(dirname "$0")/.." && pwd)
target=$(mkdir -p "${CARGO_TARGET_DIR:-$root/target}/mutants" && cd "${CARGO_TARGET_DIR:-$root/target}/mutants" && pwd)
tree=$target/tree
export CARGO_TARGET_DIR="$target" RUST_BACKTRACE=0
rm -rf "$tree" && mkdir "$tree"
git -C "$root" archive HEAD | tar -x -C "$tree"
cd "$tree"
[ $# -gt 0 ] || set -- $(cd "$root/scripts/mutants" && ls ./*.patch)

# Whether the test that it names passes, with what is in the tree; cargo goes by the times of files.
passes() {
    find crates -name '*.rs' -newer "$target/began" -exec touch {} +
    cargo test --quiet -p hermes-e2e -p hermes-controller --test "$1" --no-run || { echo "does not build" >&2; exit 2; }
    timeout 300 cargo test --quiet -p hermes-e2e -p hermes-controller --test "$1" "$2" -- --nocapture >"$target/$3.log" 2>&1
}

survived=0
for name; do
    name=$(basename "$name" .patch)
    patch=$root/scripts/mutants/$name.patch
    test=$(sed -n 's/^test: //p' "$patch")
    touch "$target/began"
    sed -n '/^--- /,$p' "$patch" | patch --quiet --strip 1
    if passes "${test% *}" "${test#* }" "$name"; then
        echo "survived  $name"
        survived=1
    else
        echo "killed    $name: $(grep -A1 panicked "$target/$name.log" | grep -v panicked | head -1 | cut -c1-150)"
    fi
    sed -n '/^--- /,$p' "$patch" | patch --quiet --strip 1 --reverse
    find crates -name '*.rs' -newer "$target/began" -exec touch {} +
done
exit $survived
