"""Compare the machine code of the GPU kernels of two versions of knapgrad, without a GPU.

    python -m benchmarks.instructions --base ../other-checkout --output instructions.json

Kernels are compiled for an H100 or H200 (sm_90) as they would be launched there, by Triton's own compiler, and
disassembled. What is compared is the number of instructions in each loop, outer loops include inner ones, and the
registers of a thread. That is no time: where both are the same, times hardly differ; else measure them
(`python -m benchmarks.compare --device cuda`). The planning and the kernels are those of the checkouts, the rest is
this one's.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

import knapgrad as kg
from benchmarks import cases
from benchmarks.compare import GPU
from measuring import origin

MULTIPROCESSORS = 132
SAMPLES = 32
REGULARIZERS = "shannon", "gini", "tsallis"
UNIT = np.ones(())
OTHERS = {  # the shape of theta, and the constraint
    "choices of 5": ((1024, 100), kg.MultipleChoice(np.arange(100).reshape(20, 5) % 37, 300)),
    "choices of 5 at least": ((1024, 100), kg.MultipleChoice(np.arange(100).reshape(20, 5) % 37, 300, at_least=150)),
    "choices of 20": ((1024, 320), kg.MultipleChoice(np.arange(320).reshape(16, 20) % 37, 300)),
    "two budgets": ((1024, 40), kg.MultiKnapsack(np.arange(80).reshape(2, 40) % 7, [20, 20])),
    "rows of many programs": ((2, 30), kg.Knapsack(np.arange(1, 31) * 500, 40_000)),
}
Row = dict[str, Any]


def calls(kernels: Any) -> dict[str, Callable[[], Any]]:
    """What is compiled, by name."""
    found: dict[str, Callable[[], Any]] = {}
    for case in GPU:
        if case == cases.GPU[-1]:
            continue  # a pipeline now, which takes minutes to compile, and did not exist
        problem = cases.make(case)
        theta, total = torch.from_numpy(problem.theta), problem.total
        constraints = {"": problem.constraint}
        if case in cases.GPU[:3]:
            constraints[" at least"] = kg.Knapsack(problem.weights[0], total, at_least=total // 2)
        for kind, constraint in constraints.items():
            lattice = on_device(constraint, case.items)
            for regularizer in REGULARIZERS:
                given = lattice, UNIT, regularizer
                name = f"{case.shape}{kind} {regularizer}"
                found[f"{name} relax"] = partial(kernels.relax, theta, *given)
                found[f"{name} vjp"] = partial(kernels.vjp, theta, theta, *given)
                if case == cases.GPU_SAMPLING and not kind:
                    y = theta.new_zeros(SAMPLES, *theta.shape)
                    found[f"{name} entropy"] = partial(kernels.entropy, theta, *given)
                    found[f"{name} sample"] = partial(kernels.sample, theta, y, *given)
                    found[f"{name} log_prob"] = partial(kernels.log_prob, theta, y, *given)
                    found[f"{name} log_prob_vjp"] = partial(kernels.log_prob_vjp, theta, y, y[..., 0], *given)
    for kind, (shape, constraint) in OTHERS.items():
        theta, given = torch.zeros(shape), (on_device(constraint, shape[1]), UNIT, "shannon")
        y = theta.new_zeros(SAMPLES, *theta.shape)
        found[f"{kind} relax"] = partial(kernels.relax, theta, *given)
        found[f"{kind} vjp"] = partial(kernels.vjp, theta, theta, *given)
        found[f"{kind} frontier"] = partial(kernels.frontier, theta, *given)
        found[f"{kind} sample"] = partial(kernels.sample, theta, y, *given)
        found[f"{kind} mode"] = partial(kernels.mode, theta, *given)
        found[f"{kind} log_prob_vjp"] = partial(kernels.log_prob_vjp, theta, y, y[..., 0], *given)
    return found


def on_device(constraint: Any, items: int) -> Any:
    """Its lattice, of tensors."""
    plain = constraint.lattice(items)
    arrays = {name: getattr(plain, name) for name in ("weights", "capacity", "slack")}
    return plain.replace(**{name: torch.tensor(x) for name, x in arrays.items() if x is not None})


def serve() -> None:
    """Prints a line of JSON per call: its kernels, with their loops and registers."""
    from triton.runtime import JITFunction

    from knapgrad.kernels.triton import from_torch as kernels
    from measuring import compiler

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    compiler.use()
    planned = sys.modules[getattr(kernels, "flat", kernels.tabulate).__module__]  # in older checkouts that is all one
    planned.multiprocessors = lambda _: MULTIPROCESSORS  # type: ignore[attr-defined]
    run, compiled = JITFunction.run, dict[str, Row]()

    def compile_only(self: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> None:
        found = run(self, *arguments, grid=grid, warmup=True, **options)
        compiled[self.__name__] = code_of(found.asm["cubin"])

    JITFunction.run = compile_only
    for name, call in calls(kernels).items():
        compiled.clear()
        call()
        print(json.dumps({"name": name, "kernels": compiled}), file=answers, flush=True)


@cache
def code_of(binary: bytes) -> Row:
    """The lengths of its loops, in the order in which they end, and its registers."""
    import triton

    tools = Path(triton.__file__).parent / "backends/nvidia/bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(binary)
        text, usage = (
            subprocess.run([tools / tool, option, file.name], capture_output=True, text=True, check=True).stdout
            for tool, option in (("nvdisasm", "-c"), ("cuobjdump", "-res-usage"))
        )
    labels, loops, count = dict[str, int](), list[int](), 0
    for line in text.splitlines():
        if label := re.match(r"(\.L\S*):", line):
            labels[label[1]] = count
        elif re.match(r"\s*/\*[0-9a-f]+\*/", line):
            target = re.search(r"BRA.*`\((\.L\S*)\)", line)
            if target and labels.get(target[1], count) < count:  # one of length 1 ends the code
                loops.append(count + 1 - labels[target[1]])
            count += 1
    registers = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert registers is not None, usage
    return {"loops": loops, "registers": int(registers[1]), "stack": int(registers[2])}


def is_longer(row: Row) -> bool:
    """Whether a loop has 2% and two instructions more, or whether there are other loops. The last one is that over
    instances, which runs once for each, but in kernels of one item, which have none."""
    base, this = row["base"]["loops"], row["this"]["loops"]
    pairs = list(zip(base, this))[: None if row["kernel"].endswith("item_kernel") else -1]
    return len(base) != len(this) or any(new > 1.02 * old and new > old + 1 for old, new in pairs)


def measure(checkout: Path) -> dict[str, Row]:
    path = filter(None, [str(checkout / "src"), os.environ.get("PYTHONPATH")])
    with tempfile.TemporaryDirectory() as cache:
        variables = os.environ | {"PYTHONPATH": os.pathsep.join(path), "TRITON_CACHE_DIR": cache}
        variables.pop("TRITON_INTERPRET", None)
        command = [sys.executable, "-m", "benchmarks.instructions", "--serve"]
        process = subprocess.Popen(command, cwd=origin.ROOT, env=variables, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        rows = [json.loads(line) for line in tqdm(process.stdout, desc=checkout.name, unit=" calls")]
        if process.wait():
            raise SystemExit(f"{checkout} could not be compiled")
    return {row["name"]: row["kernels"] for row in rows}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        "python -m benchmarks.instructions", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--base", type=Path, help="another checkout")
    parser.add_argument("--output", type=Path, help="a JSON file (default: print only)")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.serve:
        serve()
        return
    if options.base is None or not (options.base / "src/knapgrad").exists():
        parser.error("--base: give the folder of another checkout of knapgrad")
    base, this = measure(options.base.resolve()), measure(origin.ROOT)
    rows: list[Row] = []
    for name, kernels in this.items():
        for kernel, code in kernels.items():
            before = base[name].get(kernel)
            rows.append({"call": name, "kernel": kernel, "base": before, "this": code})
            if before is None:
                print(f"{name}: {kernel} is new")
            elif before != code:
                print(f"{name}: {kernel}, loops {before['loops']} -> {code['loops']}, ", end="")
                print(f"registers {before['registers']} -> {code['registers']}")
    longer = [f"{row['call']} ({row['kernel']})" for row in rows if row["base"] and is_longer(row)]
    print(
        f"{len(longer)} of {len(rows)} kernels have an inner loop that is longer by more than 2%", *longer, sep="\n  "
    )
    if options.output:
        commit = subprocess.run(
            ["git", "rev-parse", "--short=10", "HEAD"], cwd=options.base, capture_output=True, text=True
        ).stdout.strip()
        given = sys.argv[1:] if arguments is None else arguments
        found = {"environment": origin.environment(given, "benchmarks.instructions"), "base": commit, "rows": rows}
        options.output.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
