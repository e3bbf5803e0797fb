"""How the kernels lay out a batch on a GPU, for torch and for JAX."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from knapgrad.lattice import moduli_of

LARGEST_ROW = 1 << 15  # capacities that one program works on
NARROW = 128  # capacities that fit into registers; four times as many where a batch is small
SCRATCH = 355 << 20, 2 << 30  # bytes of tables; up to the second for 8 programs per multiprocessor
UNROLLED = 16  # options of a choice, above which kernels loop over them
REGISTERS = 128  # per thread, for choices: more would leave fewer warps resident
ITEM_SCRATCH = 4 << 30  # the same, where many programs share a row
TILE, FAR_TILE = 32, 64  # capacities of a program in a pipeline; of picks that move further than the first
GROUP, FAR_GROUP = 8, 2  # items that it reads ahead: 16 are 10% faster, and take half a minute to compile
PIPELINED = 1, 5, 1024  # instances per multiprocessor, up to which a pipeline pays; tiles, and items, from which on
PIPELINED_FAR = 1 / 8, 64, 400, 2048  # the same for picks that move further than a tile, and the most tiles
SEGMENTED = 16, 1024  # tiles per multiprocessor, up to which items are cut into segments, and their least length


class Plan(NamedTuple):
    """How an instance is laid out, and by how many programs."""

    block: int
    warps: int
    width: int  # of a row in memory
    programs: int
    narrow: bool  # rows in registers
    later: bool  # sums over the threads of several warps at the end
    tables: int  # per program: 2 where a tangent is followed
    options: int = 0  # items that make one choice; 0 if each is picked or not

    @property
    def loops(self) -> bool:
        """Whether kernels loop over options."""
        return self.options > UNROLLED

    @property
    def settings(self) -> dict[str, int]:
        """What a kernel is compiled for, and how it is launched."""
        kind = {"M": self.options, "LOOPS": self.loops, "NARROW": self.narrow, "BLOCK": self.block}
        return {**kind, "num_warps": self.warps, **({"maxnreg": REGISTERS} if self.options else {})}

    def scratch(self, n: int) -> dict[str, tuple[int, int]]:
        """The shapes of its arrays: V_rows in float64, the others of theta's type."""
        rows = 2 if self.tables == 1 else 6
        nodes = self.options * self.block if self.loops else 0
        sizes = {"V_rows": 2 * self.width + nodes, "rows": rows * self.width + nodes}
        sizes["tables"] = self.tables * n * self.width
        return {name: (self.programs, size) for name, size in sizes.items()}


class Tiles(NamedTuple):
    """How a pipeline lays out a batch."""

    tile: int
    tiles: int
    halo: int  # cells of a tile that picks may bring to others
    group: int  # items that are read ahead
    instances: int  # at a time
    items: int  # at a time: all, or whole groups

    @property
    def width(self) -> int:
        """Cells of a row in memory."""
        return self.tile * self.tiles


@lru_cache(maxsize=1024)
def tiles(
    batch: int, n: int, reach: int, heaviest: int, tables: int, itemsize: int, multiprocessors: int
) -> Tiles | None:
    """The layout of a pipeline, where it is faster; else None."""
    is_far = heaviest > TILE
    tile, group, rule = (FAR_TILE, FAR_GROUP, PIPELINED_FAR) if is_far else (TILE, GROUP, (*PIPELINED, 1 << 31))
    instances, least, items, most = rule
    count = -(-(reach + 1) // tile)
    if batch > instances * multiprocessors or n < items or not least <= count <= most:
        return None
    halo = tile if is_far else power_of_2(heaviest)
    edges = count * halo * (8 + (2 * tables - 1) * itemsize)
    per_item = tables * count * tile * itemsize + edges
    instances = min(max(ITEM_SCRATCH // (per_item * n), 1), batch)
    groups = max(ITEM_SCRATCH // (per_item * instances * group), 1)
    return Tiles(tile, count, halo, group, instances, min(groups * group, n))


@lru_cache(maxsize=1024)
def segments(
    batch: int, n: int, reach: int, heaviest: int, tables: int, itemsize: int, multiprocessors: int
) -> tuple[int, Tiles] | None:
    """Into how many segments the items are cut, a power of 2, and a pipeline of them, where that is faster. (It was
    measured for picks that move by at most a tile.)"""
    most, least = SEGMENTED
    whole = tiles(batch, n, reach, heaviest, tables, itemsize, multiprocessors)
    if whole is None or heaviest > TILE:
        return None
    count = 1
    while batch * whole.tiles * 2 * count <= most * multiprocessors and n >= 2 * count * least:
        count *= 2
    length = -(-n // count)
    parts = tiles(batch * count, length, reach, heaviest, tables, itemsize, multiprocessors)
    if count == 1 or parts is None or (parts.instances, parts.items) != (batch * count, length):
        return None
    return count, parts


def is_shared(n: int, reach: int, size: int) -> bool:
    """Whether many programs share a row: the row is long, or the table has too many cells for 32-bit indices, or, at
    ``size`` bytes per cell, there is no room for one table per program."""
    width = whole_lines(reach + 1)
    is_large = reach >= LARGEST_ROW // 8 and n * width * size > SCRATCH[1] // 8
    return reach >= LARGEST_ROW or (n + 1) * width >= 2**31 or is_large


def box_of(box: tuple[int, ...]) -> dict[str, int]:
    """What kernels know of a box of budgets: how many digits of a state may have to borrow, and what these digits are
    remainders of. One of a budget of 0 never has."""
    moduli = sorted({modulus for modulus in moduli_of(box) if modulus > 1})
    return {"BOX": len(moduli), **dict(zip(("inner", "plane"), [*moduli, 1, 1]))}


def whole_lines(cells: int) -> int:
    return -(-cells // 32) * 32


def power_of_2(at_least: int) -> int:
    return 1 << max(at_least - 1, 0).bit_length()


@lru_cache(maxsize=1024)
def plan(batch: int, n: int, reach: int, tables: int, itemsize: int, multiprocessors: int, options: int = 0) -> Plan:
    """The layout of whole instances. On an H200 two dozen warps per multiprocessor are best, as long as the scratch is
    not too large."""
    if options:
        return _plan_of_choices(batch, n, reach, tables, itemsize, multiprocessors, options)
    few = batch <= 2 * multiprocessors  # then the time of one instance matters, not how many there are
    narrow = reach < (4 * NARROW if few else NARROW) and not is_shared(n, reach, 0)
    width = max(power_of_2(reach + 1), 32) if narrow else whole_lines(reach + 1)
    usual, most = (room // max(tables * n * width * itemsize, 1) for room in SCRATCH)
    fit = max(usual, min(most, 8 * multiprocessors), 1)
    if narrow:
        block, warps = width, max(width // 64, 2 if few else 1)
    else:
        enough = power_of_2(-(-15 * multiprocessors // min(batch, fit)))
        warps = min(enough, max(power_of_2(width) // 128, 1), 32)
        block = 32 * warps * (2 if warps <= 2 else 1)
    programs = min(batch, multiprocessors * max(26 // warps, 1), fit)
    if narrow:
        programs = -(-batch // -(-batch // programs))  # as few as take no more turns
    return Plan(block, warps, width, programs, narrow, few and warps > 1, tables)


def _plan_of_choices(
    batch: int, n: int, reach: int, tables: int, itemsize: int, multiprocessors: int, options: int
) -> Plan:
    """The layout of choices. Rows are in memory, however short or long. There are as many programs in each turn, with
    as many warps as are resident."""
    width = whole_lines(reach + 1)
    table = max(tables * n * width * itemsize, 1)
    resident = (16 if options <= UNROLLED else 32) * multiprocessors  # warps, of 128 registers per thread or of 64
    fit = max(SCRATCH[0] // table, min(ITEM_SCRATCH // table, 8 * multiprocessors), 1)
    programs = -(-batch // -(-batch // min(batch, resident, fit)))
    warps = min(power_of_2(resident // programs + 1) // 2, max(power_of_2(width) // 64, 1), 16)
    later = warps > 1 and options <= UNROLLED and n * width < 2**31
    return Plan(32 * warps, warps, width, programs, False, later, tables, options)


def lanes(samples: int) -> int:
    """How many paths a program follows at a time."""
    return min(max(power_of_2(samples), 32), 128)
