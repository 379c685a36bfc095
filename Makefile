# What people run. Each target sets up what it needs on a fresh machine.

CARGO ?= cargo
TARGET := $(or $(CARGO_TARGET_DIR),target)
# What builds images: the first of these that is installed.
CONTAINER ?= $(shell command -v buildah || command -v podman || echo docker)
# Where `make setup` puts it, nothing as long as it did not; or `make demo-unstable ENVOY=PATH`.
ENVOY = $(wildcard $(TARGET)/tools/envoy/envoy/_bin/envoy)

# Process tests mostly wait for a peer, so more of them run at once than there are cores.
RUST_TEST_THREADS ?= $(shell expr $$(nproc) + 4)
export RUST_TEST_THREADS

.PHONY: help build release profiled dist image demo-build demo demo-video demo-ip demo-unstable demo-ndn demo-pep demo-relay check test lint setup bench bench-quick bench-pep bench-ndn bench-relay bench-workers bench-idle bench-video fuzz deny docs clean

help: ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 16

build: ## the binary, for developing
	$(CARGO) build -p hermes

release: ## the binary, for running: target/release/hermes; line tables for debuggers beside it, in hermes.debug
	$(CARGO) build --release -p hermes
	@cd $(TARGET)/release && if readelf -SW hermes | grep -q '\.debug_line'; then \
	  objcopy --only-keep-debug hermes hermes.debug && chmod -x hermes.debug && \
	  objcopy --strip-all --add-gnu-debuglink=hermes.debug hermes hermes.stripped && mv hermes.stripped hermes; fi

profiled: ## the binary, built for the traffic that it has (root; twice the build time): target/profiled/release/hermes
	CARGO=$(CARGO) ./scripts/profiled.sh $(TARGET)

dist: release ## a Debian package of the program, units, manual pages and completions: target/dist
	./scripts/package.sh $(TARGET)/release/hermes $(TARGET)/dist

image: dist ## an OCI image from that package, hermes:VERSION (buildah, podman or docker)
	$(CONTAINER) build -f Containerfile -t hermes:$$($(TARGET)/release/hermes --version | cut -d ' ' -f 2) $(TARGET)/dist

demo-build: # without link-time optimization, which takes minutes and shows in benchmarks alone
	$(CARGO) build --profile demo -p hermes

demo: demo-build ## a whole overlay on this machine, and what it does
	$(TARGET)/demo/hermes demo

demo-video: demo-build ## the paper's video case in network namespaces (root, ffmpeg)
	$(TARGET)/demo/hermes demo video

demo-ip: demo-build ## the paper's IP case in network namespaces (root): a user's ingress and server move
	$(TARGET)/demo/hermes demo ip --picture $(TARGET)/demo-ip.svg

demo-unstable: demo-build ## the papers' unstable case in network namespaces (root): links that are up in turns
	$(TARGET)/demo/hermes demo unstable --picture $(TARGET)/demo-unstable.svg $(addprefix --envoy ,$(ENVOY))

demo-ndn: demo-build ## the paper's NDN case in network namespaces (root): files over 10 Mbit/s, users and namespaces
	$(TARGET)/demo/hermes demo ndn --picture $(TARGET)/demo-ndn.svg

demo-relay: demo-build ## a chat in shells and browsers, and a voice-like stream, over a tree of three relays
	$(TARGET)/demo/hermes demo relay --picture $(TARGET)/demo-relay.svg

demo-pep: demo-build ## the scenarios of PEP-DNA in network namespaces (root): connections that a router splits
	$(TARGET)/demo/hermes demo pep --picture $(TARGET)/demo-pep.svg

setup: ## what the tests need beside Rust: peers from the package registries
	./scripts/setup.sh

lint: ## format, language and lints; warnings are errors
	$(CARGO) fmt --all --check
	python3 scripts/language.py
	$(CARGO) clippy --workspace --all-targets --quiet -- -D warnings

check: lint ## format, lints and unit tests: minutes, for the loop of writing code
	$(CARGO) test --workspace --lib --bins --quiet

test: setup lint ## everything: units, properties, golden files, real peers, corpora of the fuzzers
	CARGO_TARGET_DIR=$(abspath $(TARGET)) CARGO=$(CARGO) ./scripts/test.py

bench: release setup ## all benchmarks, side by side with Envoy, HAProxy, nginx and wireguard-go: bench/results
	$(CARGO) run --release -p hermes-bench -- all --out bench/results --hermes $(TARGET)/release/hermes

bench-quick: release setup ## the same in five minutes, noisier
	$(CARGO) run --release -p hermes-bench -- all --quick --out $(TARGET)/bench --hermes $(TARGET)/release/hermes

bench-pep: release setup ## connections split on a router (root), beside HAProxy and a minimal splitter: bench/results
	$(CARGO) run --release -p hermes-bench -- pep --out bench/results --hermes $(TARGET)/release/hermes

bench-ndn: release setup ## NDN files over a slow link and through an overlay, and by HTTP (root): bench/results
	mkdir -p bench/results
	$(TARGET)/release/hermes demo ndn --full --json > bench/results/ndn.json
	$(TARGET)/release/hermes demo ndn --full --repeats 3 --json --forwarder "node $(TARGET)/tools/ndnts/forwarder.mjs" > bench/results/ndn-forwarder.json
	$(CARGO) run --release -p hermes-bench -- gateway --out bench/results --hermes $(TARGET)/release/hermes --target $(TARGET)

bench-workers: release setup ## ways to choose workers for connections, beside HAProxy and Envoy: bench/results (as root)
	$(CARGO) run --release -p hermes-bench -- workers --out bench/results --hermes $(TARGET)/release/hermes

bench-idle: release setup ## many idle connections and streams, beside HAProxy: bench/results
	$(CARGO) run --release -p hermes-bench -- idle --out bench/results --hermes $(TARGET)/release/hermes

bench-relay: release setup ## a relay beside NATS, moq-relay, a bare relay, ping and a bare forwarder: bench/results (as root)
	$(CARGO) install --root $(TARGET)/moq --target-dir $(TARGET)/moq moq-relay@0.17.10
	$(CARGO) build --release --locked --manifest-path bench/moq/Cargo.toml --target-dir $(TARGET)/moq
	$(CARGO) run --release -p hermes-bench -- relay --out bench/results --hermes $(TARGET)/release/hermes --moq $(TARGET)/moq
	$(CARGO) run --release -p hermes-bench -- relay --out bench/results --hermes $(TARGET)/release/hermes --moq none --idle 100000 --file relay-idle.json
	$(CARGO) run --release -p hermes-bench -- relay-pair --out bench/results --hermes $(TARGET)/release/hermes
	$(CARGO) run --release -p hermes-bench -- relay-receivers --out bench/results --hermes $(TARGET)/release/hermes
	$(CARGO) run --release -p hermes-bench -- relay-rendezvous --out bench/results --hermes $(TARGET)/release/hermes

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
