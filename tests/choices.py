"""Problems of choices among options, see instances.py."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from hypothesis import strategies as st

import knapgrad as kg
import oracles
from instances import GAMMAS, INF, Problem, scores
from oracles import ChoiceTruth, Subset, truth


@dataclass(frozen=True)
class Choices(Problem):
    """theta is (*batch, groups, options)."""

    optional: bool = False

    event_dims: ClassVar[int] = 2

    @property
    def options(self) -> int:
        return self.theta.shape[-1]

    @property
    def decisions(self) -> int:
        return self.event[0] * int(np.ceil(np.log2(self.options + self.optional)))

    @property
    def constraint(self) -> kg.MultipleChoice:
        least = 0 if self.at_least is None else self.at_least
        return kg.MultipleChoice(self.weights, self.capacity, at_least=least, optional=self.optional)

    def truths(self, regularizer: str) -> list[ChoiceTruth]:
        kind = ChoiceTruth, self.options, self.optional
        return [truth(theta, w, limits, regularizer, g, *kind) for theta, w, limits, g in self.rows()]

    def has_form(self, y: np.ndarray) -> bool:
        picked = y.reshape(self.event).sum(-1)
        return super().has_form(y) and bool(((picked <= 1) if self.optional else (picked == 1)).all())

    def possible(self) -> list[Subset]:
        return oracles.choices(*self.event, self.optional)

    def selections(self) -> np.ndarray:
        """Of each group nothing, any of its options, or more than one."""
        picks = [np.zeros(self.options), *np.eye(self.options)]
        if self.options > 1:
            picks.append(np.arange(self.options) < 2)
        return self.repeated(np.array(list(itertools.product(picks, repeat=self.event[0]))))

    def columns(self, x: np.ndarray) -> np.ndarray:
        """With a score of 0 for no pick, which is an option."""
        if self.optional and self.options > 1:
            x = np.concatenate([np.zeros_like(x[..., :1]), x], -1)
        return x.reshape(self.size, x.shape[-2] * x.shape[-1])

    def order(self, draw: st.DrawFn) -> Any:
        groups, options = (np.array(draw(st.permutations(range(size))), dtype=int) for size in self.event)
        return ..., groups[:, None], options


@st.composite
def choice_problems(
    draw: st.DrawFn, with_least: bool, optional: bool, max_n: int = 9, masked: bool = True, one_shape: bool = False
) -> Choices:
    """Feasible ones."""
    batch = (3,) if one_shape else draw(st.sampled_from([(), (1,), (2,), (3,)]))
    size = int(np.prod(batch))
    groups, options = (3, 3) if one_shape else (draw(st.integers(1, 3)), draw(st.integers(1, 5)))
    if not one_shape and groups == 3:
        options = min(options, max_n // 3)  # few paths
    count = size * groups * options
    theta = np.array(draw(st.lists(scores(masked), min_size=count, max_size=count))).reshape(*batch, groups, options)
    gamma: Any = draw(GAMMAS)
    if one_shape or (batch and draw(st.booleans())):
        gamma = np.array([draw(GAMMAS) for _ in range(size)])
    shape = (*batch, groups, options) if one_shape else draw(st.sampled_from(_shapes(theta.shape)))
    count, heaviest = int(np.prod(shape)), 4 if one_shape else 5
    weights = np.array(draw(st.lists(st.integers(0, heaviest), min_size=count, max_size=count)), dtype=int)
    weights = weights.reshape(shape)
    if one_shape:  # the first instance has what fixes the width of the table, in an option that is masked
        weights[0, :, 0], weights[0, 0, -1], theta[0, 0, -1] = 0, 12, -INF
    loads = _loads(draw, theta, np.broadcast_to(weights, theta.shape), optional)
    capacity = loads + draw(st.integers(0, 6))
    least = loads - draw(st.integers(0, 2))
    if one_shape:
        capacity = np.minimum(capacity, 12)
        capacity[0] = 12
    elif draw(st.booleans()):
        capacity, least = capacity.max(), least.min()
    return Choices(theta, weights, capacity, gamma, np.maximum(least, 0) if with_least else None, optional)


def _shapes(shape: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Of weights: one for all groups, for all instances, or for each."""
    return [shape[-1:], shape[-2:], shape]


def _loads(draw: st.DrawFn, theta: np.ndarray, weights: np.ndarray, optional: bool) -> np.ndarray:
    """(*batch,): what some selection weighs. Where a required group has no option left, its first is there again."""
    loads = np.zeros(theta.shape[:-2], dtype=int)
    for b in np.ndindex(*loads.shape):
        for g, weights_of_group in enumerate(weights[b]):
            if not optional and np.isneginf(theta[b][g]).all():
                theta[b][g, 0] = 0.25
            left = weights_of_group[np.isfinite(theta[b][g])].tolist()
            loads[b] += draw(st.sampled_from([0, *left] if optional else left))
    return loads


_ONE = np.array([[0.375, -0.25, 0.75], [0.125, 1.0, -0.5], [0.25, 0.625, 0.0]])
_BATCH = np.stack([_ONE, _ONE[::-1] - 0.25, 0.5 * _ONE[:, ::-1]])
_WEIGHTS = np.array([[2, 1, 3], [0, 4, 1], [1, 2, 2]])
_OWN = np.stack([_WEIGHTS, _WEIGHTS[::-1], 5 - _WEIGHTS])
_MASKED = np.array([[0.375, -INF, 0.75], [-INF, 1.0, -INF], [0.25, 0.625, -INF]])

#: The name says what is special.
EDGES: dict[str, Choices] = {
    "no batch": Choices(_ONE, _WEIGHTS, 6),
    "no batch, optional": Choices(_ONE, _WEIGHTS, 4, optional=True),
    "one group": Choices(_BATCH[:, :1], [[2, 1, 3]], 2),
    "one group, optional": Choices(_BATCH[:, :1], [[2, 1, 3]], 2, optional=True),
    "one option": Choices(_BATCH[..., :1], [[2], [0], [1]], 3),
    "one option, optional": Choices(_BATCH[..., :1], [[2], [0], [1]], 2, optional=True),
    "two options": Choices(_BATCH[..., :2], _WEIGHTS[:, :2], 5),
    "one group of one option": Choices(np.array([[0.3]]), [[2]], 2),
    "one group of eight": Choices(0.3 * np.cos(np.arange(8.0))[None], [[3, 0, 1, 2, 4, 0, 6, 2]], 4),
    "one group of seven, optional": Choices(
        0.3 * np.cos(np.arange(7.0))[None], [3, 0, 1, 2, 4, 6, 2], 4, optional=True
    ),
    "no groups": Choices(np.zeros((2, 0, 3)), [2, 1, 3], 3),
    "no groups, weights of none": Choices(np.zeros((2, 0, 3)), np.zeros((0, 3), int), 3),
    "only the lightest fit": Choices(_BATCH, _WEIGHTS, 2),
    "capacity 0": Choices(_BATCH, [[0, 1, 0], [0, 0, 2], [3, 0, 0]], 0),
    "capacity 0, optional": Choices(_BATCH, _WEIGHTS, 0, optional=True),
    "all weigh nothing": Choices(_BATCH, np.zeros((3, 3), int), 3),
    "all weigh nothing, optional": Choices(_BATCH, np.zeros(3, int), 0, optional=True),
    "options heavier than the capacity": Choices(_BATCH, [[9, 1, 3], [0, 8, 1], [1, 7, 2]], 6),
    "options far heavier than the capacity": Choices(_BATCH, [[2**59, 1, 3], [0, 2**40, 1], [1, 7, 2]], 6),
    "all too heavy, optional": Choices(_BATCH, [9, 8, 7], 4, optional=True),
    "capacity above the total weight": Choices(_BATCH, _WEIGHTS, 100),
    "capacity far above the total weight": Choices(_BATCH, _WEIGHTS, 2**59, optional=True),
    "weights of all groups": Choices(_BATCH, [2, 1, 3], 6),
    "weights of all groups, optional": Choices(_BATCH, [2, 1, 3], 4, optional=True),
    "weights for each instance": Choices(_BATCH, _OWN, 7),
    "weights for each instance, optional": Choices(_BATCH, _OWN, 5, optional=True),
    "capacity for each instance": Choices(_BATCH, _WEIGHTS, np.array([2, 5, 100])),
    "everything for each instance": Choices(
        _BATCH, _OWN, np.array([3, 5, 9]), np.array([0.2, 1.0, 5.0]), np.array([3, 4, 0])
    ),
    "everything for each instance, optional": Choices(
        _BATCH, _OWN, np.array([3, 5, 9]), np.array([0.2, 1.0, 5.0]), np.array([0, 4, 5]), optional=True
    ),
    "at least": Choices(_BATCH, _WEIGHTS, 6, at_least=5),
    "at least, optional": Choices(_BATCH, _WEIGHTS, 6, at_least=3, optional=True),
    "exactly": Choices(_BATCH, _WEIGHTS, 6, at_least=6),
    "exactly, optional": Choices(_BATCH, _WEIGHTS, 5, at_least=5, optional=True),
    "at least, capacity above the total weight": Choices(_BATCH, _WEIGHTS, 100, at_least=9),
    "masked": Choices(np.stack([_MASKED, _MASKED + 0.5]), _WEIGHTS, 7),
    "masked, optional": Choices(np.stack([_MASKED, _MASKED + 0.5]), _WEIGHTS, 4, optional=True),
    "all masked, optional": Choices(np.full((2, 2, 3), -INF), [2, 1, 3], 4, optional=True),
    "masked to one option each": Choices(np.where(np.eye(3) > 0, _ONE, -INF), _WEIGHTS, 8),
    "exact ties": Choices(np.ones((2, 3, 3)), [1, 1, 1], 3),
    "on the thresholds": Choices(np.array([[[-1.0, 0.0], [0.0, 2.0]], [[1.0, 0.0], [2.0, 0.0]]]), [1, 1], 2),
    "batch of rank 2": Choices(np.stack([_BATCH, _BATCH[::-1] - 0.25]), _WEIGHTS, 6),
    "batch of rank 2, capacity along one axis": Choices(
        np.stack([_BATCH, _BATCH[::-1] - 0.25]), _OWN, np.array([[7], [8]]), optional=True
    ),
    "more instances than lanes": Choices(
        np.stack([_ONE + 0.1 * np.cos(i + np.arange(9.0)).reshape(3, 3) for i in range(11)]), _WEIGHTS, 6
    ),
    "empty batch": Choices(np.zeros((0, 2, 3)), [2, 1, 3], 4),
    "empty batch, all of it its own": Choices(np.zeros((0, 2, 3)), np.zeros((0, 2, 3), int), np.zeros(0, int)),
    "empty batch of rank 2, optional": Choices(np.zeros((3, 0, 2, 3)), [2, 1, 3], 4, optional=True),
}
