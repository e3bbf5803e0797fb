"""Long selections: sweeps over tiles of capacities (:mod:`knapgrad.kernels.triton.tiles`), planned and launched.

A fill, a collect and a sum are one launch each. Where the tables of a batch are too large, its instances take turns;
where even one is, it is filled again piece by piece from rows that were set aside.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from knapgrad.kernels.triton import choices, plan, tiles
from knapgrad.kernels.triton.launch import Launch

if TYPE_CHECKING:
    from knapgrad.kernels.triton.from_torch import Batch

_INTEGERS = {torch.float32: torch.int32, torch.float64: torch.int64}  # of as many bits
_SUMMED = 16, 128  # rows and columns that a program adds up at a time


def limits_of(batch: Batch) -> tuple[Tensor, Tensor]:
    """The state from which the way back starts, and how much of it may stay unused, as in steps.limits_of; one of each
    if all instances share them, else one per instance."""
    constants = batch.constants
    capacity = constants["capacity"].clamp(max=batch.reach)
    total = torch.minimum(constants["weights"], capacity[:, None] + 1).sum(-1)
    goal = torch.minimum(total, capacity)
    if not constants["SLACK"]:
        return goal, goal
    slack = torch.minimum((constants["slack"] - (constants["capacity"] - goal)).clamp(min=-1), goal)
    goal, slack = torch.broadcast_tensors(goal, slack)
    return goal.contiguous(), slack.contiguous()


class Pipeline:
    """Sweeps over flat batches of one shape.

    Args:
        batch: its constants are kept, its theta is not.
        layout: of the tiles.
        source: what a tangent sweep follows, or None.
    """

    def __init__(self, batch: Batch, layout: plan.Tiles, source: str | None) -> None:
        self.layout = layout
        self.shape, self.dtype = batch.theta.shape, batch.theta.dtype
        goals, slacks = limits_of(batch)
        moves = torch.minimum(batch.constants["weights"], goals[:, None] + 1)  # what is too heavy does not fit anywhere
        self.goals, self.slacks, self.moves = goals.int(), slacks.int(), moves.int()
        self.count = 1 if source is None else 2  # of tables
        self.options = {"tiles": layout.tiles, "n": self.shape[1], "TILE": layout.tile, "num_warps": 1}
        self.options |= {"HALO": layout.halo, "SOURCE": choices.source(source), "SLACK": batch.constants["SLACK"]}
        self.options |= choices.functions(batch.regularizer)
        self.launches: dict[tuple[Any, ...], tuple[Launch, list[str]]] = {}  # and what changes from call to call

    def sweep(self, theta: Tensor, z: Tensor, strength: dict[str, Any], relaxed: bool, keep: bool) -> dict[str, Tensor]:
        """Value, tangent, y if RELAXED, and the tables if they are kept, for flat theta and z."""
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
        """Of some of the instances."""
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
            "theta": theta, "z": z, "moves": moves, "goals": goals, "slacks": slacks, "moves_step": moves_step,
            "limits_step": limits_step, "scale": 1.0, "gamma": theta, "gamma_step": 0, **found, **strength,
        }  # fmt: skip
        self.gammas = "gamma" in strength
        if self.gammas:
            self.given["gamma_step"] = int(len(strength["gamma"]) > 1)
        if self.size < len(theta):
            steps = {
                "moves": moves_step,
                "goals": limits_step,
                "slacks": limits_step,
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
        if not self.keep:
            self.tables = theta.new_empty(self.size * count * self.length * layout.width)
        self.given |= {"E_row": theta.new_empty(self.size, layout.width), "tables": self.tables}
        self.given |= {"D_row": torch.empty_like(self.given["E_row"]) if count > 1 else theta}
        self.given |= {"terms": torch.empty_like(self.tables) if self.keep else self.tables}
        for k in range(len(self.starts) - 1):
            self.fill(k, self.edges(k, 1)[0], stored=False)
        for k in reversed(range(len(self.starts))):
            there, back = self.edges(k, 2)
            self.fill(k, there, stored=True)
            self.collect(k, back)

    def fill(self, k: int, edges: dict[str, Tensor], stored: bool) -> None:
        """The items from the k-th start on."""
        theta = self.given["theta"]
        given = self.given | edges | {"first": self.starts[k], "count": self.count(k)}
        given |= {"V_start": self.V_rows[k], "V_end": self.V_rows[k + 1], "T_start": theta, "T_end": theta}
        given["tables"] = self.tables if stored else theta
        if self.pipeline.count > 1:
            given |= {"T_start": self.T_rows[k], "T_end": self.T_rows[k + 1]}
        self.pipeline.launch(
            tiles.fill_tiles_kernel, self.size * self.layout.tiles, given, STORED=stored, GAMMAS=self.gammas,
            GROUP=plan.GROUPS[0],
        )  # fmt: skip

    def collect(self, k: int, edges: dict[str, Tensor]) -> None:
        count = self.count(k)
        given = self.given | edges | {"first": self.starts[k], "count": count, "rows": self.size * count}
        self.pipeline.launch(
            tiles.collect_tiles_kernel, self.size * self.layout.tiles, given, GROUP=plan.GROUPS[1]
        )  # fmt: skip
        rows, columns = _SUMMED
        self.pipeline.launch(
            tiles.add_tiles_kernel, -(-given["rows"] // rows), given, ROWS=rows, BLOCK=columns, num_warps=4
        )  # fmt: skip

    def count(self, k: int) -> int:
        return min(self.length, self.n - self.starts[k])

    def edges(self, k: int, ways: int) -> list[dict[str, Tensor]]:
        """For the way there, and back: where nothing was sent yet, and the turn before the first. The second edges of
        a way are for a tangent alone."""
        theta, is_tangent = self.given["theta"], self.pipeline.count > 1
        cells = self.size * (self.count(k) + max(plan.GROUPS)) * self.layout.tiles * self.layout.halo  # of whole groups
        integer = _INTEGERS[theta.dtype]
        lengths: list[tuple[str, torch.dtype, int]] = []
        for first, second, dtype in (("V_edges", "T_edges", torch.int64), ("E_edges", "D_edges", integer))[:ways]:
            lengths += [("turn", torch.int32, 1), (first, dtype, cells), (second, integer, cells if is_tangent else 1)]
        words = [-(-length * dtype.itemsize // 16) * 4 for _, dtype, length in lengths]
        memory = torch.full((sum(words),), -1, dtype=torch.int32, device=theta.device)
        parts = [(name, x.view(dtype)) for (name, dtype, _), x in zip(lengths, memory.split(words))]
        return [dict(parts[way : way + 3]) for way in range(0, len(parts), 3)]
