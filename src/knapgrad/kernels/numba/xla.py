"""XLA's typed foreign function interface, read from compiled code.

XLA calls a handler with the address of a frame: words of 8 bytes that hold, or point to, arguments, results and
attributes. The positions below are those of ``xla/ffi/api/c_api.h``, version 0.3; later versions of 0 only add to the
end. (0.3 and 0.4 were compared.) A handler is asked for its version when it is registered, with a frame that says that
of XLA: :func:`answers_version`.
"""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, types  # type: ignore[attr-defined]
from numba.core import cgutils
from numba.extending import intrinsic

from knapgrad.kernels.numba.frames import pointer
from knapgrad.kernels.numba.variants import function, inline

MAJOR, MINOR = 0, 3

# A frame.
_EXTENSION, API, CONTEXT, _ARGUMENTS, _RESULTS, _ATTRIBUTES, _WORDS = 1, 2, 3, 9, 14, 20, 21
# An array argument or result, an attribute that is an array, and XLA's own functions.
_TYPE, _DATA, _RANK, _DIMENSIONS = 2, 3, 4, 5
_LENGTH, _ITEMS = 1, 2
_VERSION, _CREATE_ERROR, _SCHEDULE, _COUNT_THREADS = 4, 6, 17, 18
_METADATA = 1  # a kind of extension
_FLOAT64 = 12  # a type of array
RESOURCE_EXHAUSTED, FAILED_PRECONDITION = 8, 9  # kinds of errors

malloc = types.ExternalFunction("malloc", types.int64(types.int64))
free = types.ExternalFunction("free", types.void(types.int64))
sched_yield = types.ExternalFunction("sched_yield", types.int32())


@inline
def words(address, count):
    return carray(pointer(address), (count,), np.int64)


@function
def answers_version(frame):
    """Whether XLA only asks for the version of the handler. Without an answer, it refuses to register the handler."""
    extension = words(frame, _WORDS)[_EXTENSION]
    if extension == 0 or words(extension, 4)[1] & 0xFFFFFFFF != _METADATA:
        return False
    theirs = words(words(frame, _WORDS)[API], _VERSION + 1)[_VERSION]
    if theirs & 0xFFFFFFFF == MAJOR and theirs >> 32 >= MINOR:
        words(words(extension, 4)[3], 6)[3] = MINOR << 32 | MAJOR
    return True


@inline
def argument(frame, position):
    return words(words(words(frame, _WORDS)[_ARGUMENTS], position + 1)[position], 6)


@inline
def result(frame, position):
    return words(words(words(frame, _WORDS)[_RESULTS], position + 1)[position], 6)


@inline
def results(frame):
    """How many there are."""
    return words(frame, _WORDS)[_RESULTS - 2]


@inline
def attribute(frame, position):
    """An array of integers. Attributes are in the order of their names."""
    array = words(words(words(frame, _WORDS)[_ATTRIBUTES], position + 1)[position], 3)
    return words(array[_ITEMS], array[_LENGTH])


@inline
def item_size(array):
    return 8 if array[_TYPE] & 0xFFFFFFFF == _FLOAT64 else 4


@inline
def length(array):
    size = 1
    for dimension in words(array[_DIMENSIONS], array[_RANK]):
        size *= dimension
    return size


@inline
def last_dimension(array):
    return words(array[_DIMENSIONS], array[_RANK])[array[_RANK] - 1]


@inline
def data(array):
    return pointer(array[_DATA])


@intrinsic
def call(_: Any, address: Any, argument: Any) -> Any:
    """Calls a C function of one argument."""

    def emit(context, builder, signature, arguments):
        kind = ir.FunctionType(ir.IntType(64), [ir.IntType(64)])
        return builder.call(builder.inttoptr(arguments[0], kind.as_pointer()), [arguments[1]])

    return types.int64(types.int64, types.int64), emit


@intrinsic
def call_kernel(_: Any, address: Any, arguments: Any) -> Any:
    """Calls a function that Numba has compiled, which returns nothing; whether it raised no error. The arguments, a
    tuple, must be passed as those that it was compiled for; None stands for whatever has no size."""

    def emit(context, builder, signature, values):
        kinds = signature.args[1].types
        function = context.call_conv.get_function_type(types.none, kinds)
        places = [cgutils.alloca_once(builder, kind.pointee, zfill=True) for kind in function.args[:2]]
        given = context.get_arg_packer(kinds).as_arguments(builder, cgutils.unpack_tuple(builder, values[1]))
        status = builder.call(builder.inttoptr(values[0], function.as_pointer()), [*places, *given])
        return context.call_conv._get_return_status(builder, status, builder.load(places[1])).is_ok

    return types.boolean(types.int64, arguments), emit


@intrinsic
def add(_: Any, address: Any, number: Any) -> Any:
    """Adds to a word that other threads add to as well; returns what it was."""

    def emit(context, builder, signature, arguments):
        word = builder.inttoptr(arguments[0], ir.IntType(64).as_pointer())
        return builder.atomic_rmw("add", word, arguments[1], "seq_cst")

    return types.int64(types.int64, types.int64), emit


@intrinsic(prefer_literal=True)
def address_of(_: Any, name: Any) -> Any:
    """Of a symbol that ``llvmlite.binding.add_symbol`` has made known."""

    def emit(context, builder, signature, arguments):
        symbol = cgutils.get_or_insert_function(builder.module, ir.FunctionType(ir.VoidType(), []), name.literal_value)
        return builder.ptrtoint(symbol, ir.IntType(64))

    return types.int64(name), emit


@function
def ask(frame, what, first, second, third):
    """Calls a function of XLA's own with a struct of a few words; returns its result."""
    given = malloc(40)
    struct = words(given, 5)
    struct[0], struct[1], struct[2], struct[3], struct[4] = 40, 0, first, second, third
    status = call(words(words(frame, _WORDS)[API], what + 1)[what], given)
    free(given)
    return status


@function
def threads(frame):
    """How many XLA has for this computation."""
    place = malloc(8)
    words(place, 1)[0] = 1
    ask(frame, _COUNT_THREADS, words(frame, _WORDS)[CONTEXT], place, 0)
    count = words(place, 1)[0]
    free(place)
    return count


@inline
def schedule(frame, task, block):
    """Has one of XLA's threads call a task, perhaps much later; whether it will."""
    return ask(frame, _SCHEDULE, words(frame, _WORDS)[CONTEXT], task, block) == 0


@inline
def error(frame, position, kind):
    """What a handler returns in place of results. The message is an attribute that ends in 0."""
    array = words(words(words(frame, _WORDS)[_ATTRIBUTES], position + 1)[position], 3)
    return ask(frame, _CREATE_ERROR, array[_ITEMS], kind, 0)
