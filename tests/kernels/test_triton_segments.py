"""Rows of segments that are combined, against long sums: on a GPU if there is one, else in Triton's interpreter."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import test_triton
from test_triton import DEVICE, host, needs_gpu

from knapgrad.lattice import INFEASIBLE

torch = pytest.importorskip("torch")

from knapgrad.kernels.triton import segments  # noqa: E402
from knapgrad.kernels.triton.segments import Segments  # noqa: E402

pytestmark = [test_triton.pytestmark, pytest.mark.usefixtures("unwritten_memory_is_nan")]

#: of the value, of E, and of the tangent and D
CLOSE = {"float64": (1e-12, 1e-12, 1e-11), "float32": (1e-7, 2e-6, 1e-5)}
SHAPES = [(count, width) for count in (2, 4) for width in (7, 21, 40)] + [(8, 21)]  # segments and states
SHAPES += [(4, 300), (2, 2049)] if DEVICE == "cuda" else []


@pytest.fixture(autouse=True)
def several_blocks(monkeypatch):
    """Of every sum, and of every row, where they are interpreted."""
    small = {"JOINED": (8, 4), "JOINED_TO_ROOT": (1, 16), "SPLIT": (8, 4), "SPLIT_FROM_ROOT": (4, 1)}
    for name, sizes in small.items() if DEVICE == "cpu" else ():
        monkeypatch.setattr(segments, name, sizes)


class Problem:
    """A batch of 2, rows that cannot use little or much, and tangents that are no numbers there."""

    def __init__(self, count: int, width: int, dtype: str = "float64") -> None:
        rng = np.random.default_rng(count + width)
        tilt = np.array([800.0, -800.0])[:, None, None] / width  # beyond exp, and it cancels out of E
        self.V = rng.normal(size=(2, count, width)).cumsum(-1) / 2 + tilt * np.arange(width)
        self.T = rng.normal(size=self.V.shape).astype(dtype)
        self.goals = np.array([width - 1, width * 2 // 3], np.int32)
        c, most = np.arange(width), (width - 1) * 5 // 8
        self.is_out = (c > most) | ((c < width // 7) & (np.arange(count) == 1)[:, None]) | np.zeros((2, 1, 1), bool)
        self.V[self.is_out] = np.resize([INFEASIBLE, 2 * INFEASIBLE, INFEASIBLE + 1e290], self.is_out.sum())
        self.T[self.is_out] = np.resize([np.inf, np.nan, 3.0], self.is_out.sum())

    def combine(self, V: np.ndarray | None = None, has_tangent: bool = True) -> dict[str, np.ndarray]:
        V, T = self.V if V is None else V, torch.from_numpy(self.T).to(DEVICE)
        combined = Segments(*V.shape, T.dtype, has_tangent)
        goals = torch.from_numpy(self.goals).to(DEVICE)
        found = combined(torch.from_numpy(V).to(DEVICE), T if has_tangent else None, goals)
        assert all(found[name].dtype == T.dtype for name in found if name != "value")
        return {name: host(x) for name, x in found.items()}

    def rows(self, b: int) -> list[tuple[np.ndarray, np.ndarray]]:
        """V and T of every segment."""
        V, T = np.where(self.is_out[b], -np.inf, self.V[b]), np.where(self.is_out[b], 0.0, self.T[b])
        return list(zip(V.astype(np.longdouble), T.astype(np.longdouble)))

    def exact(self, b: int) -> dict[str, np.ndarray]:
        """Each segment against the join of all the others."""
        rows = self.rows(b)
        goal, width = self.goals[b], self.V.shape[-1]
        nothing = np.where(np.arange(width) == 0, 0.0, -np.inf).astype(np.longdouble), np.zeros(width, np.longdouble)
        V, T = nothing
        for row in rows:
            V, T = joined((V, T), row)
        E, D = np.zeros((2, len(rows), width), np.longdouble)
        for s, (v, t) in enumerate(rows):
            others = nothing
            for row in rows[:s] + rows[s + 1 :]:
                others = joined(others, row)
            rest, change = (x[goal::-1] for x in others)  # what is left for them
            E[s, : goal + 1] = np.exp(v[: goal + 1] + rest - V[goal])
            D[s] = E[s]
            D[s, : goal + 1] *= t[: goal + 1] + change - T[goal]
        return {"value": V[goal], "tangent": T[goal], "E": E, "D": D}


def joined(a: tuple[np.ndarray, np.ndarray], b: tuple[np.ndarray, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    (Va, Ta), (Vb, Tb) = a, b
    V, T = np.full_like(Va, -np.inf), np.zeros_like(Ta)
    for c in range(len(V)):
        x = Va[: c + 1] + Vb[c::-1]
        if (top := x.max()) > -np.inf:
            e = np.exp(x - top)
            V[c], T[c] = top + np.log(e.sum()), e @ (Ta[: c + 1] + Tb[c::-1]) / e.sum()
    return V, T


@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize("count, width", SHAPES)
def test_against_long_sums(count, width, dtype):
    problem = Problem(count, width, dtype)
    found, (of_value, of_E, of_D) = problem.combine(), CLOSE[dtype]
    for b in range(2):
        exact = problem.exact(b)
        assert np.isfinite(exact["value"])
        for name, close in ("value", of_value), ("E", of_E), ("tangent", of_D), ("D", of_D):
            np.testing.assert_allclose(found[name][b], exact[name].astype(float), rtol=0, atol=close, err_msg=name)
    for name in "ED":
        assert (found[name][problem.is_out] == 0.0).all()
    for name, x in problem.combine(has_tangent=False).items():
        np.testing.assert_allclose(x, found[name], rtol=0, atol=of_value)


@pytest.mark.parametrize("dtype", CLOSE)
def test_one_join(dtype):
    problem = Problem(4, 21, dtype)
    problem.V[1, 1] = 2 * INFEASIBLE
    problem.is_out[1, 1] = True
    V, T, goals = (torch.from_numpy(x).to(DEVICE) for x in (problem.V, problem.T, problem.goals))
    V_above, T_above = V.new_empty(2, 2, 21), V.new_empty(2, 2, 21)
    given = {"theta": T, "goals": goals, "goals_step": 1, "V": V, "T": T, "V_above": V_above, "T_above": T_above}
    Segments(*V.shape, T.dtype, True).joins[0](given)
    for b in range(2):
        rows = problem.rows(b)
        for pair in range(2):
            exact, tangent = joined(*rows[2 * pair : 2 * pair + 2])
            exact = np.where(exact == -np.inf, INFEASIBLE, exact).astype(float)
            np.testing.assert_allclose(host(V_above)[b, pair], exact, rtol=0, atol=CLOSE[dtype][0])
            np.testing.assert_allclose(host(T_above)[b, pair], tangent.astype(float), rtol=0, atol=CLOSE[dtype][2])


@pytest.mark.parametrize("count", [2, 4])
def test_against_differences(count):
    problem, step = Problem(count, 9), 1e-6
    problem.T = np.where(problem.is_out, 0.0, problem.T)
    found = problem.combine()
    up, down = (problem.combine(problem.V + sign * step * problem.T) for sign in (1, -1))
    for name, derivative in ("value", "tangent"), ("E", "D"):
        np.testing.assert_allclose((up[name] - down[name]) / (2 * step), found[derivative], atol=1e-6)
    for s, i in [(0, 2), (count - 1, 5), (count // 2, 3)]:
        moved = np.zeros_like(problem.V)
        moved[:, s, i] = step
        up, down = (problem.combine(problem.V + sign * moved, has_tangent=False) for sign in (1, -1))
        np.testing.assert_allclose((up["value"] - down["value"]) / (2 * step), found["E"][:, s, i], atol=1e-6)


@pytest.mark.parametrize("count", [2, 4])
def test_large_tangents_cancel(count):
    """What grows with the state alone changes the tangent by as much, and D not at all."""
    problem = Problem(count, 21, "float32")
    problem.T = np.round(64 * problem.T) / 64  # sums with whole numbers are exact
    plain, (_, _, close) = problem.combine(), CLOSE["float32"]
    problem.T += 512 * np.arange(21, dtype=np.float32)
    found = problem.combine()
    np.testing.assert_allclose(found["D"], plain["D"], rtol=0, atol=close)
    np.testing.assert_allclose(found["tangent"], plain["tangent"] + 512 * problem.goals, rtol=1e-6)


@pytest.mark.parametrize("count", [2, 4])
def test_one_goal_for_all(count):
    problem = Problem(count, 11)
    problem.goals[:] = 8
    each = problem.combine()
    problem.goals = problem.goals[:1].copy()
    for name, x in problem.combine().items():
        np.testing.assert_array_equal(x, each[name])


def spoilt(count: int, where: str) -> Problem:
    """The second instance."""
    problem = Problem(count, 11)
    problem.goals[:] = 6
    if where == "an infeasible goal":
        problem.V[1, :, 1:] = INFEASIBLE
    elif where == "nothing is feasible":
        problem.V[1] = INFEASIBLE
    else:
        cell = {"the first cell": (0, 0), "a cell beyond the goal": (-1, 10), "a row": (-1,)}[where]
        problem.V[(1, *cell)] = np.nan
    return problem


@pytest.mark.parametrize(
    "where", ["the first cell", "a cell beyond the goal", "a row", "an infeasible goal", "nothing is feasible"]
)
@pytest.mark.parametrize("count", [2, 4])
def test_a_broken_instance_is_nan_alone(count, where):
    clean, found = Problem(count, 11), spoilt(count, where).combine()
    clean.goals[:] = 6
    for name, x in clean.combine().items():
        assert np.isnan(found[name][1]).all(), name
        np.testing.assert_array_equal(found[name][0], x[0])


def test_a_tangent_that_is_nan_leaves_the_value():
    problem = Problem(4, 11)
    clean = problem.combine()
    problem.T[0, 2] = np.nan
    found = problem.combine()
    assert np.isnan(found["tangent"][0])
    for name in ("value", "E"):
        np.testing.assert_array_equal(found[name], clean[name])
    np.testing.assert_array_equal(found["D"][1], clean["D"][1])


@needs_gpu
def test_capture_in_a_cuda_graph_and_no_waiting():
    problem = Problem(8, 300, "float32")
    V, T, goals = (torch.from_numpy(x).to(DEVICE) for x in (problem.V, problem.T, problem.goals))
    combined = Segments(*V.shape, T.dtype, True)
    expected = combined(V, T, goals)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found: dict[str, Any] = combined(V, T, goals)
    graph.replay()
    for name, x in found.items():
        assert torch.equal(x, expected[name])
