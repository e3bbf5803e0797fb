"""Kernels between guard pages: an access outside of their memory ends the process, at once and always.

    make fuzz ARGS="--fence"
    python -m fuzzing --fence --instances 20000 --backends numpy jax

Scores, selections, scratch and results of the CPU kernels lie in pages of their own, with a page that may not be
touched right after them, and in a second run right before them; for calls from XLA, ``malloc`` of compiled code gives
such memory. Instances are dirty: NaN, infinite scores, limits that cannot be met, selections that are not feasible.
What comes out is not looked at. The calls are made by child processes, which say what they are about to do.
"""

from __future__ import annotations

import argparse
import ctypes
import faulthandler
import functools
import signal
import subprocess
import sys
import weakref
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np

from fuzzing.cases import KINDS, Array, Case, draw
from fuzzing.checks import namespace, setting_of

SIDES = ("after", "before")
_PAGE, _LINE, _HANGS = 4096, 64, 300  # bytes, bytes, seconds
_USUAL_SIZE = 8  # instances of a case

_EVERYWHERE = {
    "value": "kg.value(theta, constraint, smoothing)",
    "relax": "kg.relax(theta, constraint, smoothing)",
    "solve": "kg.solve(theta, constraint)",
    "sample": "kg.sample(theta, constraint, smoothing, num_samples=11, rng=rng)",
    "log_prob": "kg.log_prob(theta, array(y), constraint, smoothing)",
    "entropy": "kg.entropy(theta, constraint, smoothing)",
    "frontier": "kg.frontier(theta, constraint, smoothing)",
}
_DISTRIBUTION = (
    "(lambda d: (d.mode, d.mean, d.sample((3,)), d.log_prob(array(y)), d.entropy()))"
    "(kg.torch.SubsetDistribution(theta, constraint, smoothing, validate_args=False))"
)
OPERATIONS = {
    "numpy": _EVERYWHERE | {"frontier, hard": "kg.frontier(theta, constraint)"},
    "torch": {"distribution": _DISTRIBUTION}
    | {
        f"gradient of {name}": f"gradient(lambda theta: {code}, theta)"
        for name, code in _EVERYWHERE.items()
        if name not in ("solve", "sample")
    },
    "jax": _EVERYWHERE
    | {
        "gradient of relax": "jax.vjp(lambda x: kg.relax(x, constraint, smoothing), theta)[1](theta)",
        "gradient of entropy": "jax.grad(lambda x: kg.entropy(x, constraint, smoothing).sum())(theta)",
        "mode": "kg.jax.SubsetDistribution(theta, constraint, smoothing).mode",
    },
}


@functools.cache
def allocator(side: str) -> tuple[Any, Any]:
    """``malloc`` and ``free`` as compiled functions: a page with the size, a guard, the memory, a guard."""
    from numba import carray, cfunc, types

    from knapgrad.kernels.numba.frames import pointer

    word, number = types.int64, types.int32
    mmap = types.ExternalFunction("mmap", word(word, word, number, number, number, word))
    protect = types.ExternalFunction("mprotect", number(word, word, number))
    unmap = types.ExternalFunction("munmap", number(word, word))
    page, line, ends = _PAGE, _LINE, side == "after"

    @cfunc(word(word))
    def allocate(size):
        length = max(-(-size // line), 1) * line
        pages = -(-length // page)
        total = (pages + 3) * page
        base = mmap(0, total, 3, 0x22, -1, 0)  # read and write; private and anonymous
        if base == -1:
            return 0
        carray(pointer(base), (1,), np.int64)[0] = total
        protect(base + page, page, 0)
        protect(base + total - page, page, 0)
        start = base + 2 * page
        return start + pages * page - length if ends else start

    @cfunc(types.void(word))
    def release(address):
        base = address // page * page - 2 * page
        unmap(base, carray(pointer(base), (1,), np.int64)[0])

    return allocate, release


class Fence:
    """Memory for arrays, between guard pages on one side."""

    def __init__(self, side: str) -> None:
        self.allocate, self.release = allocator(side)

    def aligned(self, size: int, dtype: Any, boundary: int = _LINE) -> Array:
        dtype = np.dtype(dtype)
        address = self.allocate.ctypes(size * dtype.itemsize)
        buffer = (ctypes.c_ubyte * (size * dtype.itemsize)).from_address(address)
        weakref.finalize(buffer, self.release.ctypes, address)
        return np.frombuffer(buffer, dtype)

    def empty(self, shape: Any, dtype: Any = np.float64) -> Array:
        return self.aligned(int(np.prod(shape)), dtype).reshape(shape)

    def copy(self, x: Any) -> Any:
        """An array, or a tensor on the CPU, in such memory."""
        if hasattr(x, "detach"):
            kind = {2: np.int16, 4: np.int32, 8: np.int64}[x.element_size()]
            import torch

            bits = getattr(torch, np.dtype(kind).name)
            return torch.from_numpy(self.copy(x.contiguous().view(bits).numpy())).view(x.dtype)
        if not isinstance(x, np.ndarray):
            return x
        copy = self.empty(x.shape, x.dtype)
        copy[...] = x
        return copy

    def install(self) -> None:
        """For the rest of this process, before a kernel is loaded."""
        from llvmlite import binding

        from knapgrad.kernels.numba import frames, launch, threads

        class Numpy:
            """What :mod:`launch` takes for NumPy."""

            def __getattr__(_, name: str) -> Any:
                return getattr(np, name)

            empty = staticmethod(self.empty)
            zeros = staticmethod(lambda shape, dtype=np.float64: self.copy(np.zeros(shape, dtype)))
            empty_like = staticmethod(lambda x: self.empty(x.shape, x.dtype))

        class Memory(threads.Memory):
            """Scratch whose buffers lie apart."""

            def __init__(memory, dtype: np.dtype, sizes: tuple[int, ...]) -> None:
                memory.sizes, memory.bytes = sizes, 1 << 60  # too much to be kept
                types = (np.int64, np.float64, dtype, dtype)
                memory.buffers = [self.aligned(size, dtype) for size, dtype in zip(sizes, types)]
                memory.frame = self.copy(np.zeros(frames.SCRATCH, np.int64))
                memory.frame[:8:2], memory.frame[1:9:2] = list(map(frames.address, memory.buffers)), sizes
                memory.frame[frames.TABLE + 1], memory.frame[frames.ITSELF] = 1, frames.address(memory.frame)
                memory.enough_for, memory.frames = sizes, (memory.frame, memory.frame.data)

        launch.np, threads.Memory = Numpy(), Memory  # type: ignore[assignment, misc]
        binding.add_symbol("malloc", self.allocate.address)
        binding.add_symbol("free", self.release.address)


def dirty(rng: np.random.Generator, backend: str, kinds: list[str], few_kernels: bool = False) -> tuple[Case, Array]:
    """A case whose instances need not be valid, and selections (3, batch, *event) that need not be feasible."""
    is_jax, arguments = backend == "jax", {"largest_batch": 17, "kinds": kinds, "few_kernels": few_kernels}
    case = draw(rng, backend, **arguments)
    if is_jax:  # which compiles for each shape and regularizer
        while len(case.theta) != 17 or case.theta.shape[1] != 3:
            case = draw(rng, backend, **arguments)
        regularizer = "shannon" if "top-k" in case.kind else "gini"
        case = replace(case, regularizer=regularizer, gamma=np.broadcast_to(case.gamma, 17))
    theta, arguments = case.theta.copy(), dict(case.arguments)
    share, what = [(0.3, np.nan), (0.3, -np.inf), (0.15, np.inf), (0.0, 0.0)][rng.integers(4)]
    theta[rng.random(theta.shape) < share] = what
    if not is_jax and "weights" in arguments and "budgets" not in case.kind and rng.random() < 0.6:
        arguments["weights"] = arguments["weights"] * int(rng.choice([7, 150, 4000]))
    most = theta.shape[1] if "k" in arguments else _largest_total(arguments, case)
    for name in [name for name in ("capacity", "k", "at_least") if name in arguments]:
        shape = (17,) if is_jax else np.shape(arguments[name])
        arguments[name] = np.broadcast_to(arguments[name], shape)
        if rng.random() < 0.6:
            arguments[name] = rng.integers(0, most + 2, shape)
    high = "k" if "k" in arguments else "capacity"
    if high in arguments:
        arguments[high] = np.minimum(arguments[high], most if high == "k" else arguments.get("max_capacity", most + 2))
    if "at_least" in arguments:
        arguments["at_least"] = np.minimum(arguments["at_least"], arguments[high])
    y = (rng.random((3, *theta.shape)) < rng.choice([0.2, 0.5])).astype(float)
    return replace(case, theta=theta, arguments=arguments, layout="plain"), y


def _largest_total(arguments: dict[str, Any], case: Case) -> int:
    weights = np.asarray(arguments["weights"])
    if "options" in case.kind:
        weights = weights.max(-1, initial=0)
    return int(weights.sum(-1).max(initial=0))


def child(
    seed: int,
    backend: str,
    side: str,
    kinds: list[str],
    operations: list[str],
    few_kernels: bool,
    first: int,
    last: int,
) -> None:
    """Makes the calls of cases first..last-1, and says before each which it is."""
    from knapgrad.kernels.numba import layout

    faulthandler.enable()
    fence = Fence(side)
    fence.install()
    np.seterr(all="ignore")
    for number in range(first, last):
        case, y = dirty(np.random.default_rng([seed, number]), backend, kinds, few_kernels)
        least = 0 if number % 2 or backend == "jax" else 1 << 60
        layout.LEAST.update(dict.fromkeys(layout.LEAST, least))  # without a table, or with it, whatever the size
        known = {"gradient": gradient} | namespace(case, {})
        plain = known["array"]
        known |= {"theta": fence.copy(known["theta"]), "y": y, "array": lambda x, plain=plain: fence.copy(plain(x))}
        for operation in operations or OPERATIONS[backend]:
            code = OPERATIONS[backend][operation]
            print(f"{number} {len(case.theta)} {case.kind}: {operation}", flush=True)
            faulthandler.dump_traceback_later(_HANGS, exit=True)
            try:
                if backend == "jax":
                    _traced(case, code, y)
                else:
                    eval(code, known)
            except (ValueError, MemoryError):  # what is not valid is said
                pass
            except Exception as error:
                print(f"! {error!r:.300}".replace("\n", " "), flush=True)
    print("done", flush=True)


def _traced(case: Case, code: str, y: Array) -> None:
    """A call inside jit, with all numbers as arguments, so that XLA compiles once for many cases."""
    import jax

    fixed = ("optional", "max_capacity", "max_capacities")
    given = {name: np.asarray(x, np.int32) for name, x in case.arguments.items() if name not in fixed}
    constants = tuple((name, str(x)) for name, x in case.arguments.items() if name in fixed)
    call = _compiled(case.kind, code, constants)
    jax.block_until_ready(call(case.array(), given, case.array(y), np.float32(case.gamma), jax.random.key(case.seed)))


@functools.cache
def _compiled(kind: str, code: str, constants: tuple[tuple[str, str], ...]) -> Any:
    import jax

    import knapgrad as kg

    fixed = {name: eval(text) for name, text in constants}

    def call(theta, given, y, gamma, key):  # type: ignore[no-untyped-def]
        constraint = KINDS[kind].constraint(**given, **fixed)
        smoothing = kg.Shannon(gamma) if "top-k" in kind else kg.Gini(gamma)
        known = {"theta": theta, "constraint": constraint, "smoothing": smoothing, "y": y, "rng": key}
        return eval(code, {"kg": kg, "jax": jax, "array": lambda x: x, **known})

    return jax.jit(call)


def gradient(function: Any, theta: Any) -> Any:
    import torch

    x = theta.detach().requires_grad_()
    return torch.autograd.grad(function(x).nan_to_num(0, 0, 0).sum(), x)


def run(
    seed: int,
    backends: list[str],
    instances: int,
    bar: Any = None,
    kinds: list[str] | None = None,
    operations: list[str] | None = None,
    few_kernels: bool = False,
) -> dict[str, Any]:
    """How many calls were made, and what ended a process or raised what it should not."""
    calls, found, kinds = Counter[str](), [], kinds or list(KINDS)
    for backend in backends:
        for side in SIDES:
            number, done = 0, 0
            while done < instances / len(backends) / len(SIDES):
                left = instances / len(backends) / len(SIDES) - done
                last = number + min(500, int(left / _USUAL_SIZE) + 1)
                flags = ["--seed", str(seed), "--backend", backend, "--side", side, "--kinds", *kinds]
                flags += ["--operations", *operations] if operations else []
                flags += ["--few-kernels"] if few_kernels else []
                command = [sys.executable, "-m", "fuzzing.fence", *flags, "--first", str(number), "--last", str(last)]
                process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
                line = ""
                for text in process.stdout or []:
                    if text.startswith("!"):
                        found.append({"side": side, "backend": backend, "call": line, "how": text[2:].strip()})
                    elif text.startswith("done"):
                        line = ""
                    else:
                        line = text.strip()
                        at, size, call = line.split(" ", 2)
                        if int(at) >= number:
                            number, done = int(at) + 1, done + int(size)
                            if bar is not None:
                                bar.update(int(size))
                        calls[f"{backend}, {call}"] += 1
                status = process.wait()
                if line:  # it was not done
                    how = signal.Signals(-status).name if status < 0 else f"exit status {status}"
                    found.append({"side": side, "backend": backend, "call": line, "how": how})
                elif number < last:
                    raise RuntimeError(f"exit status {status} before any call; run it: {' '.join(command)}")
    for crash in found:
        crash["code"] = code_of(seed, crash, kinds, few_kernels)
    return {"calls": sum(calls.values()), "operations": dict(sorted(calls.items())), "found": found}


def code_of(seed: int, crash: dict[str, str], kinds: list[str], few_kernels: bool) -> str:
    number, _, call = crash["call"].split(" ", 2)
    case, y = dirty(np.random.default_rng([seed, int(number)]), crash["backend"], kinds, few_kernels)
    code = OPERATIONS[crash["backend"]][call.rsplit(": ", 1)[1]]
    return f"""\
# {call}, {crash["how"]} (guard page {crash["side"]} the memory):
# python -m fuzzing.fence --seed {seed} --backend {crash["backend"]} --side {crash["side"]} --first {number} --kinds ...
{setting_of(case)}
y = numpy_array({y.tolist()})
{code}"""


def main() -> None:
    parser = argparse.ArgumentParser("python -m fuzzing.fence", description="The calls of some cases, in this process.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--backend", choices=list(OPERATIONS), default="numpy")
    parser.add_argument("--side", choices=SIDES, default="after", help="of the memory, where the guard page is (after)")
    parser.add_argument("--first", type=int, default=0, help="number of the first case (0)")
    parser.add_argument("--last", type=int, help="number of the case after the last one (first + 1)")
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS), metavar="KIND")
    parser.add_argument("--operations", nargs="+", default=[], metavar="NAME")
    parser.add_argument("--few-kernels", action="store_true", help="fewer kinds of kernels, which have to be compiled")
    given = parser.parse_args()
    last = given.first + 1 if given.last is None else given.last
    child(given.seed, given.backend, given.side, given.kinds, given.operations, given.few_kernels, given.first, last)


if __name__ == "__main__":
    main()
