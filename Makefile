# What people run. Each target sets up what it needs on a fresh machine.

CARGO ?= cargo
TARGET := $(or $(CARGO_TARGET_DIR),target)
# Where `make setup` puts it, nothing as long as it did not; or `make demo-unstable ENVOY=PATH`.
ENVOY = $(wildcard $(TARGET)/tools/envoy/envoy/_bin/envoy)

.PHONY: help build release demo demo-video demo-ip demo-unstable test lint setup bench bench-quick bench-video fuzz deny docs clean

help: ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 16

build: ## the binary, for developing
	$(CARGO) build -p hermes

release: ## the binary, for running: target/release/hermes
	$(CARGO) build --release -p hermes

demo: release ## a whole overlay on this machine, and what it does
	$(TARGET)/release/hermes demo

demo-video: release ## the paper's video case in network namespaces (root, ffmpeg)
	$(TARGET)/release/hermes demo video

demo-ip: release ## the paper's IP case in network namespaces (root): a user's ingress and server move
	$(TARGET)/release/hermes demo ip --picture $(TARGET)/demo-ip.svg

demo-unstable: release ## the papers' unstable case in network namespaces (root): links that are up in turns
	$(TARGET)/release/hermes demo unstable --picture $(TARGET)/demo-unstable.svg $(addprefix --envoy ,$(ENVOY))

setup: ## what the tests need beside Rust: peers from the package registries
	./scripts/setup.sh

lint: ## format and lints, warnings are errors
	$(CARGO) fmt --all --check
	$(CARGO) clippy --workspace --all-targets --quiet -- -D warnings

test: setup lint ## everything: units, properties, golden files, real peers, corpora of the fuzzers
	HERMES_BIN=$(abspath $(TARGET))/debug/hermes $(CARGO) test --workspace --no-fail-fast
	CARGO_TARGET_DIR=$(abspath $(TARGET)) $(CARGO) test --manifest-path fuzz/Cargo.toml
	$(CARGO) doc --workspace --no-deps --quiet

bench: release setup ## all benchmarks, side by side with Envoy, HAProxy, nginx and wireguard-go: bench/results
	$(CARGO) run --release -p hermes-bench -- all --out bench/results --hermes $(TARGET)/release/hermes

bench-quick: release setup ## the same in five minutes, noisier
	$(CARGO) run --release -p hermes-bench -- all --quick --out $(TARGET)/bench --hermes $(TARGET)/release/hermes

bench-video: release setup ## the video case, 30 runs
	mkdir -p bench/results
	$(TARGET)/release/hermes demo video --runs 30 --json > bench/results/video.json

fuzz: ## every fuzz target for a minute
	./fuzz/run.sh 60

deny: ## licences, sources and banned crates (installs cargo-deny)
	command -v cargo-deny >/dev/null || $(CARGO) install --locked cargo-deny
	$(CARGO) deny check bans licenses sources

docs: ## the API documentation
	$(CARGO) doc --workspace --no-deps --open

clean: ## forget all builds
	$(CARGO) clean
