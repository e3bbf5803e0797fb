"""A SIMD vector type for Numba: 64 bytes of floats, one LLVM instruction per operation.

Numba leaves vectorisation to LLVM, which gives up on loops that call ``exp`` or that update a row in place.
Here a kernel says what it means: ``load`` a vector, compute on it with ordinary operators, ``store`` it. LLVM
splits a vector into whatever registers the machine has (AVX-512, AVX2, NEON), so the code is portable.

The module also stands in for NumPy as the ``xp`` of :mod:`knapgrad.regularizers`: it has ``exp``, ``log``, ``log1p``,
``sqrt``, ``abs`` and ``where``. NaN passes through all of them. The transcendental functions cover the ranges that the
regularizers need, to a few units in the last place; outside of them they are wrong, so keep them in this package.
"""

import math
import operator
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic, models, overload, register_model

BYTES = 64  # one AVX-512 register, one cache line


class Vector(types.Type):
    """The Numba type of ``lanes`` elements of one scalar type."""

    def __init__(self, element: types.Type, lanes: int) -> None:
        self.element = element
        self.lanes = lanes
        super().__init__(name=f"Vector({element}, {lanes})")


@register_model(Vector)
class VectorModel(models.PrimitiveModel):
    def __init__(self, manager: Any, vector: Vector) -> None:
        element = manager.lookup(vector.element).get_value_type()
        super().__init__(manager, vector, ir.VectorType(element, vector.lanes))


# Memory. Indices count elements, are never negative, and are not checked.


@intrinsic
def lanes(_, array):
    """How many elements of the array fill a vector: 16 for float32, 8 for float64."""
    count = BYTES * 8 // array.dtype.bitwidth
    return types.intp(array), lambda context, builder, signature, args: context.get_constant(types.intp, count)


@intrinsic
def zeros(_, array):
    """A vector of zeros of the array's type, as long as ``lanes`` says."""
    vector = Vector(array.dtype, BYTES * 8 // array.dtype.bitwidth)
    return vector(array), lambda context, builder, signature, args: _constant(_llvm(context, vector), 0.0)


def _pointer(context, builder, array_type, array, index, vector):
    data = context.make_array(array_type)(context, builder, array).data
    return builder.bitcast(builder.gep(data, [index], inbounds=True), _llvm(context, vector).as_pointer())


@intrinsic
def load(_, array, index, like):
    """``array[index : index + lanes]`` as a vector with the lanes of ``like``."""
    vector = Vector(array.dtype, like.lanes)

    def emit(context, builder, signature, args):
        value = builder.load(_pointer(context, builder, signature.args[0], args[0], args[1], vector))
        value.align = array.dtype.bitwidth // 8
        return value

    return vector(array, types.intp, like), emit


@intrinsic
def store(_, array, index, vector):
    """``array[index : index + lanes] = vector``."""

    def emit(context, builder, signature, args):
        target = _pointer(context, builder, signature.args[0], args[0], args[1], vector)
        builder.store(args[2], target).align = array.dtype.bitwidth // 8
        return context.get_dummy_value()

    return types.void(array, types.intp, vector), emit


@intrinsic
def item(_, array, index):
    """``array[index]`` of one dimension, without the test for a negative index that Numba adds."""

    def emit(context, builder, signature, args):
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        return builder.load(builder.gep(data, [args[1]], inbounds=True))

    return array.dtype(array, types.intp), emit


@intrinsic
def set_item(_, array, index, value):
    """``array[index] = value``, likewise."""

    def emit(context, builder, signature, args):
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        value = context.cast(builder, args[2], signature.args[2], array.dtype)
        builder.store(value, builder.gep(data, [args[1]], inbounds=True))
        return context.get_dummy_value()

    return types.void(array, types.intp, value), emit


@intrinsic
def broadcast(_, scalar, like):
    """The scalar in every lane, with the lanes of ``like`` and the scalar's own type."""
    vector = Vector(scalar, like.lanes)
    return vector(scalar, like), lambda context, builder, signature, args: _spread(
        context, builder, args[0], scalar, vector
    )


@intrinsic
def cast(_, value, like):
    """The vector in the element type of ``like``, another float type with as many lanes."""
    vector = Vector(like.element, value.lanes)

    def emit(context, builder, signature, args):
        if value.element.bitwidth == vector.element.bitwidth:
            return args[0]
        convert = builder.fptrunc if value.element.bitwidth > vector.element.bitwidth else builder.fpext
        return convert(args[0], _llvm(context, vector))

    return vector(value, like), emit


@intrinsic
def reciprocal(_, x):
    """1 / x, to a rounding or two: LLVM may take the processor's estimate and a step of Newton's."""

    def emit(context, builder, signature, args):
        return builder.fdiv(_constant(args[0].type, 1.0), args[0], flags=("arcp", "contract", "ninf"))

    return x(x), emit


@intrinsic
def total(_, vector):
    """The sum over the lanes, halving the vector at each step."""

    def emit(context, builder, signature, args):
        value, width = args[0], vector.lanes
        while width > 1:
            width //= 2
            low, high = (
                builder.shuffle_vector(value, value, ir.Constant(ir.VectorType(ir.IntType(32), width), list(part)))
                for part in (range(width), range(width, 2 * width))
            )
            value = builder.fadd(low, high)
        return builder.extract_element(value, ir.Constant(ir.IntType(32), 0))

    return vector.element(vector), emit


@intrinsic
def first_lane(_, vector):
    """The scalar in the first lane."""
    return vector.element(vector), lambda context, builder, signature, args: builder.extract_element(
        args[0], ir.Constant(ir.IntType(32), 0)
    )


# Arithmetic: a vector with a vector, or with a scalar that is first spread over the lanes.


def _llvm(context, vector):
    return context.get_value_type(vector)


def _constant(vector, value):
    return ir.Constant(vector, [ir.Constant(vector.element, value)] * vector.count)


def _spread(context, builder, value, value_type, vector):
    if isinstance(value_type, Vector):
        return value
    scalar = context.cast(builder, value, value_type, vector.element)
    single = builder.insert_element(ir.Constant(_llvm(context, vector), ir.Undefined), scalar, ir.IntType(32)(0))
    mask = ir.Constant(ir.VectorType(ir.IntType(32), vector.lanes), None)
    return builder.shuffle_vector(single, single, mask)


def _operator(function: Callable, build: Callable, comparison: bool = False) -> None:
    @intrinsic
    def instruction(_, a, b):
        vector = a if isinstance(a, Vector) else b
        result = Vector(types.boolean, vector.lanes) if comparison else vector

        def emit(context, builder, signature, args):
            x, y = (_spread(context, builder, *pair, vector) for pair in zip(args, signature.args))
            return build(builder, x, y)

        return result(a, b), emit

    @overload(function)
    def implementation(a, b):
        if isinstance(a, Vector) or isinstance(b, Vector):
            return lambda a, b: instruction(a, b)
        return None


# "contract" lets LLVM fuse a product into a sum; no other liberty, since infinities and NaN must behave.
_FUSE = ("contract",)
_operator(operator.add, lambda builder, x, y: builder.fadd(x, y, flags=_FUSE))
_operator(operator.sub, lambda builder, x, y: builder.fsub(x, y, flags=_FUSE))
_operator(operator.mul, lambda builder, x, y: builder.fmul(x, y, flags=_FUSE))
_operator(operator.truediv, lambda builder, x, y: builder.fdiv(x, y))
_operator(operator.lt, lambda builder, x, y: builder.fcmp_ordered("<", x, y), comparison=True)
_operator(operator.gt, lambda builder, x, y: builder.fcmp_ordered(">", x, y), comparison=True)


@intrinsic
def where(_, mask, a, b):
    """``a`` in the lanes where ``mask`` holds, else ``b``; one of the two may be a scalar."""
    vector = a if isinstance(a, Vector) else b

    def emit(context, builder, signature, args):
        x, y = (_spread(context, builder, *pair, vector) for pair in zip(args[1:], signature.args[1:]))
        return builder.select(args[0], x, y)

    return vector(mask, a, b), emit


# Functions of one vector. Each is written with the LLVM builder, so a kernel inlines it whole.


def _function(emit: Callable) -> Callable:
    @intrinsic
    def function(_, x):
        return x(x), lambda context, builder, signature, args: emit(builder, args[0])

    function.__doc__ = emit.__doc__
    return function


def _llvm_intrinsic(builder, name, x):
    suffix = f"v{x.type.count}{'f32' if _is_single(x) else 'f64'}"
    return builder.call(
        builder.module.declare_intrinsic(f"llvm.{name}.{suffix}", (), ir.FunctionType(x.type, [x.type])), [x]
    )


def _is_single(x):
    return isinstance(x.type.element, ir.FloatType)


def _polynomial(builder, x, coefficients):
    """By Estrin's scheme: pairs, then pairs of pairs, so that the chain of dependent instructions stays short."""
    terms = [_constant(x.type, coefficient) for coefficient in coefficients]
    while len(terms) > 1:
        if len(terms) % 2:
            terms.append(_constant(x.type, 0.0))
        terms = [
            builder.fadd(builder.fmul(high, x, flags=_FUSE), low, flags=_FUSE)
            for low, high in zip(terms[::2], terms[1::2])
        ]
        x = builder.fmul(x, x)
    return terms[0]


def _integers(x):
    return ir.VectorType(ir.IntType(32 if _is_single(x) else 64), x.type.count)


# Minimax polynomials: exp(r) on |r| <= log(2)/2, and 2 atanh(s)/s as a polynomial in s^2 on 0 <= s <= 1/3.
_EXP_SINGLE = (1.0, 1.000000037716214, 0.5000000047117757, 0.16666415514653277, 0.04166635289677516,
               0.008375126398153335, 0.0013941108433972674)  # fmt: skip
_EXP_DOUBLE = (1.0, 1.0, 0.5, 0.16666666666666702, 0.04166666666666669, 0.008333333333309528, 0.001388888888887189,
               0.000198412699092171, 2.4801587350110797e-05, 2.7557224958392624e-06, 2.7557251904174915e-07,
               2.5114869528657765e-08, 2.09215799649503e-09)  # fmt: skip
_ATANH_SINGLE = (2.000000007681759, 0.6666632164137777, 0.40024595230703747, 0.27965157745197267, 0.2815777836310908)
_ATANH_DOUBLE = (2.0, 0.6666666666666615, 0.4000000000018575, 0.28571428545454114, 0.22222224080747674,
                 0.18181740832504806, 0.1538661404230401, 0.13300374032674625, 0.12110168728069218, 0.0832450651186082,
                 0.17044163562781398)  # fmt: skip
# log(2) in two parts: the high one times a whole number below 2^20 (2^37 in float64) is exact.
LOG2_HIGH, LOG2_LOW = 0.693145751953125, 1.4286068203094172e-06


@_function
def _negative(builder, x):
    return builder.fneg(x)


@overload(operator.neg)
def _neg(x):
    if isinstance(x, Vector):
        return lambda x: _negative(x)
    return None


@_function
def abs(builder, x):
    """Absolute value."""
    return _llvm_intrinsic(builder, "fabs", x)


@_function
def sqrt(builder, x):
    """Square root."""
    return _llvm_intrinsic(builder, "sqrt", x)


@_function
def rint(builder, x):
    """The nearest whole number."""
    return _llvm_intrinsic(builder, "rint", x)


def _fields(x):
    """Of the floating-point format: the bits of the fraction, and the bias of the exponent."""
    return (23, 127) if _is_single(x) else (52, 1023)


def _power(builder, shifted):
    """2^k from a float whose low bits hold k + bias, as adding 1.5 * 2^(bits of the fraction) leaves them."""
    bits = builder.shl(builder.bitcast(shifted, _integers(shifted)), _constant(_integers(shifted), _fields(shifted)[0]))
    return builder.bitcast(bits, shifted.type)


@_function
def exp2(builder, x):
    """2^x of a whole number x <= 0; 0 where the result would not be a normal number."""
    fraction, bias = _fields(x)
    power = _power(builder, builder.fadd(x, _constant(x.type, 1.5 * 2.0**fraction + bias)))
    return builder.select(builder.fcmp_ordered(">", x, _constant(x.type, -float(bias))), power, _constant(x.type, 0.0))


@_function
def exp(builder, x):
    """Exponential of x <= 1; 0 where the result would not be a normal number."""
    fraction, bias = _fields(x)
    shifter = _constant(x.type, 1.5 * 2.0**fraction + bias)
    shifted = builder.fadd(builder.fmul(x, _constant(x.type, 1 / math.log(2))), shifter)  # rounds to a whole number
    whole = builder.fsub(shifted, shifter)
    r = builder.fsub(x, builder.fmul(whole, _constant(x.type, LOG2_HIGH), flags=_FUSE), flags=_FUSE)
    r = builder.fsub(r, builder.fmul(whole, _constant(x.type, LOG2_LOW), flags=_FUSE), flags=_FUSE)
    polynomial = _polynomial(builder, r, _EXP_SINGLE if _is_single(x) else _EXP_DOUBLE)
    result = builder.fmul(polynomial, _power(builder, shifted))
    vanishes = builder.fcmp_ordered("<", x, _constant(x.type, -(bias - 1) * math.log(2)))
    return builder.select(vanishes, _constant(x.type, 0.0), result)


def _mantissa(builder, x):
    fraction, bias = _fields(x)
    bits = builder.and_(builder.bitcast(x, _integers(x)), _constant(_integers(x), 2**fraction - 1))
    return builder.bitcast(builder.or_(bits, _constant(_integers(x), bias << fraction)), x.type)


def _exponent(builder, x):
    fraction, bias = _fields(x)
    bits = builder.lshr(builder.bitcast(x, _integers(x)), _constant(_integers(x), fraction))
    return builder.sitofp(builder.sub(bits, _constant(_integers(x), bias)), x.type)


def _log1p(builder, x):
    s = builder.fdiv(x, builder.fadd(x, _constant(x.type, 2.0)))
    square = builder.fmul(s, s)
    return builder.fmul(s, _polynomial(builder, square, _ATANH_SINGLE if _is_single(x) else _ATANH_DOUBLE))


@_function
def mantissa(builder, x):
    """The m of a positive normal number m 2^e with 1 <= m < 2."""
    return _mantissa(builder, x)


@_function
def exponent(builder, x):
    """The e of a positive normal number m 2^e with 1 <= m < 2."""
    return _exponent(builder, x)


@_function
def log1p(builder, x):
    """log(1 + x) of 0 <= x <= 1, as 2 atanh(x / (2 + x))."""
    return _log1p(builder, x)


@_function
def log(builder, x):
    """Logarithm of a positive normal number, absolute error below 3 units in the last place of its result or of 1."""
    part = _log1p(builder, builder.fsub(_mantissa(builder, x), _constant(x.type, 1.0)))
    result = builder.fadd(builder.fmul(_exponent(builder, x), _constant(x.type, math.log(2))), part)
    return builder.select(builder.fcmp_unordered("uno", x, x), x, result)
