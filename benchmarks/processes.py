"""What has to be measured in a fresh process: import time, first calls, and peak memory.

Run as ``python -m benchmarks.processes peak NAME BATCH ITEMS`` it is that process; one line of JSON comes back.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from measuring.origin import ROOT

IMPORT = """
import json, sys, time
start = time.perf_counter()
import {modules}
seconds = time.perf_counter() - start
assert "torch" not in sys.modules
print(json.dumps(seconds))
"""

FIRST_CALL = """
import json, time
import numpy as np
import knapgrad as kg
theta = np.linspace(-1, 1, 10, dtype=np.float32)
{prepare}
start = time.perf_counter()
{call}
print(json.dumps(time.perf_counter() - start))
"""

FIRST_CALLS = {
    **{
        f"relax, NumPy, {name}": ("", f"kg.relax(theta, kg.Knapsack([3] * 10, 15), kg.{name}(1.0))")
        for name in ("Shannon", "Gini", "Tsallis")
    },
    "relax and backward, torch, Shannon": (
        "import torch\nscores = torch.tensor(theta, requires_grad=True)",
        "kg.relax(scores, kg.Knapsack([3] * 10, 15), kg.Shannon(1.0)).square().sum().backward()",
    ),
}


def run(code: str, cache: Path | None = None) -> Any:
    """What ``code`` prints as JSON in a fresh interpreter, with Numba's cache in the folder ``cache`` if given."""
    variables = dict(os.environ, NUMBA_CACHE_DIR=str(cache)) if cache else dict(os.environ)
    done = subprocess.run([sys.executable, "-c", code], env=variables, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"a benchmark process failed:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def import_seconds(modules: str, times: int) -> float:
    return statistics.median(run(IMPORT.format(modules=modules)) for _ in range(times))


def first_call_seconds(name: str, times: int) -> tuple[float, float]:
    """Cold (everything is compiled) and cached (a later process)."""
    prepare, call = FIRST_CALLS[name]
    code = FIRST_CALL.format(prepare=prepare, call=call)
    with tempfile.TemporaryDirectory() as folder:
        cold = run(code, Path(folder))
        return cold, statistics.median(run(code, Path(folder)) for _ in range(times))


def peak_bytes(name: str, batch: int, items: int) -> int:
    """How far forward and VJP raise the memory of a fresh process, or -1 where the system does not tell."""
    command = [sys.executable, "-m", "benchmarks.processes", "peak", name, str(batch), str(items)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"the memory benchmark of {name} failed:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def measure_peak(name: str, batch: int, items: int) -> int:
    from benchmarks.cases import Case, make
    from benchmarks.contestants import enter

    if not Path("/proc/self/clear_refs").exists():
        return -1
    enter(make(Case(2, items)), "shannon")[name].both()  # compiled, and the libraries' own memory is there
    time.sleep(0.1)
    contestant_problem = make(Case(batch, items))
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
    only(name, contestant_problem).both()
    return max(0, resident("VmHWM") - before)


def only(name: str, problem: Any) -> Any:
    """One contestant, so that the others' tables are not counted."""
    import numpy as np

    from benchmarks import contestants

    uniforms = np.zeros((1, *problem.theta.shape), dtype=np.float32)
    return {"paper": contestants.Paper, "ours": contestants.Ours, "eager": contestants.Eager}[name](
        problem, "shannon", uniforms
    )


def resident(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"no {field} in /proc/self/status")


if __name__ == "__main__":
    print(json.dumps(measure_peak(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))))
