"""The SIMD vector type by itself, and the regularizers written with it."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any

import numpy as np
import pytest
from numba import njit

from knapgrad import regularizers
from knapgrad.kernels.numba import vector
from knapgrad.kernels.numba.vector import (
    broadcast,
    cast,
    first_lane,
    item,
    lanes,
    load,
    set_item,
    store,
    total,
    where,
    zeros,
)
from oracles import LONG_IS_LONGER, mp

DTYPES = (np.float32, np.float64)

compiled = njit(error_model="numpy")


@pytest.fixture(params=DTYPES, ids=lambda dtype: dtype.__name__)
def dtype(request: pytest.FixtureRequest) -> type:
    return request.param


def width_of(dtype: type) -> int:
    return vector.BYTES // np.dtype(dtype).itemsize


def elementwise(function: Callable) -> Callable[[np.ndarray], np.ndarray]:
    """A function of one vector as a function of an array of any length."""

    @compiled
    def run(x, out):
        for p in range(0, x.size, lanes(x)):
            store(out, p, function(load(x, p, zeros(x))))

    def call(x: np.ndarray) -> np.ndarray:
        width = width_of(x.dtype)
        padded = np.concatenate([x, np.full(-x.size % width, x[-1], x.dtype)])
        out = np.empty_like(padded)
        run(padded, out)
        return out[: x.size]

    return call


EXP, EXP2, LOG, LOG1P = map(elementwise, (vector.exp, vector.exp2, vector.log, vector.log1p))
SQRT, ABS, RINT, NEGATIVE = map(elementwise, (vector.sqrt, vector.abs, vector.rint, compiled(lambda x: -x)))
MANTISSA, EXPONENT = map(elementwise, (vector.mantissa, vector.exponent))

SPECIAL = [0.0, -0.0, 1.0, -1.0, np.inf, -np.inf, np.nan, 1e-30, -3.5]


def values(dtype: type, size: int) -> np.ndarray:
    return np.random.default_rng(size).normal(size=size).astype(dtype)


# Memory.


@compiled
def _copy(source, begin, target, offset):
    store(target, offset, load(source, begin, zeros(source)))


@compiled
def _shape(x, out):
    out[0] = lanes(x)
    store(out, 1, zeros(x))


@pytest.mark.parametrize("begin", [0, 1, 5, 13])
@pytest.mark.parametrize("offset", [0, 1, 7])
def test_load_and_store_at_any_index(begin, offset, dtype):
    width = width_of(dtype)
    source, target = values(dtype, 3 * width), np.full(3 * width, np.nan, dtype)
    _copy(source, begin, target, offset)
    np.testing.assert_array_equal(target[offset : offset + width], source[begin : begin + width])
    assert np.isnan(target[:offset]).all()
    assert np.isnan(target[offset + width :]).all()


def test_lanes_and_zeros(dtype):
    out = np.full(1 + 2 * width_of(dtype), 7.0, dtype)
    _shape(out, out)
    assert out[0] == width_of(dtype)
    np.testing.assert_array_equal(out[1 : 1 + width_of(dtype)], 0.0)
    np.testing.assert_array_equal(out[1 + width_of(dtype) :], 7.0)


@compiled
def _spread(x, scalar, out):
    store(out, 0, broadcast(scalar, zeros(x)))


@pytest.mark.parametrize("scalar_type", DTYPES, ids=lambda dtype: dtype.__name__)
def test_broadcast_has_the_lanes_of_one_and_the_type_of_the_other(scalar_type, dtype):
    out = np.zeros(width_of(dtype), scalar_type)
    _spread(np.zeros(1, dtype), scalar_type(0.3), out)
    np.testing.assert_array_equal(out, scalar_type(0.3))


@compiled
def _cast(x, like, out):
    vector = load(x, 0, zeros(like))
    store(out, 0, cast(vector, load(out, 0, zeros(like))))


@pytest.mark.parametrize("source", DTYPES, ids=lambda dtype: dtype.__name__)
@pytest.mark.parametrize("target", DTYPES, ids=lambda dtype: dtype.__name__)
@pytest.mark.parametrize("lanes_of", DTYPES, ids=lambda dtype: dtype.__name__)
def test_cast_rounds_as_numpy_does(source, target, lanes_of):
    width = width_of(lanes_of)
    large = -1e300 if source is np.float64 else -1e30
    x = np.resize(np.array([1 / 3, large, np.inf, -np.inf, np.nan, 0.1], source), width)
    out = np.zeros(width, target)
    _cast(x, np.zeros(1, lanes_of), out)
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(out, x.astype(target))


@compiled
def _lanes_to_scalars(x):
    part = load(x, 0, zeros(x))
    return total(part), first_lane(part)


def test_total_and_first_lane(dtype):
    x = np.random.default_rng(0).integers(-1000, 1000, width_of(dtype)).astype(dtype)
    assert _lanes_to_scalars(x) == (x.sum(), x[0])
    x[3] = np.nan
    assert np.isnan(_lanes_to_scalars(x)[0])


# Arithmetic.


@compiled
def _arithmetic(a, b, scalar, out):
    like = zeros(a)
    x, y, width = load(a, 0, like), load(b, 0, like), lanes(a)
    store(out, 0 * width, x + y)
    store(out, 1 * width, x - y)
    store(out, 2 * width, x * y)
    store(out, 3 * width, x / y)
    store(out, 4 * width, x + scalar)
    store(out, 5 * width, scalar - y)
    store(out, 6 * width, x * scalar)
    store(out, 7 * width, scalar / y)
    store(out, 8 * width, where(x < y, x, y))
    store(out, 9 * width, where(x > y, x, scalar))
    store(out, 10 * width, where(x > 0.0, scalar, y))
    store(out, 11 * width, where(scalar < y, like, y))


@pytest.mark.parametrize("special", [False, True])
def test_arithmetic_comparison_and_where(special, dtype):
    width, scalar = width_of(dtype), 0.7
    a, b = values(dtype, width), values(dtype, width + 1)[:width]
    if special:
        a, b = np.resize(np.array(SPECIAL, dtype), width), np.resize(np.array(SPECIAL[::-1] + [0.0], dtype), width)
    out = np.empty(12 * width, dtype)
    _arithmetic(a, b, scalar, out)
    same = dtype(scalar)
    with np.errstate(all="ignore"):
        expected = [a + b, a - b, a * b, a / b, a + same, same - b, a * same, same / b]
    expected += [np.where(a < b, a, b), np.where(a > b, a, same), np.where(a > 0, same, b), np.where(same < b, 0, b)]
    np.testing.assert_array_equal(out.reshape(12, width), np.array(expected, dtype))


def test_sqrt_abs_rint_and_negation(dtype):
    x = np.concatenate([np.array(SPECIAL, dtype), values(dtype, 100), np.abs(values(dtype, 100)) * dtype(1e30)])
    with np.errstate(invalid="ignore"):
        np.testing.assert_array_equal(SQRT(x), np.sqrt(x))
    np.testing.assert_array_equal(ABS(x), np.abs(x))
    np.testing.assert_array_equal(RINT(x), np.rint(x))
    np.testing.assert_array_equal(NEGATIVE(x), -x)
    np.testing.assert_array_equal(np.signbit(ABS(x)[:6]), False)


# Transcendental functions.


def exactly(function: str, x: np.ndarray) -> np.ndarray:
    """In long double, or in 40 digits on machines that have none."""
    if LONG_IS_LONGER:
        return getattr(np, function)(x.astype(np.longdouble))
    return np.array([getattr(mp, function)(mp.mpf(float(t))) for t in x], dtype=object)


def error_in_ulp(result: np.ndarray, x: np.ndarray, function: str, least: float = 0.0) -> np.ndarray:
    """The error in units in the last place of the exact result, or of ``least`` where that is larger."""
    exact = exactly(function, x)
    unit = np.spacing(np.maximum(np.abs(exact.astype(result.dtype)), result.dtype.type(least)))
    return np.abs((result.astype(exact.dtype) - exact) / unit).astype(float)


def lowest(dtype: type) -> Any:
    """About the logarithm of the smallest normal number."""
    return dtype(np.log(float(np.finfo(dtype).tiny)))


def test_exp(dtype):
    grids = np.linspace(lowest(dtype), 1, 40001), np.linspace(-3, 1, 10001), -np.logspace(-40, 0, 2001)
    x = np.concatenate(grids).astype(dtype)
    x = x[np.exp(x) > 1.001 * np.finfo(dtype).tiny]
    assert len(x) > 50000
    assert error_in_ulp(EXP(x), x, "exp").max() <= 3.0


def test_exp_at_the_edges(dtype):
    tiny, end = np.finfo(dtype).tiny, lowest(dtype)
    x = np.array([0.0, -0.0, -tiny, end * dtype(1.0001), -1e4, -1e30, np.finfo(dtype).min, -np.inf], dtype)
    np.testing.assert_array_equal(EXP(x), np.array([1, 1, 1, 0, 0, 0, 0, 0], dtype))
    assert tiny <= EXP(np.array([end * dtype(0.9999)]))[0] <= 1.1 * tiny
    around = EXP(np.nextafter(end, np.array([-np.inf, end, 0], dtype)))
    assert np.isin(np.round(around / tiny, 3), [0.0, 1.0]).all()
    assert np.isnan(EXP(np.array([np.nan], dtype)))[0]


def test_exp_does_not_exceed_one_and_rises(dtype):
    x = np.linspace(-1e-5, 0, 5001).astype(dtype)
    y = EXP(x)
    assert y.max() <= 1.0
    assert (np.diff(y) >= -2 * np.finfo(dtype).eps).all()


def test_exp2_of_whole_numbers_is_exact(dtype):
    limits = np.finfo(dtype)
    x = np.arange(0, limits.minexp - 1, -1).astype(dtype)
    np.testing.assert_array_equal(EXP2(x), np.exp2(x))
    beyond = np.array([limits.minexp - 1, limits.minexp - 2, 2 * limits.minexp, -1e6, -1e30, -np.inf], dtype)
    np.testing.assert_array_equal(EXP2(beyond), 0.0)


def test_mantissa_and_exponent(dtype):
    limits = np.finfo(dtype)
    spread = np.exp(np.linspace(np.log(float(limits.tiny)), np.log(float(limits.max)), 5001)[1:-1])
    x = np.concatenate([spread, [limits.tiny, limits.max, 0.5, 1.0, 1.5, 2.0, np.nextafter(2.0, 0.0)]]).astype(dtype)
    half, power = np.frexp(x)
    np.testing.assert_array_equal(MANTISSA(x), 2 * half)
    np.testing.assert_array_equal(EXPONENT(x), power - 1)


def test_log1p(dtype):
    x = np.concatenate([np.linspace(0, 1, 40001), np.logspace(-35, 0, 20001)]).astype(dtype)
    x = x[x > 0]
    assert error_in_ulp(LOG1P(x), x, "log1p").max() <= 5.0


def test_log1p_at_the_edges(dtype):
    tiny = np.finfo(dtype).tiny
    np.testing.assert_array_equal(LOG1P(np.array([0.0, tiny, 1e-30], dtype)), np.array([0.0, tiny, 1e-30], dtype))
    assert LOG1P(np.array([1.0], dtype))[0] == pytest.approx(np.log(2), rel=3 * float(np.finfo(dtype).eps))
    assert np.isnan(LOG1P(np.array([np.nan], dtype)))[0]


def test_log(dtype):
    limits = np.finfo(dtype)
    x = np.concatenate(
        [
            np.linspace(1e-6, 1, 40001),
            np.linspace(1, 8, 10001),
            np.exp(np.linspace(np.log(float(limits.tiny)) + 1e-3, np.log(float(limits.max)) - 1e-3, 20001)),
            1 + np.linspace(-1e-3, 1e-3, 2001),
        ]
    ).astype(dtype)
    assert error_in_ulp(LOG(x), x, "log", least=1.0).max() <= 3.0


def test_log_at_the_edges(dtype):
    limits = np.finfo(dtype)
    x = np.array([limits.tiny, limits.eps, 0.5, 1 - limits.epsneg, 1, 1 + limits.eps, 2], dtype)
    assert error_in_ulp(LOG(x), x, "log", least=1.0).max() <= 3.0
    assert LOG(np.array([1.0], dtype))[0] == 0.0
    assert np.isnan(LOG(np.array([np.nan], dtype)))[0]


# The regularizers, rebound.

CLASSES = {**regularizers.REGULARIZERS, "hard": regularizers.Hard}
PARTS = ("value", "prob", "dprob")


def rebound(name: str, part: str) -> Callable[[np.ndarray], np.ndarray]:
    return elementwise(compiled(regularizers.rebind(getattr(CLASSES[name], part), vector)))


def grid(dtype: type, part: str) -> np.ndarray:
    """Differences of two branches or, for dprob, probabilities; the kinks and the ends are among them."""
    if part == "dprob":
        inside = np.concatenate([np.linspace(0, 1, 4001), np.logspace(-30, 0, 301), 1 - np.logspace(-7, 0, 301)])
        return np.concatenate([inside, [0.0, 0.5, 1.0, np.nan]]).astype(dtype)
    kinks = np.array([0.0, 1.0, 2.0], dtype)
    around = np.concatenate([kinks, np.nextafter(kinks, dtype(3)), np.nextafter(kinks, dtype(-3)), [1e30, np.inf]])
    dense = np.concatenate([np.linspace(0, 4, 4001), np.linspace(0, 100, 2001), np.logspace(-30, 30, 601), around])
    return np.concatenate([dense, -dense, [-0.0, np.nan]]).astype(dtype)


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("name", CLASSES)
def test_regularizers_in_vectors_are_those_in_numpy(name, part, dtype):
    x = grid(dtype, part)
    with np.errstate(all="ignore"):
        expected = getattr(CLASSES[name], part)(x)
    result = rebound(name, part)(x)
    assert expected.dtype == dtype
    assert np.isnan(result[-1])
    np.testing.assert_array_equal(np.isnan(result), np.isnan(expected))
    unit = np.finfo(dtype).eps
    np.testing.assert_allclose(result, expected, rtol=8 * unit, atol=4 * unit)


@pytest.mark.parametrize("part", ["value", "prob"])
@pytest.mark.parametrize("name", regularizers.REGULARIZERS)
def test_certain_decisions_are_exact(name, part, dtype):
    x = np.array([np.inf, 1e30, 1e5, 2.0, -2.0, -1e5, -1e30, -np.inf], dtype)
    certain = {"value": np.zeros(8), "prob": np.array([1.0] * 4 + [0.0] * 4)}[part]
    keep = np.abs(x) > 100 if name == "shannon" else np.full(8, True)
    np.testing.assert_array_equal(rebound(name, part)(x)[keep], certain[keep].astype(dtype))


def test_rebinding_keeps_the_code(dtype):
    function = regularizers.rebind(regularizers.Gini.prob, vector)
    assert isinstance(function, FunctionType)
    assert function.__code__ is regularizers.Gini.prob.__code__
    assert function.__globals__["xp"] is vector


def test_single_items_are_read_and_written(dtype):
    @compiled
    def reverse(x, out):
        for i in range(x.size):
            set_item(out, x.size - 1 - i, item(x, i))
        set_item(out, 0, 7)

    x, out = values(dtype, 9), np.full(9, np.nan, dtype)
    reverse(x, out)
    expected = x[::-1].copy()
    expected[0] = 7
    np.testing.assert_array_equal(out, expected)
