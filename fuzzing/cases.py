"""Random cases: a batch of instances with all that a call needs, and the rows of the tables to draw from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np

import knapgrad as kg
from fuzzing.oracle import LONG, Truth

Array = np.ndarray
REGULARIZERS = {"shannon": kg.Shannon, "gini": kg.Gini, "tsallis": kg.Tsallis}
DTYPES = {"numpy": ["float16", "float32", "float64"], "jax": ["float32"]}
DTYPES["torch"] = DTYPES["cuda"] = ["float16", "bfloat16", "float32", "float64"]
#: how scores are drawn; weights say how often
CONTENTS = {"plain": 4, "masks": 3, "near ties": 2, "large": 2, "extremes": 2, "nan": 2}
LAYOUTS: dict[str, Callable[[Array], Array]] = {
    "plain": lambda x: x,
    "fortran": np.asfortranarray,
    "strided": lambda x: np.repeat(x, 2, axis=-1)[..., ::2],
    "reversed": lambda x: np.ascontiguousarray(x[::-1])[::-1],
    "every third": lambda x: np.repeat(x, 3, axis=0)[::3],
    "transposed": lambda x: np.ascontiguousarray(np.moveaxis(x, 0, -1)),  # moved back below
    "read-only": lambda x: x,
}


@dataclass(frozen=True)
class Case:
    kind: str
    theta: Array  # (batch, *event), float64 numbers of the dtype
    arguments: dict[str, Any]  # of the constraint
    gamma: Any
    regularizer: str
    dtype: str
    backend: str
    content: str = "plain"
    layout: str = "plain"
    threads: int = 1
    seed: int = 0

    @property
    def constraint(self) -> Any:
        return KINDS[self.kind].constraint(**self.arguments)

    @property
    def smoothing(self) -> Any:
        return REGULARIZERS[self.regularizer](self.gamma)

    @property
    def is_nan(self) -> Array:
        return rows(np.isnan(self.theta) | (self.theta == np.inf)).any(-1)

    @property
    def largest(self) -> Array:
        """abs(theta) / gamma (batch,)."""
        finite = rows(np.where(np.isfinite(self.theta), np.abs(self.theta), 0))
        return finite.max(-1, initial=0) / self.gamma

    def one(self, b: int) -> Case:
        """An instance of it."""
        event = 2 if "options" in self.kind else 1
        arguments = {}
        for name, x in self.arguments.items():
            if "budgets" in self.kind:  # the first dimension is the budget
                own = np.ndim(x) == {"weights": 3, "capacities": 2}.get(name)
                arguments[name] = x[:, b : b + 1] if own else x
                continue
            own = np.ndim(x) > (event if name == "weights" else 0)
            arguments[name] = x[b : b + 1] if own else x
        return replace(
            self,
            theta=self.theta[b : b + 1],
            arguments=arguments,
            gamma=self.gamma[b : b + 1] if np.ndim(self.gamma) else self.gamma,
            layout="plain",
        )

    def without(self, i: int) -> Case:
        """Less one item, or group."""
        if "weights" not in self.arguments:
            return replace(self, theta=np.delete(self.theta, i, 1))
        axis = -2 if "options" in self.kind else -1
        weights = np.delete(self.arguments["weights"], i, axis)
        return replace(self, theta=np.delete(self.theta, i, 1), arguments={**self.arguments, "weights": weights})

    def truth(self, theta: Array | None = None, name: str | None = None, slack: str = "limits") -> Truth:
        """NaN counts as 0: those instances are looked at separately."""
        theta = self.theta if theta is None else theta
        theta = np.where(np.isnan(theta) | (theta == np.inf), 0, theta).astype(LONG)
        batch = len(theta)
        gamma = np.asarray(1 if name == "hard" else self.gamma, LONG)
        scores = theta / gamma.reshape(-1, *[1] * (theta.ndim - 1))
        weights = self.arguments.get("weights", np.ones(theta.shape[1:], int))
        sides: tuple[Any, ...] = ()
        if "budgets" in self.kind:
            weights, capacities, sides = self._numbered(theta.shape)
        weights = np.broadcast_to(weights, theta.shape)
        if "options" not in self.kind:
            scores, weights = (np.stack([0 * x, x], -1) for x in (np.where(np.isneginf(scores), 0, scores), weights))
            scores[..., 1] = np.where(np.isneginf(theta), -np.inf, scores[..., 1])
        elif self.arguments.get("optional"):
            none = np.zeros((*theta.shape[:-1], 1))
            scores = np.concatenate([none.astype(LONG), scores], -1)
            weights = np.concatenate([none.astype(int), weights], -1)
        high = capacities if sides else self.arguments.get("capacity", self.arguments.get("k"))
        low = self.arguments.get("at_least")
        low = (high if "k" in self.arguments else 0) if low is None else low
        low, high = (np.broadcast_to(x, batch).astype(int) for x in (low, high))
        return Truth(scores, weights.astype(int), low, high, name or self.regularizer, slack, sides)

    @property
    def widest(self) -> Case:
        """With its bounds as limits: how far a frontier goes."""
        bounds = {"max_capacity": "capacity", "max_capacities": "capacities"}
        limits = {limit: self.arguments[bound] for bound, limit in bounds.items() if bound in self.arguments}
        return replace(self, arguments={**self.arguments, **limits})

    def _numbered(self, shape: tuple[int, ...]) -> tuple[Array, Array, tuple[Any, ...]]:
        """Weights and capacities of several budgets as numbers, with room for all items to be overdrawn."""
        weights, capacities, sides = np.zeros(shape, int), np.zeros(len(self.theta), int), []
        place = 1
        for given, limit in zip(self.arguments["weights"][::-1], self.arguments["capacities"][::-1]):
            most = int(np.max(limit, initial=0))
            own = np.broadcast_to(np.minimum(given, most + 1), shape)  # heavier is out in any case
            debt = int(own.sum(-1).max(initial=0))
            sides.append((most + debt + 1, place, debt))
            weights, capacities = weights + own * place, capacities + (limit + debt) * place
            place *= most + debt + 1
        return weights, capacities, tuple(sides[::-1])

    def options_of(self, y: Array) -> Array:
        """Selections (..., *event) as numbers of options (..., groups)."""
        if "options" not in self.kind:
            return (y != 0).astype(int)
        return y.argmax(-1) if not self.arguments.get("optional") else np.where(y.any(-1), y.argmax(-1) + 1, 0)

    def selections_of(self, picked: Array) -> Array:
        """The reverse."""
        if "options" not in self.kind:
            return picked.astype(float)
        optional = int(bool(self.arguments.get("optional")))
        return (picked[..., None] - optional == np.arange(self.theta.shape[-1])).astype(float)

    def array(self, theta: Array | None = None) -> Any:
        """theta in the framework, in its layout."""
        values = self.theta if theta is None else theta
        if self.backend == "numpy":
            return self._laid(values.astype(self.dtype))
        if self.backend == "jax":
            import jax.numpy as jnp

            return jnp.asarray(values, getattr(jnp, self.dtype))
        import torch

        laid = self._laid(values) if self.layout not in ("reversed", "read-only") else values
        tensor = torch.from_numpy(laid if laid.flags.writeable else laid.copy())
        return tensor.to("cuda" if self.backend == "cuda" else "cpu", getattr(torch, self.dtype))

    def _laid(self, values: Array) -> Array:
        if not len(values):
            return values
        laid = LAYOUTS[self.layout](values)
        if self.layout == "transposed":
            return np.moveaxis(laid, -1, 0)
        if self.layout == "read-only":
            laid = laid.copy()
            laid.flags.writeable = False
        return laid


@dataclass(frozen=True)
class Kind:
    """A constraint, and how to draw its arguments: from a random selection, so that something is feasible."""

    constraint: Callable[..., Any]
    draw: Callable[[np.random.Generator, tuple[int, ...], Array], dict[str, Any]]


def _weights(rng: np.random.Generator, shape: tuple[int, ...], own: bool) -> Array:
    weights = rng.integers(0, rng.integers(1, 6), shape if own else shape[1:], endpoint=True)
    heavy = rng.random(weights.shape) < 0.05
    return np.where(heavy, 99, weights)


def _limits(rng: np.random.Generator, used: Array, own: bool, least: str) -> dict[str, Any]:
    """Around the weight of a selection, (batch,)."""
    if not own:
        used = used.max(initial=0)
    extra = rng.integers(0, 4, np.shape(used))
    limits: dict[str, Any] = {"capacity": used + extra}
    if least == "some":
        limits["at_least"] = np.maximum(used - rng.integers(0, 3, np.shape(used)), 0)
    elif least == "all":
        limits = {"capacity": used, "at_least": used}
    return limits


def _knapsack(least: str, own: bool, bounded: bool = False) -> Callable[..., dict[str, Any]]:
    def draw(rng: np.random.Generator, shape: tuple[int, ...], picked: Array) -> dict[str, Any]:
        weights = _weights(rng, shape, own)
        weights = np.where((weights == 99) & picked.any(0), 3, weights)
        one = picked if own else picked[:1]
        limits = _limits(rng, (one * weights).sum(-1), own, least)
        if bounded:
            limits["max_capacity"] = int(np.max(limits["capacity"], initial=0)) + 3
        return {"weights": weights, **limits}

    return draw


def _top_k(least: bool, own: bool) -> Callable[..., dict[str, Any]]:
    def draw(rng: np.random.Generator, shape: tuple[int, ...], picked: Array) -> dict[str, Any]:
        k = picked.sum(-1) if own else picked[:1].sum(-1).max(initial=0)
        return {"k": k, "at_least": np.maximum(k - rng.integers(0, 3, np.shape(k)), 0)} if least else {"k": k}

    return draw


def _options(least: str, own: bool, optional: bool) -> Callable[..., dict[str, Any]]:
    def draw(rng: np.random.Generator, shape: tuple[int, ...], picked: Array) -> dict[str, Any]:
        weights = np.where(picked.any(0), np.minimum(w := _weights(rng, shape, own), 4), w)
        one = picked if own else picked[:1]
        return {"weights": weights, "optional": optional, **_limits(rng, (one * weights).sum((-2, -1)), own, least)}

    return draw


def _budgets(count: int, own: bool) -> Callable[..., dict[str, Any]]:
    """The first is a number of items."""

    def draw(rng: np.random.Generator, shape: tuple[int, ...], picked: Array) -> dict[str, Any]:
        loads = [np.ones(shape if own else shape[1:], int), *(_weights(rng, shape, own) for _ in range(count - 1))]
        limits = [_limits(rng, (picked * np.minimum(x, 4)).sum(-1), True, "none")["capacity"] for x in loads]
        return {"weights": np.stack(loads), "capacities": np.stack(limits)}

    return draw


#: A later constraint joins by a row. "options" in a name: theta is (batch, groups, options).
KINDS: dict[str, Kind] = {
    "knapsack": Kind(kg.Knapsack, _knapsack("none", own=False)),
    "knapsack, own weights": Kind(kg.Knapsack, _knapsack("none", own=True)),
    "knapsack, max_capacity": Kind(kg.Knapsack, _knapsack("none", own=True, bounded=True)),
    "knapsack, at least": Kind(kg.Knapsack, _knapsack("some", own=False)),
    "knapsack, at least, own weights": Kind(kg.Knapsack, _knapsack("some", own=True)),
    "knapsack, exactly": Kind(kg.Knapsack, _knapsack("all", own=False)),
    "top-k": Kind(kg.TopK, _top_k(least=False, own=False)),
    "top-k, own k": Kind(kg.TopK, _top_k(least=False, own=True)),
    "top-k, at least": Kind(kg.TopK, _top_k(least=True, own=True)),
    "two budgets": Kind(kg.MultiKnapsack, _budgets(2, own=False)),
    "two budgets, own weights": Kind(kg.MultiKnapsack, _budgets(2, own=True)),
    "three budgets": Kind(kg.MultiKnapsack, _budgets(3, own=False)),
    "options": Kind(kg.MultipleChoice, _options("none", own=False, optional=False)),
    "options, own weights": Kind(kg.MultipleChoice, _options("none", own=True, optional=False)),
    "options, at most one": Kind(kg.MultipleChoice, _options("none", own=False, optional=True)),
    "options, at least": Kind(kg.MultipleChoice, _options("some", own=True, optional=False)),
    "options, at most one, exactly": Kind(kg.MultipleChoice, _options("all", own=False, optional=True)),
}
#: (groups, options) of JAX, which compiles for each shape; items have the first number
JAX_SHAPES = [(1, 1), (3, 4), (5, 3), (12, 2)]
JAX_BATCHES = [1, 17, 4000]


def rows(x: Array) -> Array:
    """(batch, *event) as (batch, n), also of an empty batch."""
    return x.reshape(len(x), prod(x.shape[1:]))


def rounded(values: Array, dtype: str) -> Array:
    if dtype == "bfloat16":
        import torch

        return torch.from_numpy(np.asarray(values)).bfloat16().double().numpy()
    return np.asarray(values, dtype).astype(float)


def draw(
    rng: np.random.Generator,
    backend: str,
    largest_batch: int = 2500,
    kinds: Sequence[str] = (),
    few_kernels: bool = False,
) -> Case:
    """A random case. With few kernels, for options and budgets in less than float64 the regularizer is Gini."""
    is_jax = backend == "jax"
    kind = rng.choice(kinds or list(KINDS))
    groups = int(rng.integers(0, 8)) if rng.random() < 0.9 else int(rng.integers(8, 30))
    event: tuple[int, ...] = (groups, int(rng.integers(1, 6))) if "options" in kind else (groups,)
    batch = int(rng.choice([0, 1, 3, 17, 64, largest_batch], p=[0.02, 0.05, 0.05, 0.08, 0.2, 0.6]))
    batch = batch if groups < 8 else min(batch, 64)
    if "budgets" in kind:  # whose tables are large
        groups, batch = min(groups, 4 if "three" in kind else 7), min(batch, 200)
        event = (groups,)
    if is_jax:
        event = JAX_SHAPES[rng.integers(len(JAX_SHAPES))][: 2 if "options" in kind else 1]
        if "budgets" in kind:
            event = JAX_SHAPES[rng.integers(2)][:1]
        groups = event[0]
        batch = min(int(rng.choice(JAX_BATCHES, p=[0.1, 0.1, 0.8])), largest_batch, 17 if "budgets" in kind else 4000)
    shape, seed = (batch, *event), int(rng.integers(2**31))
    content = str(rng.choice(list(CONTENTS), p=np.array(list(CONTENTS.values())) / sum(CONTENTS.values())))
    dtype, regularizer = str(rng.choice(DTYPES[backend])), str(rng.choice(list(REGULARIZERS)))
    if few_kernels and dtype != "float64" and ("options" in kind or "budgets" in kind):
        regularizer = "gini"
    if "options" in kind:  # a feasible selection
        picked = np.eye(event[1], dtype=int)[rng.integers(0, event[1], shape[:2])]
    else:
        picked = rng.integers(0, 2, shape)
    arguments = KINDS[kind].draw(rng, shape, picked)
    if is_jax and "capacities" in arguments:  # one width of the tables for all
        arguments["max_capacities"] = [groups + 4, *[4 * groups + 4] * (len(arguments["weights"]) - 1)]
    elif is_jax and "k" not in arguments:
        arguments["max_capacity"] = 6 * groups + 4
    own_gamma = rng.random() < 0.5
    gamma = 10.0 ** rng.uniform(-1, 1, batch if own_gamma else ())
    size = 1.0
    if content == "large":
        size = float(10.0 ** rng.uniform(1, 4))
    if content == "extremes" and dtype in ("float32", "float64"):
        gamma, size = 10.0 ** rng.uniform(-8, 8, np.shape(gamma)), float(10.0 ** rng.uniform(-12, 12))
    gamma = np.asarray(gamma, np.float32).astype(float)  # the same number in every framework
    theta = rng.standard_normal(shape) * 1.5
    if content == "near ties":
        theta = np.round(theta * 2) / 2 + 1e-3 * rng.standard_normal(shape) * (rng.random(shape) < 0.5)
    theta *= size * gamma.reshape(-1, *[1] * len(event)) if content != "extremes" else size
    theta = rounded(np.clip(theta, -6e4, 6e4) if dtype == "float16" else theta, dtype)
    if content == "masks":
        shared = picked if np.ndim(arguments.get("capacity", arguments.get("k"))) else picked[:1]
        theta = np.where((shared == 0) & (rng.random(shape) < 0.3), -np.inf, theta)
    if content == "nan":
        theta = np.where(rng.random(shape) < 0.03, rng.choice([np.nan, np.inf], shape), theta)
    layout, threads = str(rng.choice(list(LAYOUTS))) if not is_jax else "plain", int(rng.integers(1, 3))
    gamma = gamma if own_gamma else float(gamma)
    return Case(str(kind), theta, arguments, gamma, regularizer, dtype, backend, content, layout, threads, seed)
