"""Run the GPU tests in several processes at once: most of their time is compiling kernels, which is the CPU's.

    python scripts/gpu_tests.py [--processes 12] [--seconds 150] [paths …]

Prints how many passed, and names what failed, was skipped or did not finish in the time.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

PATHS = ["tests/gpu", "tests/attention/test_on_accelerator.py"]
PYTEST = [sys.executable, "-m", "pytest", "-p", "no:benchmark", "-o", "addopts=", "-m", "gpu"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="*", default=PATHS)
    parser.add_argument("--processes", type=int, default=12)
    parser.add_argument("--seconds", type=float, default=150)
    options = parser.parse_args()
    names = collect(options.paths)
    shares = [names[i :: options.processes] for i in range(options.processes)]
    with ThreadPoolExecutor(options.processes) as pool:
        outputs = list(pool.map(lambda share: run(share, options.seconds), filter(None, shares)))
    fates = {name: fate for found in outputs for name, fate in found.items()}
    report(names, fates)
    sys.exit(any(fate == "failed" for fate in fates.values()))


def collect(paths: list[str]) -> list[str]:
    """Names of the tests, as pytest takes them."""
    done = subprocess.run([*PYTEST, "-q", "--collect-only", *paths], capture_output=True, text=True, check=False)
    names = [line for line in done.stdout.splitlines() if "::" in line]
    if not names:
        raise SystemExit(
            f"pytest found no GPU tests in {', '.join(paths)}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
        )
    return names


def run(names: list[str], seconds: float) -> dict[str, str]:
    """What became of some tests, one pytest for all; what the clock cut off is missing."""
    fates: dict[str, str] = {}
    process = subprocess.Popen(
        [*PYTEST, "-v", "--tb=short", *names], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        output, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        output, _ = process.communicate()
    for line in output.splitlines():
        for word, fate in ((" PASSED", "passed"), (" FAILED", "failed"), (" SKIPPED", "skipped"), (" ERROR", "failed")):
            name = line.split(word)[0].strip()
            if word in line and name in names:
                fates[name] = fate
    if "failed" in fates.values():
        print(output[output.find("= FAILURES") :][:6000], flush=True)
    return fates


def report(names: list[str], fates: dict[str, str]) -> None:
    counts = {fate: sum(f == fate for f in fates.values()) for fate in ("passed", "failed", "skipped")}
    missing = [name for name in names if name not in fates]
    said = ", ".join(f"{number} {fate}" for fate, number in counts.items())
    print(f"{len(names)} tests: {said}, {len(missing)} unfinished")
    for name in [*(n for n, fate in fates.items() if fate == "failed"), *missing]:
        print(f"  {fates.get(name, 'unfinished')}: {name}")


if __name__ == "__main__":
    main()
