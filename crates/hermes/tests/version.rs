//! The binary starts. Cargo builds the binary of a package for its integration tests alone: this file is why
//! `cargo test --workspace` leaves a fresh `hermes`, which `make test` hands to the process tests.

#[test]
fn the_binary_prints_its_version() {
    let output = std::process::Command::new(env!("CARGO_BIN_EXE_hermes")).arg("--version").output().expect("it starts");
    let expected = concat!("hermes ", env!("CARGO_PKG_VERSION"));
    assert!(output.status.success() && output.stdout.starts_with(expected.as_bytes()), "{output:?}");
}
