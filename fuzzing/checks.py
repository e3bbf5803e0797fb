"""What every operation must give on a case: an expression, which is also printed for a failure, and the truth."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

import knapgrad as kg
from fuzzing.cases import REGULARIZERS, Case, rounded, rows
from fuzzing.oracle import LONG

Array = np.ndarray
#: of selections, and of values relative to the scores; half precision is rounded once
ROUNDING = {"float64": 1e-9, "float32": 1e-5, "float16": 2.0**-11 + 1e-5, "bfloat16": 2.0**-8 + 1e-5}
_FEW = 128  # selections, which are enumerated
_MANY = 200  # instances, of which means are compared
_LIKELY = 1e-5  # a decision below it may be certain after rounding


@dataclass(frozen=True)
class Check:
    operation: str
    code: str  # an expression of theta, constraint, smoothing and the arrays in ``given``
    expected: Array  # (batch, ...)
    tolerance: Array | float  # (batch,) or a number
    given: dict[str, Array]  # (batch, ...)


@dataclass(frozen=True)
class Failure:
    case: Case
    check: Check
    instance: int
    found: Any


def checks(case: Case) -> Iterator[Check]:
    """All that can be checked on a case."""
    rng, truth, hard = np.random.default_rng(case.seed), case.truth(), case.truth(name="hard")
    batch, event = len(case.theta), tuple(range(1, case.theta.ndim))
    gamma, size, n = np.broadcast_to(case.gamma, batch), case.largest, max(case.theta.shape[1], 1)
    slip = 50 * n * np.finfo(float).eps * (size + 1)  # of a difference of two values, in units of gamma
    relaxed, scale = ROUNDING[case.dtype] + slip, gamma * n * (size + 2)
    valued = (ROUNDING[case.dtype] if case.dtype != "float64" else 1e-10) * scale
    broken = case.is_nan | (np.isneginf(truth.value))

    def spoiled(x: Array) -> Array:
        return np.where(broken.reshape(-1, *[1] * (x.ndim - 1)), np.nan, x.astype(LONG))

    def check(operation: str, code: str, expected: Array, tolerance: Any, **given: Array) -> Check:
        expected = spoiled(expected)
        if case.dtype == "float16" and "score(" not in code:
            at_the_end = (np.abs(expected) > 65504) & (np.abs(expected) < 65536)  # of the range: the last, or infinite
            tolerance = np.where(rows(at_the_end).any(-1), np.inf, tolerance) if expected.ndim else tolerance
            expected = np.where(np.abs(expected) > 65504, np.copysign(np.inf, expected), expected)
        return Check(operation, code, expected, tolerance, given)

    def whole(x: Array) -> Array:
        """Of options (batch, groups, options) as theta has them."""
        return x[..., x.shape[-1] - case.theta.shape[-1] :] if "options" in case.kind else x[..., 1]

    value, best, count = truth.value, hard.value, truth.scores.shape[2] ** truth.scores.shape[1]
    marginals = truth.marginals
    if count <= _FEW and batch:
        every, best = truth.enumerated(), hard.enumerated()["best"]
        if case.regularizer == "shannon":
            value = every["value"]
    yield check("value", "kg.value(theta, constraint, smoothing)", gamma * value, valued)
    yield check("relax", "kg.relax(theta, constraint, smoothing)", whole(marginals), relaxed)
    inside = "np.clip(relaxed := numbers(kg.relax(theta, constraint, smoothing)), 0, 1) - relaxed"
    yield check("relax in [0, 1]", inside, np.zeros(case.theta.shape), 0.0)
    yield check("solve", "score(kg.solve(theta, constraint))", best, 1e-12 * scale)
    hull = "numbers(constraint.contains(kg.solve(theta, constraint)))"
    yield Check("solve is feasible", hull, np.where(broken, 0.0, 1.0), 0.0, {})
    drawn = "kg.sample(theta, constraint, smoothing, num_samples=2, rng=rng)"
    yield Check(
        "sample is feasible",
        f"numbers(constraint.contains({drawn})).T",
        np.where(broken, 0, 1.0)[:, None] + np.zeros((1, 2)),
        0.0,
        {},
    )
    if batch >= _MANY and case.theta.size:
        drawn = drawn.replace("=2", "=4")
        yield Check("mean of samples", f"deviation({drawn})", np.zeros((1, 2)), 6.0, {})
    narrow = ROUNDING[case.dtype] if case.backend == "jax" or case.dtype != "float64" else 1e-8
    yield check("entropy", "kg.entropy(theta, constraint, smoothing)", truth.entropy, 10 * n * narrow + 100 * slip)
    target = whole(hard.marginals).astype(float)
    score = np.where(target == 0, 0, np.where(np.isfinite(case.theta), case.theta, 0) * target).sum(event)
    code = "kg.fenchel_young_loss(theta, array(y), constraint, smoothing)"
    yield check("fenchel_young_loss", code, gamma * value - score, 2 * valued, y=target)
    prior = np.where(np.isneginf(case.theta), -np.inf, _rounded(rng.standard_normal(case.theta.shape), gamma, case))
    code = "kg.divergence(theta, constraint, smoothing, prior=array(prior))"
    gap = np.where(whole(marginals) > 0, np.where(np.isfinite(case.theta), case.theta - prior, 0) * whole(marginals), 0)
    gap = gamma * (case.truth(prior).value - truth.value) + gap.sum(event)
    yield check("divergence", code, gap, 4 * valued + relaxed * scale, prior=prior)
    yield check("divergence is not negative", f"np.minimum(numbers({code}), 0)", np.zeros(batch), 0.0, prior=prior)
    yield from _of_paths(case, truth, check, rng, size, n, narrow)
    exactly = case.constraint.frontier_of(n).exactly
    if exactly is not None and batch:
        row = case.widest.truth(slack="none" if exactly else "all").frontier
        code = "kg.frontier(theta, constraint, smoothing)"
        yield check("frontier", code, gamma.reshape(-1, *[1] * (row.ndim - 1)) * row, valued)
    if case.backend != "numpy" and case.theta.size and case.content not in ("large", "extremes"):
        z = rng.standard_normal(case.theta.shape)
        expected, tolerance = _product(case, z, whole)
        yield check("VJP of relax", _VJP[case.backend], expected, tolerance, z=_rounded(z, np.ones(batch), case))


_VJP = {
    "torch": "torch.autograd.functional.vjp(lambda x: kg.relax(x, constraint, smoothing), theta, array(z))[1]",
    "jax": "jax.vjp(lambda x: kg.relax(x, constraint, smoothing), theta)[1](array(z))[0]",
}
_VJP["cuda"] = _VJP["torch"]


def _rounded(values: Array, gamma: Array, case: Case) -> Array:
    return rounded(values * gamma.reshape(-1, *[1] * (values.ndim - 1)), case.dtype)


def _product(case: Case, z: Array, whole: Callable[[Array], Array]) -> tuple[Array, Array]:
    """The derivative of the marginals by differences. Near a kink those of both sides are not the same."""
    batch = len(case.theta)
    step = LONG(1e-6 if case.dtype == "float64" else 1e-4)
    gamma = np.broadcast_to(case.gamma, batch).reshape(-1, *[1] * (z.ndim - 1))
    z = _rounded(z, np.ones(batch), case)
    at = [whole(case.truth(case.theta.astype(LONG) + k * step * gamma * z).marginals) for k in (-1, 0, 1)]
    product = (at[2] - at[0]) / (2 * step) / gamma
    bend = rows(np.abs(at[2] - 2 * at[1] + at[0])).max(-1) / step
    largest = rows(np.abs(product)).max(-1) + rows(np.abs(z)).max(-1) / gamma.reshape(batch)
    tolerance = {"float64": 1e-7, "float32": 1e-4}.get(case.dtype, 4 * ROUNDING[case.dtype]) * largest
    return product, tolerance + 2 * (bend / gamma.reshape(batch)).astype(float)


def _of_paths(case: Case, truth: Any, check: Any, rng: Any, size: Array, n: int, narrow: float) -> Iterator[Check]:
    """log_prob of selections that are likely and of any, contains, and the mode."""
    batch, groups, options = truth.scores.shape
    shares = truth.marginals.reshape(batch, groups, options)
    likely = np.where(
        rng.random((batch, groups)) < 0.3,
        rng.integers(0, options, (batch, groups)),
        shares.argmax(-1) if options else 0,
    )
    exact, least = truth.log_prob(likely)
    used = truth.total(likely, truth.weights)
    feasible = truth.within(truth.high - used)
    y = case.selections_of(likely)
    noise = (narrow if case.backend == "jax" else 1e-12) * (size * n + 1)
    tolerance = ROUNDING[case.dtype] * (1 + np.where(np.isinf(exact), 0, np.abs(exact))) + noise
    tolerance = tolerance + 10 * noise / np.maximum(least, _LIKELY**2).astype(float)
    tolerance = np.where(feasible & (least < _LIKELY), np.inf, tolerance)  # rounding may make it 0
    yield check("log_prob", "kg.log_prob(theta, array(y), constraint, smoothing)", exact, tolerance, y=y)
    yield Check("contains", "numbers(constraint.contains(array(y)))", feasible * 1.0, 0.0, {"y": y})
    soft = np.where(rng.random(y.shape) < 0.1, 0.5, y)
    hard = rows(soft == y).all(-1)
    yield Check("contains", "numbers(constraint.contains(array(y)))", (feasible & hard) * 1.0, 0.0, {"y": soft})
    if case.backend != "numpy" and batch and groups and options**groups <= _FEW and case.content != "extremes":
        most = truth.log_prob(np.broadcast_to(truth.selections, (options**groups, batch, groups)))[0].max(0)
        framework = "jax" if case.backend == "jax" else "torch"
        checked = "" if case.backend == "jax" else ", validate_args=False"
        mode = f"kg.{framework}.SubsetDistribution(theta, constraint, smoothing{checked}).mode"
        code = f"likelihood({mode})"
        yield check("mode", code, most, 20 * narrow * (1 + np.abs(most)) + 100 * noise)


def namespace(case: Case, given: dict[str, Array]) -> dict[str, Any]:
    """What the expressions of a case use."""
    event = tuple(range(1, case.theta.ndim))

    def numbers(x: Any) -> Array:
        if hasattr(x, "detach"):
            x = x.detach().double().cpu().numpy()
        return np.asarray(x).astype(float)

    def score(y: Any) -> Array:
        y = numbers(y)
        with np.errstate(invalid="ignore"):
            return np.where(y == 0, 0, case.theta * y).astype(LONG).sum(event)

    def likelihood(y: Any) -> Array:
        y = numbers(y)
        found = case.truth().log_prob(case.options_of(np.nan_to_num(y)))[0]
        return np.where(rows(np.isnan(y)).any(-1), np.nan, found)

    def deviation(samples: Any) -> Array:
        """From the mean, in standard deviations (1, 2): of what is likely, and of every other item."""
        truth, y = case.truth(), numbers(samples)
        mean = truth.marginals[..., -case.theta.shape[-1] :] if "options" in case.kind else truth.marginals[..., 1]
        away = rows((y - mean).astype(float)[:, ~case.is_nan].reshape(-1, *mean.shape[1:]))
        likely = np.tile(rows((mean - 0.5).astype(float)[~case.is_nan]), (len(y), 1))
        parts = [(away * direction).sum(-1) for direction in (likely, (-1.0) ** np.arange(away.shape[1]))]
        return np.array([[x.sum() / max(np.sqrt((x**2).sum()), 1e-6) for x in parts]])

    known = {"np": np, "deviation": deviation, "kg": kg, "numbers": numbers, "score": score, "likelihood": likelihood}
    known |= {"theta": case.array(), "array": case.array, "constraint": case.constraint, "smoothing": case.smoothing}
    known |= {"rng": case.seed, **given}
    if case.backend == "jax":
        import jax

        known |= {"jax": jax, "rng": jax.random.key(case.seed)}
    elif case.backend != "numpy":
        import torch

        known |= {"torch": torch, "rng": torch.Generator(case.array().device).manual_seed(case.seed)}
    return known


def evaluate(case: Case, check: Check) -> Array:
    known = namespace(case, check.given)
    return known["numbers"](eval(check.code, known))


def differs(found: Array, check: Check) -> Array:
    """Which instances (batch,) are wrong."""
    expected, batch = check.expected, len(check.expected)
    if found.shape != expected.shape:
        return np.ones(max(batch, 1), bool)
    tolerance = np.broadcast_to(check.tolerance, batch).reshape(-1, *[1] * (expected.ndim - 1))
    with np.errstate(invalid="ignore"):
        right = (found == expected) | (np.isnan(found) & np.isnan(expected)) | (np.abs(found - expected) <= tolerance)
        right |= np.isinf(tolerance) & ~np.isnan(found) & ~np.isnan(expected)
    return ~rows(right).all(-1)


def failures(case: Case, only: str | None = None) -> Iterator[tuple[str, Failure | None]]:
    """Every operation that was checked, with a failure if it failed."""
    if case.backend != "jax":
        with suppress(ImportError):
            import torch

            torch.set_num_threads(case.threads)
    with np.errstate(all="ignore"):
        for check in checks(case):
            if only is not None and check.operation != only:
                continue
            try:
                found = evaluate(case, check)
            except Exception as error:
                yield check.operation, Failure(case, check, 0, error)
                continue
            wrong = differs(found, check)
            first = int(wrong.argmax()) if wrong.any() else -1
            yield check.operation, Failure(case, check, first, found) if first >= 0 else None


def smallest(failure: Failure) -> Failure:
    """One instance with as few items, and as short numbers, as still fail."""

    def failing(case: Case) -> Failure | None:
        with suppress(Exception):
            for _, found in failures(case, only=failure.check.operation):
                if found is not None and isinstance(found.found, Exception) == isinstance(failure.found, Exception):
                    return found
        return None

    def candidates(case: Case) -> Iterator[Case]:
        if len(case.theta) > 1:
            yield case.one(best.instance)
            for b in range(min(len(case.theta), 20)):
                yield case.one(b)
            return
        for i in range(case.theta.shape[1]):
            yield case.without(i)
        for digits in (0, 1, 3):
            yield replace(case, theta=_rounded(np.round(case.theta, digits), np.ones(len(case.theta)), case))

    best, tried = failure, set[bytes]()
    while True:
        for case in candidates(best.case):
            key = case.theta.tobytes() + str(case.theta.shape).encode()
            found = None if key in tried else failing(case)
            tried.add(key)
            if found is not None:
                best = found
                break
        else:
            return best


def code_of(failure: Failure) -> str:
    """Python that fails as the case did; AssertionError if the result is wrong."""
    case, check, b = failure.case, failure.check, failure.instance
    tolerance = np.broadcast_to(check.tolerance, len(check.expected))[b] if len(check.expected) else 0.0
    given = "".join(f"{name} = {_text(x)}\n" for name, x in check.given.items())
    return f"""\
# {check.operation}: {case.kind}, {case.backend}, {case.dtype}, instance {b}
{setting_of(case)}
{given}found = numbers({check.code})
expected = {_text(np.asarray(check.expected, float))}
np.testing.assert_allclose(found[{b}:{b + 1}], expected[{b}:{b + 1}], rtol=0, atol={float(tolerance)!r})
"""


def setting_of(case: Case) -> str:
    """Python that makes what the expressions of a case use."""
    arguments = ", ".join(f"{name}={_text(x)}" for name, x in case.arguments.items())
    smoothing = f"kg.{REGULARIZERS[case.regularizer].__name__}({_text(case.gamma)})"
    return f"""\
import numpy as np, knapgrad as kg
from numpy import array as numpy_array, inf, nan
from fuzzing.cases import Case
from fuzzing.checks import namespace
constraint_arguments = dict({arguments})
case = Case({case.kind!r}, {_text(case.theta)}, constraint_arguments, {_text(case.gamma)}, {case.regularizer!r},
            {case.dtype!r}, {case.backend!r}, {case.content!r}, {case.layout!r}, seed={case.seed})
known = namespace(case, {{}})
theta, array, rng, numbers, score, likelihood, deviation = (
    known[name] for name in ("theta", "array", "rng", "numbers", "score", "likelihood", "deviation"))
torch, jax = known.get("torch"), known.get("jax")
constraint = kg.{type(case.constraint).__name__}(**constraint_arguments)
smoothing = {smoothing}"""


def _text(x: Any) -> str:
    if isinstance(x, np.ndarray):
        return f"numpy_array({x.tolist()})" if x.size else f"np.zeros({x.shape}, {x.dtype.name!r})"
    return repr(x.item() if hasattr(x, "item") else x)
