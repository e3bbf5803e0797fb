"""Regularizers and directions as Numba types, so that a kernel is compiled, and cached on disk, once for each.

A kernel takes a :class:`Variant` as an argument and calls ``smoothed``, ``prob``, ``dprob`` or ``source`` with it.
Numba finds the functions of that name in :mod:`knapgrad.regularizers` when it compiles. Items, choices among options
or a box of budgets is decided when it compiles as well, see :func:`by_kind`.
"""

import hashlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from numba import njit, types
from numba.extending import NativeValue, models, overload, register_model, typeof_impl, unbox

from knapgrad import lattice, regularizers
from knapgrad.kernels import operations
from knapgrad.kernels.numba import vector
from knapgrad.kernels.numba.private import cached

_NOT_CALLED = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}  # by Python or C: a tenth of the time to compile
_compiled: Any = njit  # its types leave these two out
inline = _compiled(forceinline=True, error_model="numpy", **_NOT_CALLED)
function = _compiled(nogil=True, error_model="numpy", **_NOT_CALLED)


def kernel(python: Callable[..., Any]) -> Any:
    """A function that Python calls, kept on disk."""
    return cached(_compiled(nogil=True, error_model="numpy", no_cfunc_wrapper=True)(python))


# Numba's cache on disk notices changes only in the file of a kernel. A hash of the other files in the name of a type
# makes it notice those too.
_FILES = [*sorted(Path(__file__).parent.glob("*.py")), *(Path(str(x.__file__)) for x in (lattice, operations))]
SOURCES = hashlib.sha256(b"".join(path.read_bytes() for path in _FILES)).hexdigest()[:16]


class Variant:
    """A choice that is made when a kernel is compiled: a regularizer, or what a tangent sweep follows."""

    def __init__(self, name: str, functions: dict[str, Callable[..., Any]]) -> None:
        code = [(f.__code__.co_code, f.__code__.co_consts, f.__code__.co_names) for f in functions.values()]
        self.numba_type = VariantType(name, hashlib.sha256(repr(code).encode()).hexdigest()[:16])
        self.numba_type.compiled = {key: inline(regularizers.rebind(f, vector)) for key, f in functions.items()}


class VariantType(types.Type):
    compiled: dict[str, Any]

    def __init__(self, variant: str, functions: str) -> None:
        self.variant = variant
        super().__init__(name=f"Variant({variant}, {functions}, {SOURCES})")


@register_model(VariantType)
class _VariantModel(models.OpaqueModel):
    pass


@unbox(VariantType)
def _unbox_variant(_type: Any, _object: Any, c: Any) -> NativeValue:
    return NativeValue(c.context.get_dummy_value())


@typeof_impl.register(Variant)
def _typeof_variant(variant: Variant, _context: Any) -> VariantType:
    return variant.numba_type


SOURCE_FILES = Variant("none", {})  # for a kernel that depends on them, and on no variant


@cache
def regularizer_of(name: str) -> Variant:
    return Variant(name, regularizers.functions(name))


@cache
def direction_of(name: str) -> Variant:
    return Variant(name, {"source": regularizers.DIRECTIONS[name]})


def smoothed(regularizer, delta):
    """What the smoothed maximum adds to the larger branch."""


def prob(regularizer, delta):
    """The probability of picking."""


def dprob(regularizer, q):
    """The derivative of prob."""


def slopes_in(regularizer, direction, R):
    """R, if derivatives of decisions are needed that those of rounded probabilities would not be; else None."""


@overload(slopes_in, inline="always")
def _slopes_in(regularizer, direction, R):
    if direction.variant == "linear" and regularizers.is_steep(regularizer.variant):
        return lambda regularizer, direction, R: R
    return lambda regularizer, direction, R: None


def source(direction, q, z):
    """Of a tangent sweep: what a decision adds to the tangent, and the derivative of that by its probability q."""


def _by_variant(function: Any, key: str) -> None:
    @overload(function)
    def choose(variant, *arguments):
        chosen = variant.compiled[key]
        return lambda variant, *arguments: chosen(*arguments)


_by_variant(smoothed, "value")
_by_variant(prob, "prob")
_by_variant(dprob, "dprob")
_by_variant(source, "source")


ITEMS, CHOICES, BOXES = range(3)
KINDS = "items", "choices", "boxes"


def kind_of(batch):
    """What the type of a :class:`~knapgrad.kernels.numba.bands.Batch` says: items, choices among options, or items in
    a box of several budgets."""
    has = [not isinstance(batch.types[batch.fields.index(name)], types.NoneType) for name in ("tree", "sides")]
    return CHOICES if has[0] else BOXES if has[1] else ITEMS


def by_kind(of_items, of_choices, of_boxes, is_inline=False):
    """A function whose first argument is a batch: one for each kind."""

    def chosen(batch, *arguments):
        """Never called by Python."""

    @overload(chosen, strict=False, jit_options={"error_model": "numpy", "forceinline": is_inline})
    def choose(batch, *arguments):
        return (of_items, of_choices, of_boxes)[kind_of(batch)].py_func

    return chosen
