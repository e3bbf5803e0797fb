"""Real costs in units: is a true limit ever broken, and what does rounding cost?

    python -m benchmarks.rounding --output benchmarks/results/rounding.json

Over 100,000 random instances, a unit per instance. Each is solved and filled at random, with and without a least
weight, and the true weights are summed in several orders. Weights that are decimals with a common unit are summed
exactly. The price of rounding is how far the optimum in optimistic units lies above that in safe ones, as a share of
the latter.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tqdm import tqdm

import knapgrad as kg
from measuring import origin

Constraint = kg.Knapsack | kg.MultipleChoice
BITS = np.array([2, 3, 4, 5, 6, 8, 12, 16])


class Family(NamedTuple):
    event: tuple[int, ...]  # (items,) or (groups, options)
    instances: int
    batch: int
    resolution: int | None = None
    priced: bool = False

    @property
    def name(self) -> str:
        return f"{self.event[0]} items" if len(self.event) == 1 else f"{self.event[0]} groups x {self.event[1]} options"


FAMILIES = (
    Family((10,), 60_000, 1000, 1000),
    Family((30,), 20_000, 1000),
    Family((100,), 5_000, 250, priced=True),
    Family((6, 4), 40_000, 1000, 1000),
    Family((20, 6), 10_000, 500, 2000),
    Family((100, 8), 2_000, 100, priced=True),
)
KINDS = ("uniform", "lognormal", "float32", "two decimals", "sizes in bits")


def draw(kind: str, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    """True weights (batch, *event)."""
    if kind == "lognormal":
        return rng.lognormal(size=shape)
    if kind == "float32":
        return rng.uniform(0, 1, shape).astype(np.float32)
    if kind == "two decimals":
        return rng.integers(1, 100, shape) / 100
    if kind == "sizes in bits":
        sizes = rng.integers(10**6, 10**9, (*shape[:2], 1)).astype(np.float64)
        return sizes * BITS[: shape[-1]] if len(shape) == 3 else sizes[..., 0] * rng.choice(BITS, shape)
    return rng.uniform(0, 1, shape)


def fill(constraint: Constraint, rng: np.random.Generator) -> np.ndarray:
    """A random selection per instance that fits, with no room for the options that were tried and not picked."""
    required = isinstance(constraint, kg.MultipleChoice) and not constraint.optional
    weights = constraint.weights[..., None] if isinstance(constraint, kg.Knapsack) else constraint.weights
    batch, groups, options = (len(constraint.capacity), *weights.shape[-2:])
    weights = np.broadcast_to(weights, (batch, groups, options))
    left, y, rows = constraint.capacity.copy(), np.zeros(weights.shape), np.arange(batch)
    for group in rng.permuted(np.tile(np.arange(groups), (batch, 1)), axis=1).T:
        option = rng.integers(0, options, batch)
        fits = weights[rows, group, option] <= left
        option = np.where(fits | (not required), option, weights[rows, group].argmin(-1))
        y[rows, group, option] = fits | required
        left -= weights[rows, group, option] * (fits | required)
    return y[..., 0] if isinstance(constraint, kg.Knapsack) else y


def broken(y: np.ndarray, weights: np.ndarray, capacity: np.ndarray, at_least: np.ndarray, exact: bool) -> np.ndarray:
    """How many selections are over the true capacity, and how many under the true least weight, in any order."""
    taken = (y * weights).reshape(len(y), -1).astype(weights.dtype)
    if exact:
        taken, capacity, at_least = (np.rint(100 * x).astype(np.int64) for x in (taken, capacity, at_least))
        sums = taken.sum(-1)[None]
    else:
        orders = [taken, taken[:, ::-1], np.sort(taken), np.sort(taken)[:, ::-1]]
        sums = np.array([x.sum(-1) for x in orders] + [x.cumsum(-1)[:, -1] for x in orders], np.float64)
        sums = np.concatenate([sums, [[math.fsum(x) for x in taken]]])
    return np.array([(sums > capacity).any(0).sum(), (sums < at_least).any(0).sum()])


def measure(family: Family, kind: str, batch: int, rng: np.random.Generator) -> dict[str, Any]:
    """One batch: how many limits were broken, and the prices of rounding."""
    weights = draw(kind, (batch, *family.event), rng)
    optional, share = bool(rng.integers(2)), rng.uniform(0.2, 0.8, batch)
    if len(family.event) == 1:
        capacity, arguments = share * weights.sum(-1, dtype=np.float64), {}
        make: Any = kg.Knapsack.from_real
    else:
        lightest, heaviest = (x.sum(-1, dtype=np.float64) for x in (weights.min(-1), weights.max(-1)))
        capacity, arguments = lightest + share * (heaviest - lightest), {"optional": optional}
        make = kg.MultipleChoice.from_real
    if kind == "two decimals":
        capacity = np.ceil(100 * capacity) / 100
    theta = np.sqrt(weights / weights.mean()) * rng.uniform(0.5, 1.5, weights.shape)
    axes, none = tuple(range(1, theta.ndim)), np.zeros(batch)

    constraint = make(weights, capacity, resolution=family.resolution, **arguments)
    filled, best = fill(constraint, rng), kg.solve(theta, constraint)
    counts = sum(broken(y, weights, capacity, none, constraint.exact) for y in (filled, best))
    least = 0.9 * (filled * weights).sum(axes, dtype=np.float64)
    if kind == "two decimals":
        least = np.floor(100 * least) / 100
    bounded = make(weights, capacity, at_least=least, resolution=family.resolution, **arguments)
    again = [filled, fill(bounded, rng), kg.solve(-theta, bounded)]
    accepted = [bounded.contains(y) for y in again]
    for y, inside in zip(again, accepted):
        limits = (x[inside] for x in (weights, capacity, least))
        counts = counts + broken(y[inside], *limits, bounded.exact)
    row = {"exact": constraint.exact, "selections": 2 * batch + sum(int(x.sum()) for x in accepted), "counts": counts}
    if family.priced and not constraint.exact:
        safe, bound = ((theta * kg.solve(theta, c)).sum(axes) for c in (constraint, constraint.optimistic))
        row["prices"] = (bound - safe) / safe
    return row


def summary(rows: list[dict[str, Any]], batch: int) -> dict[str, Any]:
    over, under = sum(row["counts"] for row in rows)
    result = {"instances": batch * len(rows), "exact": batch * sum(row["exact"] for row in rows)}
    result |= {"selections": sum(row["selections"] for row in rows)}
    result |= {"over_the_capacity": int(over), "under_the_least_weight": int(under)}
    prices = np.concatenate([row["prices"] for row in rows if "prices" in row] or [[]])
    if len(prices):
        low, median, high, largest = (round(float(x), 5) for x in np.quantile(prices, [0.25, 0.5, 0.75, 1.0]))
        result["price"] = {"instances": len(prices), "median": median, "q1": low, "q3": high, "max": largest}
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", type=float, default=1.0, help="of the instances (1.0)")
    parser.add_argument("--seed", type=int, default=0, help="of the instances (0)")
    parser.add_argument("--output", type=Path, help="a JSON file")
    options = parser.parse_args()
    command = [
        word for name, x in vars(options).items() if x != parser.get_default(name) for word in (f"--{name}", str(x))
    ]
    results: dict[str, Any] = {"environment": origin.environment(command, "benchmarks.rounding"), "families": {}}
    rng, start = np.random.default_rng(options.seed), time.perf_counter()
    for family in FAMILIES:
        rounds = max(round(options.part * family.instances / family.batch / len(KINDS)), 1)
        rows: dict[str, list[dict[str, Any]]] = {kind: [] for kind in KINDS}
        for kind in tqdm([*KINDS] * rounds, desc=family.name, unit="batch"):
            rows[kind].append(measure(family, kind, family.batch, rng))
        every = summary([row for found in rows.values() for row in found], family.batch)
        kinds = {kind: summary(found, family.batch) for kind, found in rows.items()}
        results["families"][family.name] = {**every, "resolution": family.resolution or "default", "kinds": kinds}
        print(f"{family.name}: " + ", ".join(f"{name} {x}" for name, x in every.items()))
    totals = ("instances", "exact", "selections", "over_the_capacity", "under_the_least_weight")
    results["total"] = {name: sum(found[name] for found in results["families"].values()) for name in totals}
    results["seconds"] = round(time.perf_counter() - start, 1)
    print("in all:", results["total"])
    if options.output:
        options.output.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
