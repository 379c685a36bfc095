//! Nothing: the package exists for its four test binaries, which README.md lists.
