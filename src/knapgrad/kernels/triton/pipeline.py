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
        self.launches: dict[tuple[Any, ...], Launch] = {}

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
        key = kernel, programs, *options.values()
        if key not in self.launches:
            every = self.options | options
            arguments = {name: x for name, x in every.items() if name in kernel.arg_names}
            rest = {name: every[name] for name in ("num_warps",)}
            self.launches[key] = Launch(kernel, programs, arguments, rest, {})
        self.launches[key]({name: x for name, x in given.items() if name in kernel.arg_names})


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
        goals, moves = pipeline.goals, pipeline.moves
        limits_step, moves_step = int(len(goals) > 1), self.n if len(moves) > 1 else 0
        self.given: dict[str, Any] = {
            "theta": theta[part], "z": z[part], "y": found["y"][part],
            "value": found["value"][part], "tangent": found["tangent"][part],
            "moves": moves[part if moves_step else slice(None)],
            "goals": goals[part if limits_step else slice(None)],
            "slacks": pipeline.slacks[part if limits_step else slice(None)],
            "moves_step": moves_step, "limits_step": limits_step, "scale": 1.0, "gamma": theta, "gamma_step": 0,
        }  # fmt: skip
        self.given |= strength
        if "gamma" in strength:
            self.given["gamma_step"] = int(len(strength["gamma"]) > 1)
            self.given["gamma"] = strength["gamma"][part if self.given["gamma_step"] else slice(None)]
        self.gammas = "gamma" in strength
        self.tables = found["tables"][part]

    def sweep(self, relaxed: bool) -> None:
        theta, layout, count = self.given["theta"], self.layout, self.pipeline.count
        ends = len(self.starts) + 1
        self.V_rows = theta.new_empty(ends, self.size, layout.width, dtype=torch.float64)
        self.T_rows = theta.new_empty(ends if count > 1 else 0, self.size, layout.width)
        if relaxed and not self.keep:
            self.tables = theta.new_empty(self.size * count * self.length * layout.width)
        for k in range(len(self.starts)):
            self.fill(k, stored=self.keep or (relaxed and k + 1 == len(self.starts)))
        if not relaxed:
            return
        self.given |= {"E_row": theta.new_empty(self.size, layout.width), "tables": self.tables}
        self.given |= {"D_row": torch.empty_like(self.given["E_row"]) if count > 1 else theta}
        self.given |= {"terms": torch.empty_like(self.tables) if self.keep else self.tables}
        for k in reversed(range(len(self.starts))):
            if k + 1 < len(self.starts):
                self.fill(k, stored=True)
            self.collect(k)

    def fill(self, k: int, stored: bool) -> None:
        """The items from the k-th start on."""
        theta, first = self.given["theta"], self.starts[k]
        given = self.given | {"first": first, "count": min(self.length, self.n - first)}
        given |= {"V_start": self.V_rows[k], "V_end": self.V_rows[k + 1]}
        given |= {"tables": self.tables if stored else theta, "T_start": theta, "T_end": theta}
        if self.pipeline.count > 1:
            given |= {"T_start": self.T_rows[k], "T_end": self.T_rows[k + 1]}
        given |= self.edges(given["count"], V_edges=torch.int64, T_edges=_INTEGERS[theta.dtype])
        self.pipeline.launch(
            tiles.fill_tiles_kernel, self.size * self.layout.tiles, given, STORED=stored, GAMMAS=self.gammas,
            GROUP=plan.GROUPS[0],
        )  # fmt: skip

    def collect(self, k: int) -> None:
        first = self.starts[k]
        given = self.given | {"first": first, "count": min(self.length, self.n - first)}
        integer = _INTEGERS[self.given["theta"].dtype]
        given |= self.edges(given["count"], E_edges=integer, D_edges=integer)
        self.pipeline.launch(
            tiles.collect_tiles_kernel, self.size * self.layout.tiles, given, GROUP=plan.GROUPS[1]
        )  # fmt: skip
        given["rows"] = self.size * given["count"]
        rows, columns = _SUMMED
        self.pipeline.launch(
            tiles.add_tiles_kernel, -(-given["rows"] // rows), given, ROWS=rows, BLOCK=columns, num_warps=4
        )  # fmt: skip

    def edges(self, count: int, **types: torch.dtype) -> dict[str, Tensor]:
        """Where nothing was sent yet, and the turn before the first. The second edges are for a tangent alone."""
        cells = self.size * (count + max(plan.GROUPS)) * self.layout.tiles * self.layout.halo  # of whole groups
        first, second = types
        lengths = {"turn": (torch.int32, 1), first: (types[first], cells)}
        lengths[second] = types[second], cells if self.pipeline.count > 1 else 1
        words = {name: -(-length * dtype.itemsize // 16) * 4 for name, (dtype, length) in lengths.items()}
        memory = torch.full((sum(words.values()),), -1, dtype=torch.int32, device=self.given["theta"].device)
        parts = memory.split(list(words.values()))
        return {name: part.view(dtype) for (name, (dtype, _)), part in zip(lengths.items(), parts)}
