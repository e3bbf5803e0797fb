"""What every operation takes, returns and needs: one row each, which everything that runs kernels reads.

An operation is a function of theta (*batch, n), a lattice and gamma, and of its extras. Arrays go by name, and the same
name means the same in every kernel.
"""

from __future__ import annotations

from typing import NamedTuple

# What an array has for each instance.
_NUMBER = {"value", "tangent", "log_prob"}
_PER_CAPACITY = {"row", "row_cotangent"}  # up to the reach; all others have a number per item


class Operation(NamedTuple):
    """A row of the table.

    Attributes:
        kernel: what computes it; operations may share a kernel. None: JAX has it, as a scan.
        extras: the arrays that it takes beside theta and gamma.
        results: the arrays that it returns.
        backwards: whether it sweeps back from the last step to the first, for numbers per item.
        direction: what its tangent sweep follows, of ``regularizers.DIRECTIONS``.
        is_sampled: whether extras begin with an axis of samples, and so do results but for a gradient.
        is_complete: whether it is of every capacity up to the reach; that of the lattice is not used.
        is_wide: whether kernels of the CPU compute it in float64, whatever theta's type.
        keeps: whether a table has all steps, or one at a time.
        rows, tables: scratch of theta's type for each group of instances.
        entries: numbers in a table per state; None: one, or of choices as many as options.
        time: as a multiple of that of value and relax.
        time_of_sample: nanoseconds per sample and item, beside that.
    """

    kernel: str | None
    extras: tuple[str, ...] = ()
    results: tuple[str, ...] = ("y",)
    backwards: bool = False
    direction: str | None = None
    is_sampled: bool = False
    is_complete: bool = False
    is_wide: bool = False
    keeps: bool = True
    rows: int = 2
    tables: int = 1
    entries: int | None = None
    time: float = 1.0
    time_of_sample: int = 0

    @property
    def axis(self) -> int:
        """Where the batch begins in extras and results."""
        return 1 if self.is_sampled else 0

    def shape_of(self, array: str, theta: tuple[int, ...], reach: int, samples: int = 0) -> tuple[int, ...]:
        """Of an extra or a result, for a theta of that shape.

        >>> OPERATIONS["sample"].shape_of("y", (5, 3), reach=2, samples=10)
        (10, 5, 3)
        """
        batch = (samples, *theta[:-1]) if self.is_sampled else theta[:-1]
        return batch if array in _NUMBER else (*batch, reach + 1 if array in _PER_CAPACITY else theta[-1])


def _follows(direction: str, time: float, results: tuple[str, ...], backwards: bool = True) -> Operation:
    """One that needs a tangent sweep."""
    extras = ("z",) if direction == "linear" else ()
    return Operation("tangent", extras, results, backwards, direction, rows=4, tables=2, time=time)


OPERATIONS = {
    "value": Operation("operator", results=("value",), keeps=False),
    "operator": Operation("operator", results=("value", "y"), backwards=True),
    "tabulate": Operation("operator", results=("value", "y", "tables"), backwards=True),
    "vjp": _follows("linear", 2.5, ("y",)),
    "entropy": _follows("entropy", 5.0, ("tangent",), backwards=False),
    "entropy_grad": _follows("entropy", 5.0, ("tangent", "y")),
    "sample": Operation("sample", ("uniforms",), is_sampled=True, time_of_sample=10),
    "solve": Operation("solve", entries=1),
    "mode": Operation("mode", time=2.0),
    "log_prob": Operation("log_prob", ("selections",), ("log_prob",), is_sampled=True, time_of_sample=10),
    "log_prob_vjp": Operation(
        "log_prob", ("selections", "cotangent"), backwards=True, is_sampled=True, time_of_sample=10
    ),
    "log_prob_jvp": Operation(None, ("selections", "z"), ("log_prob",), is_sampled=True),  # z is one sample
    "frontier": Operation("frontier", (), ("row",), keeps=False, is_complete=True, is_wide=True),
    "frontier_vjp": Operation("frontier", ("row_cotangent",), backwards=True, is_complete=True, is_wide=True),
    # of choices, without a regularizer
    "best_frontier": Operation("solve", (), ("row",), keeps=False, is_complete=True, is_wide=True, entries=1),
}  # fmt: skip
