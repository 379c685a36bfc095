#!/usr/bin/env python3
"""What the choice of workers costs (paper 003, Table 5): scripts/worker_cost.py HERMES HERMES_BENCH

In: release binaries with line tables, and `perf`, as root. Out, as JSON: the share of CPU time that a node spends on the counters of its
workers, on the scheduler with its updates of the map, and on the program in the kernel, under light and heavy load. A sample counts
for a part if any function at its address belongs to it, inlined or not. All that reads the clock counts for the counters. Never: a
comparison of two runs, which differ by more than the cost.
"""

import collections
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

PORT, LISTENERS, SECONDS = 9600, 16, 8
# Clients a second and requests of each: short connections make the most choices, and lasting ones the most turns.
LOADS = {"light": (1500, 1, 0), "heavy": (4500, 1, 0), "heavy, lasting connections": (300, 40, 100)}
# Wrappers of whole tasks: all that a task does may be inlined into them, and the runtime's functions have them as type parameters.
# Neither is the cost of counting.
WRAPPERS = ("Counted", "turns::reported")
# The first part of which the name has a word counts.
PARTS = {
    "scheduler": ("dispatch::scheduler", "Table::schedule", "Turns::select", "Memory::publish"),
    "counters": ("runtime::turns", "dispatch::table", "clock_gettime"),
    "program": ("bpf_prog_", "reuseport_select_sock", "bpf_run_sk_reuseport", "bpf_sk_reuseport"),
}


def document() -> str:
    listeners = "".join(
        f"- {{name: l{port}, bind: '127.0.0.1:{port}', protocol: http}}\n" for port in range(PORT, PORT + LISTENERS)
    )
    return (
        "node: cost\nworkers: 4\ndispatch: directed\naccess-log: off\nlimits: {connections: 20000}\n"
        f"listeners:\n{listeners}routes:\n- {{name: all, respond: {{status: 200, body: \"ok\\n\"}}}}\n"
    )


def load(rate: int, requests: int, pause: int) -> str:
    addresses = [f"127.0.0.1:{port}" for port in range(PORT, PORT + LISTENERS)]
    arrivals = {
        "load": "arrivals", "addresses": addresses, "rate": rate, "requests": requests, "pause": pause, "work": [["none", 1]],
        "delayed": 200, "seed": 1, "warmup": 3000, "window": SECONDS * 1000,
    }
    return json.dumps({"load": arrivals, "watch": []})


def inlined(binary: str, addresses: list[str]) -> dict[str, str]:
    """All functions at each address of the binary, from the innermost outwards."""
    found = subprocess.run(
        ["addr2line", "-i", "-f", "-C", "-a", "-e", binary], input="\n".join(addresses), capture_output=True, text=True, check=True
    )
    names: dict[str, str] = {}
    current = ""
    for line in found.stdout.splitlines():
        if line.startswith("0x"):
            current = hex(int(line, 16))
            names[current] = ""
        elif not any(wrapper in line for wrapper in WRAPPERS):
            names[current] += " " + line
    return names


def shares(binary: str, recorded: Path) -> dict[str, float]:
    fields = "ip,sym,symoff,dso"
    script = subprocess.run(
        ["perf", "script", "-i", str(recorded), "-F", fields, "--no-inline"], capture_output=True, text=True, check=True
    ).stdout
    samples: collections.Counter[tuple[str, str, str]] = collections.Counter()
    for line in script.splitlines():
        words = line.split()
        if len(words) >= 2:
            samples[words[0], words[1], words[-1]] += 1
    base = load_address(binary)
    own = {ip: hex(int(ip, 16) - base[0] + base[1]) for ip, _, dso in samples if binary in dso}
    names = inlined(binary, sorted(set(own.values())))
    parts: collections.Counter[str] = collections.Counter()
    for (ip, symbol, _), count in samples.items():
        # The kernel's symbols are the only names of its addresses.
        name = names.get(own[ip], symbol) if ip in own else symbol
        part = next((part for part, words in PARTS.items() if any(word in name for word in words)), "rest")
        parts[part] += count
    total = sum(parts.values())
    return {part: round(100 * parts[part] / total, 3) for part in PARTS} | {"samples": total}


def load_address(binary: str) -> tuple[int, int]:
    """Where the code of the running program is in memory, and where it is in the file's own addresses."""
    headers = subprocess.run(["readelf", "-lW", binary], capture_output=True, text=True, check=True).stdout
    code = next(line.split() for line in headers.splitlines() if "LOAD" in line and " E " in line)
    offset, address = int(code[1], 16), int(code[2], 16)
    for line in MAPS:
        words = line.split()
        if words[-1] == binary and "x" in words[1]:
            return int(words[0].split("-")[0], 16) - (int(words[2], 16) - offset), address
    raise SystemExit(f"worker_cost: {binary} is not mapped")


MAPS: list[str] = []


def main() -> None:
    binary, bench = (str(Path(path).resolve()) for path in sys.argv[1:3])
    results = {}
    for name, shape in LOADS.items():
        with tempfile.TemporaryDirectory() as folder:
            config, recorded = Path(folder, "node.yaml"), Path(folder, "perf.data")
            config.write_text(document())
            node = subprocess.Popen([binary, "proxy", "--config", str(config)], stderr=subprocess.DEVNULL)
            try:
                time.sleep(1)
                MAPS[:] = Path(f"/proc/{node.pid}/maps").read_text().splitlines()
                clients = subprocess.Popen(["nice", "-n", "-15", bench, "load", load(*shape)], stdout=subprocess.PIPE, text=True)
                time.sleep(3)
                subprocess.run(
                    ["perf", "record", "-q", "-F", "2000", "-p", str(node.pid), "-o", str(recorded), "--", "sleep", str(SECONDS)],
                    check=True,
                )
                outcome = json.loads(clients.communicate()[0])
                results[name] = shares(binary, recorded) | {"completed": outcome["completed"], "failed": outcome["failed"]}
            finally:
                node.terminate()
                node.wait()
    print(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
