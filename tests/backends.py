"""The tables that drive the tests: a backend, a regularizer or a dtype is one row here, and every test sees it."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from pytest import MonkeyPatch


@dataclass(frozen=True)
class Tolerance:
    """The contract of docs/math.md: ``value`` relative to the scores, ``vjp`` to the product, ``relax`` absolute."""

    value: float
    relax: float
    vjp: float
    log_prob: float


TOLERANCES = {
    "float64": Tolerance(value=1e-10, relax=1e-9, vjp=1e-8, log_prob=1e-9),
    "float32": Tolerance(value=1e-5, relax=1e-5, vjp=1e-4, log_prob=1e-5),
    # one rounding of the float32 answer, half a unit in the last place, on top of its own tolerance
    "float16": Tolerance(value=2.0**-11 + 1e-5, relax=2.0**-11 + 1e-5, vjp=2.0**-11 + 1e-4, log_prob=2.0**-11 + 1e-5),
    "bfloat16": Tolerance(value=2.0**-8 + 1e-5, relax=2.0**-8 + 1e-5, vjp=2.0**-8 + 1e-4, log_prob=2.0**-8 + 1e-5),
}


@dataclass(frozen=True)
class Backend:
    name: str
    available: bool
    reason: str  # why it is not
    dtypes: tuple[str, ...]  # the widest last
    asarray: Callable[[Any, str], Any]  # values, name of the dtype -> the framework's array
    to_numpy: Callable[[Any], np.ndarray]  # -> float64, exactly
    describe: Callable[[Any], tuple[type, str]]  # -> its type, and its dtype and device in words
    generators: dict[str, Callable[[int], Any]]  # what may be given as rng, from a seed
    seed_global: Callable[[int], Any]
    layouts: dict[str, Callable[[np.ndarray], Any]] = field(default_factory=dict)  # float64 values in unusual memory
    active: Callable[[], AbstractContextManager[Any]] = nullcontext  # what a test is run in

    @property
    def widest(self) -> str:
        return self.dtypes[-1]

    @property
    def wide_dtypes(self) -> tuple[str, ...]:
        """Those that results are computed in."""
        return tuple(dtype for dtype in self.dtypes if dtype in ("float32", "float64"))

    @property
    def is_jax(self) -> bool:
        """Compiled for each shape, with keys instead of generators."""
        return self.name.startswith("jax")

    @property
    def on_gpu(self) -> bool:
        return "cuda" in self.describe(self.asarray([0.0], "float32"))[1].lower()

    @property
    def looks(self) -> bool:
        """Whether results are looked at: if not, an infeasible instance is NaN instead of an error."""
        return self.name != "cuda" and not self.is_jax

    def rng(self, seed: int) -> Any:
        """A generator of the framework's own kind."""
        return list(self.generators.values())[-1](seed)


def _read_only(values: np.ndarray) -> np.ndarray:
    values = values.copy()
    values.flags.writeable = False
    return values


def _unaligned(values: np.ndarray) -> np.ndarray:
    return np.frombuffer(bytearray(b"-" + values.tobytes()), dtype=np.float64, offset=1).reshape(values.shape)


def _reversed(values: np.ndarray, axis: int) -> np.ndarray:
    return np.flip(np.ascontiguousarray(np.flip(values, axis)), axis)


NUMPY = Backend(
    name="numpy",
    available=True,
    reason="",
    dtypes=("float16", "float32", "float64"),
    asarray=lambda values, dtype: np.asarray(values, dtype=dtype),
    to_numpy=lambda array: np.asarray(array, dtype=np.float64),
    describe=lambda array: (type(array), str(array.dtype)),
    generators={"seed": int, "numpy.random.Generator": np.random.default_rng},
    seed_global=np.random.seed,
    layouts={
        "fortran": np.asfortranarray,
        "strided items": lambda values: np.repeat(values, 2, axis=-1)[..., ::2],
        "strided batch": lambda values: np.repeat(values, 3, axis=0)[::3],
        "reversed items": lambda values: _reversed(values, -1),
        "reversed batch": lambda values: _reversed(values, 0),
        "read-only": _read_only,
        "unaligned": _unaligned,
    },
)


def _torch_backend(name: str, device: str) -> Backend:
    import torch

    def tensor(values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.array(values, dtype=np.float64)).to(device)

    def transposed(values: np.ndarray) -> torch.Tensor:
        return tensor(values).transpose(0, -1).contiguous().transpose(0, -1)

    return Backend(
        name=name,
        available=True,
        reason="",
        dtypes=("float16", "bfloat16", "float32", "float64"),
        asarray=lambda values, dtype: tensor(values).to(getattr(torch, dtype)),
        to_numpy=lambda tensor: tensor.detach().to(torch.float64).cpu().numpy(),
        describe=lambda tensor: (type(tensor), f"{tensor.dtype} on {tensor.device}"),
        generators={"torch.Generator": lambda seed: torch.Generator(device).manual_seed(seed)},
        seed_global=torch.manual_seed,
        layouts={
            "transposed": transposed,
            "strided items": lambda values: tensor(np.repeat(values, 2, axis=-1))[..., ::2],
            "strided batch": lambda values: tensor(np.repeat(values, 3, axis=0))[::3],
            "with an offset": lambda values: tensor(np.concatenate([values[:1], values]))[1:],
        },
    )


def _missing(name: str, reason: str) -> Backend:
    def refuse(*_: Any) -> Any:
        raise RuntimeError(f"{name}: {reason}")

    return Backend(name, False, reason, (), refuse, refuse, refuse, {}, refuse)


def _torch_on(name: str, device: str) -> Backend:
    if not importlib.util.find_spec("torch"):
        return _missing(name, "torch is not installed")
    import torch

    if device == "cuda" and not torch.cuda.is_available():
        return _missing(name, "no GPU")
    return _torch_backend(name, device)


def _jax(name: str, x64: bool, scan: bool = False) -> Backend:
    """float64 is off unless it is switched on, and the contract of float32 holds without it. ``scan``: as on devices
    that have no kernels of ours."""
    if not importlib.util.find_spec("jax"):
        return _missing(name, "jax is not installed")
    import jax
    import jax.numpy as jnp

    from knapgrad.kernels.jax_scan import float64
    from knapgrad.kernels.numba import from_jax as on_cpu
    from knapgrad.kernels.triton import from_jax as on_cuda

    @contextmanager
    def scanning() -> Iterator[None]:
        with MonkeyPatch.context() as patch, jax.default_matmul_precision("highest"):
            for place in (on_cpu, on_cuda):
                patch.setattr(place, "find", lambda *_: None)
            yield  # the precision is nothing to us, but JAX keeps what it compiled under another one apart

    def refuse(_: int) -> Any:
        raise RuntimeError("JAX has no global generator")

    @contextmanager
    def active() -> Iterator[None]:
        """Most of a test is compiling: XLA should not try hard. (tests/for_jax has what runs optimised.)"""
        jax.config.update("jax_disable_most_optimizations", True)
        try:
            with float64(x64), scanning() if scan else nullcontext():
                yield
        finally:
            jax.config.update("jax_disable_most_optimizations", False)

    return Backend(
        name=name,
        available=True,
        reason="",
        dtypes=("float32", "float64") if x64 else ("float16", "bfloat16", "float32"),
        asarray=lambda values, dtype: jnp.asarray(np.asarray(values, np.float64), getattr(jnp, dtype)),
        to_numpy=lambda array: np.asarray(array).astype(np.float64),
        describe=lambda array: (type(array), f"{array.dtype} on {array.devices()}"),
        generators={"jax.random.PRNGKey": jax.random.PRNGKey, "jax.random.key": jax.random.key},
        seed_global=refuse,
        active=active,
    )


BACKENDS: dict[str, Backend] = {
    "numpy": NUMPY,
    "torch": _torch_on("torch", "cpu"),
    "cuda": _torch_on("cuda", "cuda"),
    "jax": _jax("jax", x64=False),
    "jax-x64": _jax("jax-x64", x64=True),
    "jax-scan": _jax("jax-scan", x64=False, scan=True),
}
