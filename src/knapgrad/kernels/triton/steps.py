"""One step, from the old row to the new one, and the numbers of one instance.

What a kernel is compiled for is written in capital letters, in all of these files. The problem:

    VALUE, PROB, DPROB  the functions of a regularizer
    SOURCE              what a tangent sweep follows; None where there is no tangent
    SLACK               whether an instance must use some of its capacity
    GAP                 whether a row may be constant between two parts of its band, which it is with SLACK only
    BOX                 of several budgets, how many digits of a state may have to borrow from the one before
                        (:func:`knapgrad.kernels.triton.plan.box_of`); 0 for one budget
    M                   how many items make one choice; 0 if each is picked or not
    GAMMAS              whether gamma is in memory, or a number that the host knows

What is wanted:

    RELAXED             y, after the value and the tangent
    BACKWARDS           the gradient of log-probabilities, or of a frontier, instead of themselves
    FRONTIER            values at all capacities, so that all states of the last row count
    DRAW                paths that follow random numbers; else they take the more probable branch
    HARDEN              the most probable path: first, the decisions of the table become 0 and 1
    WHOLE               the whole last row, and a way back that starts from a whole row (tiles of a segment)

Where it is:

    NARROW              rows are in registers, else in memory
    STORED              probabilities go to a table: there is a way back, or the table is kept
    KEEP                the table of each instance is kept; else those of a program take turns in one place
    FILLED              the table of each instance is given
    LATER               sums over a row are left in the table, as one term per thread, and are done together at the end
    CUT                 sums are cut at 1, beyond which rounding may carry [y]
    ADD                 sums are added to what is there

How it is cut up:

    BLOCK, TILE         how many capacities a program works on at a time
    LANES               how many paths a program follows at a time
    LOOPS               loops over the options of a choice; else these are unrolled
    GROUP, HALO         what tiles read ahead, and what they send (:mod:`knapgrad.kernels.triton.tiles`)
"""

import triton
import triton.language as tl

from knapgrad import lattice

if not hasattr(tl, "gather"):
    raise ImportError(f"Triton {triton.__version__} is too old, 3.3 is needed")

INFEASIBLE = tl.constexpr(lattice.INFEASIBLE)
FEASIBLE = tl.constexpr(lattice.FEASIBLE)
LARGEST = tl.constexpr(lattice.LARGEST)


@triton.jit
def decide(skip, pick, fits, VALUE: tl.constexpr, PROB: tl.constexpr, dtype: tl.constexpr):
    """[V] and [Q]."""
    advantage = pick - skip
    delta = advantage.to(dtype)
    V = tl.where(advantage > 0.0, pick, skip) + VALUE(delta).to(tl.float64)
    return tl.where(fits, V, skip), tl.where(fits, PROB(delta), 0.0)


@triton.jit
def follow(skip, pick, q, z, fits, DPROB: tl.constexpr, SOURCE: tl.constexpr):
    """[V'] and [Q']."""
    added, slope = SOURCE(q, z)
    change = pick - skip
    T = tl.where(fits, skip + q * change + added, skip)
    return T, tl.where(fits, DPROB(q) * (change + slope), 0.0)


@triton.jit
def score_of(theta, i, scale):
    """The score of item i, divided by gamma; -inf takes it out. Where the instance is NaN it may be anything."""
    score = tl.load(theta + i).to(tl.float64) * scale
    return tl.where(score == float("-inf"), INFEASIBLE, score)


@triton.jit
def taint_of(theta, n, scale, BLOCK: tl.constexpr):
    """NaN if a score is NaN, +inf or out of range, even that of an item that is too heavy, or if gamma is not valid;
    else 0."""
    taint = 0.0 * scale
    for start in range(0, n, BLOCK):
        i = start + tl.arange(0, BLOCK)
        given = tl.load(theta + i, i < n, 0.0).to(tl.float64)
        is_good = (given == float("-inf")) | (tl.abs(given * scale) <= LARGEST)
        taint += tl.sum(tl.where(is_good, 0.0, float("nan")).to(tl.float64))
    return taint


@triton.jit
def scale_of(gamma, scale, b, gamma_step, GAMMAS: tl.constexpr):
    """1 / gamma, of instance b if it is in memory."""
    if GAMMAS:
        strength = tl.load(gamma + b * gamma_step).to(tl.float64)
        return tl.where(strength > 0.0, 1.0 / strength, float("nan"))
    else:
        return scale


@triton.jit
def checked(value, capacity, theta, n, scale, BLOCK: tl.constexpr):
    """The value of an instance; NaN if it is infeasible, or its capacity is not valid, which is -1, or as taint_of."""
    is_wrong = (value < FEASIBLE) | (tl.load(capacity) < 0)
    return tl.where(is_wrong, float("nan"), value + taint_of(theta, n, scale, BLOCK))


@triton.jit
def weight_of(weights, i, C):
    """The weight, or C + 1 for an item that never fits, which has the same effect."""
    return tl.minimum(tl.load(weights + i), C + 1).to(tl.int32)


@triton.jit
def limits_of(
    weights, capacity, slack, reach, steps, dtype: tl.constexpr, FRONTIER: tl.constexpr,
    SLACK: tl.constexpr, BOX: tl.constexpr, M: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The capacity (0 if it is not valid, which is -1), the last prefix sum (the total weight), and how much of the
    capacity may stay unused. A prefix sum counts the heaviest option of each choice. Sums have 32 bits where one
    program works on a whole table of items: its cells are numbered in as many. A FRONTIER starts from all states, up
    to the last one, whatever the capacity."""
    C = tl.maximum(tl.load(capacity), 0).to(tl.int32)
    if FRONTIER:
        C = tl.zeros_like(C) + reach
    total = tl.zeros([], dtype)
    for start in range(0, steps, BLOCK):
        i = start + tl.arange(0, BLOCK)
        if M > 0:
            heaviest = tl.zeros([BLOCK], weights.dtype.element_ty)
            for o in range(M):
                heaviest = tl.maximum(heaviest, tl.load(weights + i * M + o, i < steps, 0))
        else:
            heaviest = tl.load(weights + i, i < steps, 0)
        total += tl.sum(tl.minimum(heaviest, C + 1).to(dtype))
    spare = C
    if SLACK:
        spare = tl.minimum(tl.maximum(tl.load(slack), -1), C).to(tl.int32)
    if BOX:
        total += C
    return C, total, spare


@triton.jit
def first_prefix(total, C, sides):
    """The prefix sum before the first item. With several budgets sums begin at the capacity, so that all of a row is
    live: it is constant nowhere, because the order of numbers is not that of boxes."""
    prefix = tl.zeros_like(total)
    if len(sides) > 0:
        prefix += C
    return prefix


@triton.jit
def start_row(row, end, first_cell, BLOCK: tl.constexpr):
    """0 in cells 0..end; at least the first cell is written."""
    tl.store(row, first_cell)
    for start in range(0, end + 1, BLOCK):
        c = start + tl.arange(0, BLOCK)
        tl.store(row + c, tl.zeros([BLOCK], row.dtype.element_ty), mask=c <= end)


# Several budgets: an item can be picked where no digit of the state has to borrow.


@triton.jit
def sides_of(inner, plane, BOX: tl.constexpr):
    """What :func:`can_pick` needs of a box: the divisors that give its digits, none for one budget."""
    if BOX == 0:
        return ()
    elif BOX == 1:
        return (divisor_of(inner),)
    else:
        return divisor_of(inner), divisor_of(plane)


@triton.jit
def divisor_of(d):
    """A number from 2 on, and what makes division by it a multiplication, exact for numbers below 2**31."""
    bits = tl.zeros([], tl.int32)
    for k in tl.static_range(31):
        bits += ((1 << k) < d).to(tl.int32)
    factor = ((tl.full([], 1, tl.int64) << (31 + bits)) + d - 1) // d
    return d, factor.to(tl.uint32), (bits - 1).to(tl.uint32)


@triton.jit
def remainder(c, divisor):
    d, factor, shift = divisor
    return c - (tl.umulhi(c.to(tl.uint32), factor) >> shift).to(tl.int32) * d


@triton.jit
def can_pick(c, w, sides):
    fits = c >= w
    if len(sides) > 0:
        fits = fits & (remainder(c, sides[0]) >= remainder(w, sides[0]))
    if len(sides) > 1:
        fits = fits & (remainder(c, sides[1]) >= remainder(w, sides[1]))
    return fits


# Which states of a row are live. From the knee to the slack a row is constant; above the top it is infeasible.


@triton.jit
def band_of(prefix, total, C, slack, SLACK: tl.constexpr):
    """The knee, the top and the bottom of the row after the items that weigh prefix."""
    filled = tl.minimum(prefix, C).to(tl.int32)
    low = tl.maximum(C - (total - prefix), 0).to(tl.int32)
    if SLACK:
        return tl.minimum(filled, slack), tl.minimum(filled + tl.maximum(slack, 0), C), low
    else:
        return filled, filled, low


@triton.jit
def settled(c, knee, slack, SLACK: tl.constexpr):
    """The state that stands for c."""
    if SLACK:
        return tl.where(c <= slack, tl.minimum(c, knee), c)
    else:
        return tl.minimum(c, knee)


@triton.jit
def is_live(c, knee, top, slack, GAP: tl.constexpr):
    """Whether a state stands for itself, in a row that is constant between two parts of its band, or in none."""
    if GAP:
        return (c <= knee) | ((c > slack) & (c <= top))
    else:
        return c <= top
