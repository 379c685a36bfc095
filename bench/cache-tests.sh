#!/usr/bin/env bash
# Runs http-cache-tests (https://cache-tests.fyi) against Hermes, and beside it against nginx and Envoy where these are
# to be had, each with a plain configuration of a shared cache. Writes bench/results/cache-tests.json and a table.
#
# bench/cache-tests.sh [TEST-ID]   one test of Hermes, with all that went over the wire
#
# HERMES: the binary (target/debug/hermes). ENVOY: Envoy's own binary (on the path, or as scripts/setup.sh puts it).
# CACHE_TESTS: a checkout of the tests; without it the package is installed into a folder of its own.
set -euo pipefail
cd "$(dirname "$0")/.."
root=$PWD
target=${CARGO_TARGET_DIR:-$root/target}
hermes=${HERMES:-$target/debug/hermes}
work=$(mktemp -d)
pids=()
finish() {
  for pid in "${pids[@]}"; do kill "$pid" 2>/dev/null || true; done
  wait 2>/dev/null || true
  rm -rf "$work"
}
trap finish EXIT

tests=${CACHE_TESTS:-}
if [ -z "$tests" ]; then
  tests=$target/tools/cache-tests/node_modules/http-cache-tests
  [ -d "$tests" ] || npm install --silent --no-audit --no-fund --prefix "$target/tools/cache-tests" http-cache-tests@0.4.5
fi

free_port() { python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])'; }
await() { for _ in $(seq 100); do (exec 3<>"/dev/tcp/127.0.0.1/$1") 2>/dev/null && return; sleep 0.1; done; echo "$2 does not listen" >&2; exit 1; }

run() { timeout 1200 node --no-warnings bench/cache/run.mjs "$tests" "http://127.0.0.1:$1" "${2:-}"; }
# The suite's origin reads its settings where npm puts them.
export npm_config_protocol=http
origin_port=$(free_port)
(cd "$tests" && npm_config_port=$origin_port npm_config_pidfile=$work/origin.pid exec node --no-warnings server/server.mjs) >"$work/origin.log" 2>&1 &
pids+=($!)
await "$origin_port" "the suite's origin"

start_hermes() {
  cat >"$work/hermes.yaml" <<EOF
node: hermes
state: $work/state
access-log: "off"
listeners:
- {name: in, bind: "127.0.0.1:$1", protocol: http}
routes:
- {name: all, upstream: origin, cache: {}}
upstreams:
- {name: origin, protocol: h1, overlay: false, endpoints: ["127.0.0.1:$origin_port"]}
EOF
  "$hermes" proxy --config "$work/hermes.yaml" >"$work/hermes.log" 2>&1 &
  pids+=($!)
}

start_nginx() {
  mkdir -p "$work/nginx"
  cat >"$work/nginx.conf" <<EOF
daemon off; $([ "$(id -u)" = 0 ] && echo 'user root;') worker_processes 1; pid $work/nginx.pid; error_log $work/nginx.log;
events {}
http {
  access_log off; client_body_temp_path $work/nginx/body; proxy_temp_path $work/nginx/temp;
  fastcgi_temp_path $work/nginx/f; uwsgi_temp_path $work/nginx/u; scgi_temp_path $work/nginx/s;
  proxy_cache_path $work/nginx/cache levels=1:2 keys_zone=c:8m max_size=1g;
  server { listen 127.0.0.1:$1; location / {
    proxy_pass http://127.0.0.1:$origin_port; proxy_http_version 1.1; proxy_set_header Connection "";
    proxy_cache c; proxy_cache_revalidate on; proxy_cache_lock on;
  } }
}
EOF
  nginx -c "$work/nginx.conf" >"$work/nginx.out" 2>&1 &
  pids+=($!)
}

start_envoy() {
  cat >"$work/envoy.yaml" <<EOF
static_resources:
  listeners:
  - address: {socket_address: {address: 127.0.0.1, port_value: $1}}
    filter_chains:
    - filters:
      - name: envoy.filters.network.http_connection_manager
        typed_config:
          "@type": type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager
          stat_prefix: c
          route_config: {virtual_hosts: [{name: all, domains: ["*"], routes: [{match: {prefix: "/"}, route: {cluster: origin}}]}]}
          http_filters:
          - name: envoy.filters.http.cache
            typed_config:
              "@type": type.googleapis.com/envoy.extensions.filters.http.cache.v3.CacheConfig
              typed_config: {"@type": type.googleapis.com/envoy.extensions.http.cache.simple_http_cache.v3.SimpleHttpCacheConfig}
          - {name: envoy.filters.http.router, typed_config: {"@type": type.googleapis.com/envoy.extensions.filters.http.router.v3.Router}}
  clusters:
  - name: origin
    load_assignment: {cluster_name: origin, endpoints: [{lb_endpoints: [{endpoint: {address: {socket_address: {address: 127.0.0.1, port_value: $origin_port}}}}]}]}
EOF
  "$envoy" --use-dynamic-base-id --concurrency 1 --log-level error -c "$work/envoy.yaml" >"$work/envoy.log" 2>&1 &
  pids+=($!)
}

envoy=${ENVOY:-$(command -v envoy || true)}
[ -n "$envoy" ] || envoy=$target/tools/envoy/envoy/_bin/envoy
ran=()
for name in hermes nginx envoy; do
  case $name in
    nginx) command -v nginx >/dev/null || { echo "nginx is not here: left out" >&2; continue; } ;;
    envoy) [ -x "$envoy" ] || { echo "Envoy is not here: left out" >&2; continue; } ;;
  esac
  [ -z "${ONLY:-}" ] || [ "$ONLY" = "$name" ] || continue
  port=$(free_port)
  "start_$name" "$port"
  await "$port" "$name"
  if [ -n "${1:-}" ]; then run "$port" "$1"; exit; fi
  run "$port" >"$work/$name.json"
  ran+=("$name=$work/$name.json")
done
node --no-warnings bench/cache/table.mjs "$tests" bench/results/cache-tests.json "${ran[@]}"
