"""Few instances of many items: sweeps over tiles of capacities (:mod:`knapgrad.kernels.triton.tiles`), planned and
launched, and under Shannon over segments of the items (:mod:`knapgrad.kernels.triton.segments`).

A fill, a collect and a sum are one launch each. Where the tables of a batch are too large, its instances take turns;
where even one is, it is filled again piece by piece from rows that were set aside.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from knapgrad.kernels.triton import plan, tiles, variants
from knapgrad.kernels.triton.batch import Batch, limits_of
from knapgrad.kernels.triton.launch import Launch
from knapgrad.kernels.triton.segments import Segments
from knapgrad.kernels.triton.ways import Tabled
from knapgrad.lattice import INFEASIBLE

_INTEGERS = {torch.float32: torch.int32, torch.float64: torch.int64}  # of as many bits
_SUMMED = 1024  # terms that a program adds up at a time


class Limits(NamedTuple):
    """What a pipeline knows about a constraint: integers, one row for all instances or one for each."""

    goals: Tensor  # (1 or batch,)
    slacks: Tensor  # the same
    moves: Tensor  # (1 or batch, n): weights, of which the ones that do not fit anywhere are goals + 1
    is_free: bool  # all of the capacity may stay unused, so rows are constant above all sums of weights
    box: dict[str, int]  # of several budgets, as plan.box_of
    whole: bool = False  # the way back starts from a row that is given, not from the goal

    @classmethod
    def of(cls, batch: Batch) -> Limits:
        goals, slacks = limits_of(batch)
        moves, constants = torch.minimum(batch.constants["weights"], goals[:, None] + 1), batch.constants
        box = {name: constants[name] for name in ("BOX", "inner", "plane")}
        return cls(goals, slacks, moves, not constants["SLACK"] and not constants["BOX"], box)

    def bands(self, layout: plan.Tiles) -> Tensor:
        """What the kernels know about live states, 32-bit integers (:mod:`knapgrad.kernels.triton.tiles`)."""
        n, device = self.moves.shape[1], self.moves.device
        prefix = pad(self.moves.cumsum(1), (1, 0))
        ends = torch.arange(0, n + layout.group, layout.group, device=device).clamp(max=n)  # of groups
        at, goal = prefix[:, ends], self.goals[:, None].long()
        tops = torch.minimum(at if self.is_free else at + self.slacks[:, None].clamp(min=0), goal)
        lows = (goal - (prefix[:, -1:] - at)).clamp(min=0)
        tops, lows = torch.broadcast_tensors(tops, torch.zeros_like(lows) if self.whole else lows)
        starts = layout.tile * torch.arange(layout.tiles, device=device).expand(len(tops), -1).contiguous()
        begin = torch.searchsorted(tops[:, 1:].contiguous(), starts)
        end = torch.searchsorted(lows[:, :-1].contiguous(), starts + layout.tile - 1, right=True)
        return torch.cat([tops, lows, begin, end], 1).int()


class Pipeline(Tabled):
    """Sweeps over flat batches of one shape.

    Args:
        theta: a batch of that shape and type; it is not kept.
        limits: of the constraint.
        regularizer: its name.
        layout: of the tiles.
        source: what a tangent sweep follows, or None.
    """

    def __init__(self, theta: Tensor, limits: Limits, regularizer: str, layout: plan.Tiles, source: str | None) -> None:
        self.layout, self.at_once = layout, layout.instances
        self.shape, self.dtype = theta.shape, theta.dtype
        self.bands = limits.bands(layout)
        limited = limits.goals, limits.slacks
        self.goals, self.slacks = (x.expand(len(self.bands)).int().contiguous() for x in limited)
        self.moves = limits.moves.int()
        self.count = 1 if source is None else 2  # of tables
        self.options = {
            "tiles": layout.tiles, "n": self.shape[1], "TILE": layout.tile, "HALO": layout.halo, "GROUP": layout.group,
            "SOURCE": variants.source(source), "SLACK": not limits.is_free, "WHOLE": limits.whole,
            "num_warps": 1, **limits.box, **variants.functions(regularizer),
        }  # fmt: skip
        self.launches: dict[tuple[Any, ...], tuple[Launch, list[str]]] = {}  # and what changes from call to call

    def sweep(self, theta: Tensor, z: Tensor, strength: dict[str, Any], relaxed: bool, keep: bool) -> dict[str, Tensor]:
        (size, n), step = self.shape, self.layout.instances
        found = {
            "value": theta.new_empty(size, dtype=torch.float64),
            "tangent": theta.new_empty(size),
            "y": torch.empty_like(theta),
            "tables": theta.new_empty(size, n * self.layout.width if keep else 0),
        }
        for k in range(0, size, step):
            Part(self, theta, z, strength, slice(k, min(k + step, size)), found, keep).sweep(relaxed)
        return found

    def tables(self, theta: Tensor, strength: dict[str, Any], part: slice) -> Tensor:
        part = slice(part.start, min(part.stop, len(theta)))
        found = {"value": theta.new_empty(len(theta), dtype=torch.float64), "tangent": theta, "y": theta}
        found["tables"] = theta.new_empty(len(theta), 0)
        whole = Part(self, theta, theta, strength, part, found, keep=True)
        whole.tables = theta.new_empty(whole.size, whole.n * self.layout.width)
        whole.sweep(relaxed=False)
        return whole.tables

    def launch(self, kernel: Any, programs: int, given: dict[str, Any], **options: Any) -> None:
        key = kernel.__name__, programs, *options.values()
        if key not in self.launches:
            every = self.options | options
            arguments = {name: x for name, x in every.items() if name in kernel.arg_names}
            names = [name for name in kernel.arg_names if name in given]
            self.launches[key] = Launch(kernel, programs, arguments, {"num_warps": every["num_warps"]}, {}), names
        launch, names = self.launches[key]
        launch({name: given[name] for name in names})


class Segmented(Tabled):
    """Sweeps of Shannon over flat batches of one shape, with the items of an instance cut into segments, which are
    instances of a pipeline side by side: for few instances, whose tables all fit.

    Args:
        batch: its constants are kept, its theta is not.
        segments: how many.
        layout: of the tiles of all of them.
        source: what a tangent sweep follows, or None.
    """

    def __init__(self, batch: Batch, segments: int, layout: plan.Tiles, source: str | None) -> None:
        self.shape, self.segments = batch.theta.shape, segments
        size, n = self.shape
        length = -(-n // segments)
        self.padding = 0, segments * length - n
        limits = Limits.of(batch)
        goals, moves = limits.goals.expand(size), limits.moves.expand(size, n)
        slacks = goals.new_zeros(size, segments)  # what stays unused is left by the first segment
        slacks[:, 0] = limits.slacks
        moves = pad(moves, self.padding).reshape(size * segments, length)
        goals = goals.repeat_interleave(segments)
        each = limits._replace(goals=goals, slacks=slacks.flatten(), moves=moves, is_free=False, whole=True)
        self.goals = limits.goals.int()
        self.pipeline = Pipeline(batch.theta.new_empty(moves.shape), each, batch.regularizer, layout, source)
        self.joined = Segments(size, segments, layout.width, batch.theta.dtype, source is not None)

    def sweep(self, theta: Tensor, z: Tensor, strength: dict[str, Any], relaxed: bool, keep: bool) -> dict[str, Tensor]:
        """Value, tangent, and y if RELAXED, for flat theta and z."""
        assert not keep, "tables of segments are not those of an instance"
        (size, n), shape, layout = self.shape, self.pipeline.shape, self.pipeline.layout
        is_tangent = self.pipeline.count > 1
        if self.padding[1]:
            theta, z = pad(theta, self.padding, value=-torch.inf), pad(z, self.padding)
        if "gamma" in strength and len(strength["gamma"]) > 1:
            strength = {"gamma": strength["gamma"].repeat_interleave(self.segments)}
        found = {"value": theta.new_empty(shape[0], dtype=torch.float64), "tangent": theta.new_empty(shape[0])}
        found |= {"y": theta.new_empty(shape), "tables": theta.new_empty(shape[0], 0)}
        all_of = slice(0, shape[0])
        part = Part(self.pipeline, theta.view(shape), z.view(shape), strength, all_of, found, keep=False)
        rows = shape[0], layout.width
        part.V_rows = theta.new_full((2, *rows), INFEASIBLE, dtype=torch.float64)  # tiles that never come in
        part.T_rows = theta.new_zeros(2, *rows) if is_tangent else theta
        if relaxed:
            part.prepare(theta, theta)
        there, *back = part.edges(0, 2 if relaxed else 1)
        part.fill(0, there, stored=relaxed)
        each = size, self.segments, layout.width
        T = part.T_rows[-1].view(each) if is_tangent else None
        joined = self.joined(part.V_rows[-1].view(each), T, self.goals)
        taint = found["value"].view(size, -1).sum(1)
        if relaxed:
            E, D = (x + taint[:, None, None].to(x.dtype) for x in (joined["E"], joined.get("D", joined["E"])))
            part.given |= {"E_row": E, "D_row": D}
            part.collect(0, back[0])
        tangent, y = joined.get("tangent", found["tangent"]), found["y"].view(size, -1)[:, :n].contiguous()
        return {"value": joined["value"] + taint, "tangent": tangent, "y": y}


class Part:
    """Some of the instances, and their scratch."""

    def __init__(
        self, pipeline: Pipeline, theta: Tensor, z: Tensor, strength: dict[str, Any], part: slice,
        found: dict[str, Tensor], keep: bool,
    ) -> None:  # fmt: skip
        self.pipeline, self.layout, self.keep = pipeline, pipeline.layout, keep
        self.size, self.n = part.stop - part.start, pipeline.shape[1]
        self.length = self.n if keep else min(self.layout.items, self.n)
        self.starts = range(0, self.n, self.length)
        goals, slacks, moves = pipeline.goals, pipeline.slacks, pipeline.moves
        limits_step, moves_step = int(len(goals) > 1), self.n if len(moves) > 1 else 0
        self.given: dict[str, Any] = {
            "theta": theta, "z": z, "moves": moves, "goals": goals, "slacks": slacks, "bands": pipeline.bands,
            "moves_step": moves_step, "limits_step": limits_step, "scale": 1.0, "gamma": theta, "gamma_step": 0,
            **found, **strength,
        }  # fmt: skip
        self.gammas = "gamma" in strength
        if self.gammas:
            self.given["gamma_step"] = int(len(strength["gamma"]) > 1)
        if self.size < len(theta):
            steps = {
                "moves": moves_step,
                "goals": limits_step,
                "slacks": limits_step,
                "bands": limits_step,
                "gamma": self.given["gamma_step"],
            }
            for name in ("theta", "z", *found, *(name for name, step in steps.items() if step)):
                self.given[name] = self.given[name][part]
        self.tables = self.given["tables"]

    def sweep(self, relaxed: bool) -> None:
        theta, layout, count = self.given["theta"], self.layout, self.pipeline.count
        ends = len(self.starts) + 1
        self.V_rows = theta.new_empty(ends, self.size, layout.width, dtype=torch.float64)
        self.T_rows = theta.new_empty(ends if count > 1 else 0, self.size, layout.width)
        if not relaxed:
            for k in range(len(self.starts)):
                self.fill(k, self.edges(k, 1)[0], stored=self.keep)
            return
        E_row = theta.new_empty(self.size, layout.width)
        self.prepare(E_row, torch.empty_like(E_row) if count > 1 else theta)
        for k in range(len(self.starts) - 1):
            self.fill(k, self.edges(k, 1)[0], stored=False)
        for k in reversed(range(len(self.starts))):
            there, back = self.edges(k, 2)
            self.fill(k, there, stored=True)
            self.collect(k, back)

    def prepare(self, E_row: Tensor, D_row: Tensor) -> None:
        """For the way back: tables, unless they are kept, and rows."""
        if not self.keep:
            count = self.pipeline.count * self.length
            self.tables = E_row.new_empty(self.size * count * self.layout.width)
        self.given |= {"E_row": E_row, "D_row": D_row, "tables": self.tables}
        self.given |= {"terms": torch.empty_like(self.tables) if self.keep else self.tables}

    def fill(self, k: int, edges: dict[str, Tensor], stored: bool) -> None:
        """The items from the k-th start on."""
        theta = self.given["theta"]
        given = self.given | edges | {"first": self.starts[k], "count": self.count(k)}
        given |= {"V_start": self.V_rows[k], "V_end": self.V_rows[k + 1], "T_start": theta, "T_end": theta}
        given["tables"] = self.tables if stored else theta
        if self.pipeline.count > 1:
            given |= {"T_start": self.T_rows[k], "T_end": self.T_rows[k + 1]}
        self.pipeline.launch(
            tiles.fill_tiles_kernel, self.size * self.layout.tiles, given, STORED=stored, GAMMAS=self.gammas
        )

    def collect(self, k: int, edges: dict[str, Tensor]) -> None:
        given = self.given | edges | {"first": self.starts[k], "count": self.count(k)}
        self.pipeline.launch(tiles.collect_tiles_kernel, self.size * self.layout.tiles, given)
        groups, columns = -(-self.count(k) // self.layout.group), _SUMMED // self.layout.group
        self.pipeline.launch(tiles.add_tiles_kernel, self.size * groups, given, BLOCK=columns, num_warps=4)

    def count(self, k: int) -> int:
        return min(self.length, self.n - self.starts[k])

    def edges(self, k: int, ways: int) -> list[dict[str, Tensor]]:
        """For the way there, and back: where nothing was sent yet, and the turn before the first. Every second one is
        for a tangent alone."""
        theta, layout = self.given["theta"], self.layout
        integer, of_tangent = _INTEGERS[theta.dtype], int(self.pipeline.count > 1)
        rows = -(-self.count(k) // layout.group) * layout.group
        cells, folds = self.size * rows * layout.tiles * layout.halo, self.size * layout.tiles
        there = [("turn", torch.int32, 1), ("V_edges", torch.int64, cells), ("T_edges", integer, cells * of_tangent)]
        back = [("turn", torch.int32, 1), ("E_edges", integer, cells), ("D_edges", integer, cells * of_tangent)]
        back += [("E_folds", integer, folds), ("D_folds", integer, folds * of_tangent)]
        lengths = [there, back][:ways]
        words = [-(-length * dtype.itemsize // 16) * 4 for way in lengths for _, dtype, length in way]
        memory = iter(torch.full((sum(words),), -1, dtype=torch.int32, device=theta.device).split(words))
        return [{name: next(memory).view(dtype) for name, dtype, _ in way} for way in lengths]
