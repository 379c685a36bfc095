#!/usr/bin/env python3
"""Builds all tests and runs their programs in two lanes, since the process tests mostly wait. Tests whose links run in
real time have the machine to themselves afterwards.

    scripts/test.py              every test program, doc tests, the fuzzers' corpora and the API documentation
    scripts/test.py NAME...      the programs whose name contains one of these

Prints a line for each program as it ends, and the whole output of those that fail. Exit status 1 if one fails.
"""

import json
import os
import pathlib
import queue
import subprocess
import sys
import threading
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
CARGO = os.environ.get("CARGO", "cargo")
LANES = 2
# The longest first, so that the lanes end together. Programs that are not named here follow in any order.
LONGEST_FIRST = ["e2e", "privileged", "peers", "doc", "doc tests", "process", "store"]
# Run after all others, one at a time: a busy machine delays what these tests measure.
ALONE = ["slow"]
# A program that ran this long has hung (seconds). The longest takes four minutes on two cores.
TIMEOUT = 1500
# Unit tests that load programs into the kernel are ignored unless root asks for them.
AS_ROOT = ["hermes-net units"]


class Job:
    """A command, where it runs, and what came of it."""

    def __init__(self, name, command, directory):
        self.name, self.command, self.directory = name, command, directory
        self.status, self.seconds, self.output = None, 0.0, ""

    def run(self, environment):
        start = time.monotonic()
        try:
            done = subprocess.run(
                self.command, cwd=self.directory, env=environment, timeout=TIMEOUT, text=True, errors="replace",
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False,
            )
            self.status, self.output = done.returncode, done.stdout
        except subprocess.TimeoutExpired as late:
            self.status = "timeout"
            self.output = (late.stdout or b"").decode(errors="replace")
        self.seconds = time.monotonic() - start

    def summary(self):
        lines = [line for line in self.output.splitlines() if line.startswith("test result:")]
        counts = {"passed": 0, "failed": 0, "ignored": 0}
        for line in lines:
            for part in line.split(".", 1)[-1].split(";"):
                words = part.split()
                if len(words) == 2 and words[1] in counts:
                    counts[words[1]] += int(words[0])
        text = ", ".join(f"{count} {what}" for what, count in counts.items() if count or what == "passed")
        return text if lines else "done"


def build():
    """Builds all test programs. Returns a job for each."""
    command = [CARGO, "test", "--workspace", "--no-run", "--message-format=json-render-diagnostics"]
    built = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    if built.returncode != 0:
        sys.exit("test: the tests do not build")
    jobs = []
    for line in built.stdout.splitlines():
        message = json.loads(line)
        if message["reason"] != "compiler-artifact" or not message["executable"] or not message["profile"]["test"]:
            continue
        target, package = message["target"], pathlib.Path(message["manifest_path"]).parent
        is_unit = any(kind in ("lib", "bin") for kind in target["kind"])
        name = f"{package.name} units" if is_unit else target["name"]
        # A panic of a test names the line; the frames of the test harness do not help.
        more = ["--include-ignored"] if name in AS_ROOT and os.geteuid() == 0 else []
        jobs.append(Job(name, [message["executable"], "--quiet", *more], package))
    return jobs


def others():
    """What is checked beside the test programs."""
    return [
        Job("doc tests", [CARGO, "test", "--workspace", "--doc", "--quiet"], ROOT),
        Job("fuzz corpora", [CARGO, "test", "--quiet", "--manifest-path", "fuzz/Cargo.toml"], ROOT),
        Job("doc", ["env", "RUSTDOCFLAGS=-D warnings", CARGO, "doc", "--workspace", "--no-deps", "--quiet"], ROOT),
    ]


def rank(job):
    return LONGEST_FIRST.index(job.name) if job.name in LONGEST_FIRST else len(LONGEST_FIRST)


def run(jobs):
    """Runs the jobs in lanes, and reports each as it ends."""
    environment = os.environ.copy()
    target = pathlib.Path(environment.get("CARGO_TARGET_DIR", ROOT / "target")).resolve()
    environment["CARGO_TARGET_DIR"] = str(target)
    environment.setdefault("HERMES_BIN", str(target / "debug" / "hermes"))
    printing = threading.Lock()
    run_in_lanes([job for job in sorted(jobs, key=rank) if job.name not in ALONE], LANES, environment, printing)
    run_in_lanes([job for job in jobs if job.name in ALONE], 1, environment, printing)


def run_in_lanes(jobs, count, environment, printing):
    waiting = queue.SimpleQueue()
    for job in jobs:
        waiting.put(job)

    def lane():
        while True:
            try:
                job = waiting.get_nowait()
            except queue.Empty:
                return
            job.run(environment)
            with printing:
                verdict = "ok    " if job.status == 0 else "FAILED"
                print(f"{verdict} {job.seconds:6.1f} s  {job.name}: {job.summary()}", flush=True)
                if job.status != 0:
                    print(f"--- {job.name} (status {job.status}): {' '.join(map(str, job.command))}")
                    print(job.output, flush=True)

    lanes = [threading.Thread(target=lane) for _ in range(count)]
    for thread in lanes:
        thread.start()
    for thread in lanes:
        thread.join()


def main():
    start = time.monotonic()
    jobs = build() + others()
    print(f"test: built in {time.monotonic() - start:.0f} s", flush=True)
    if names := sys.argv[1:]:
        jobs = [job for job in jobs if any(name in job.name for name in names)]
    if not jobs:
        sys.exit(f"test: no test program is called {' or '.join(names)}")
    run(jobs)
    # A lane that ended early leaves jobs without a status.
    bad = [job.name for job in jobs if job.status != 0]
    print(f"test: {len(jobs) - len(bad)} of {len(jobs)} programs passed in {time.monotonic() - start:.0f} s")
    if bad:
        sys.exit(f"test: FAILED: {', '.join(bad)}")


if __name__ == "__main__":
    main()
