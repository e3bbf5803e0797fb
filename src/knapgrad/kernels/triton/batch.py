"""CUDA tensors as the kernels take them: a flat batch, and the constants of its lattice and its gamma."""

from __future__ import annotations

from functools import cache
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from knapgrad.kernels.triton import plan
from knapgrad.lattice import Lattice


class Batch(NamedTuple):
    """A flat batch; what all instances share has one row, and a step of 0 from instance to instance."""

    theta: Tensor  # (batch, n)
    reach: int
    heaviest: int
    regularizer: str
    options: int  # how many items make one choice; 0 if each is picked or not
    constants: dict[str, Any]  # the arguments for the lattice and gamma that all kernels take, by name

    def part(self, part: slice) -> Batch:
        """Some of the instances."""
        names = [name for name in ("weights", "capacity", "slack", "gamma") if self.constants[f"{name}_step"]]
        some = {name: self.constants[name][part] for name in names}
        return self._replace(theta=self.theta[part], constants=self.constants | some)

    def sizes(self, tables: int, *further: int) -> tuple[int, ...]:
        """What a plan depends on, for a kernel with so many tables per program."""
        theta = self.theta
        return *theta.shape, self.reach, *further, tables, theta.itemsize, multiprocessors(theta.device)

    def plan(self, tables: int) -> plan.Plan:
        return plan.plan(*self.sizes(tables), self.options)


def flat(theta: Tensor, lattice: Lattice, gamma: Any, regularizer: str) -> Batch:
    """The batch of a call."""
    *shape, n = theta.shape
    theta = theta.reshape(prod(shape), n).contiguous()
    weights, own = lattice.weights, lattice.weights.numel() != n
    constants: dict[str, Any] = {
        "weights": (weights.expand(*shape, n).reshape(-1, n) if own else weights.reshape(1, n)).contiguous(),
        "weights_step": n if own else 0,
        "reach": lattice.reach,
        "SLACK": lattice.slack is not None,
        "scale": 1.0,
        "GAMMAS": not is_number(gamma),
        **plan.box_of(lattice.box),
    }
    in_memory = {"capacity": lattice.capacity}
    if lattice.slack is not None:
        in_memory["slack"] = lattice.slack
    if is_number(gamma):
        constants |= strength(gamma, theta) | {"gamma": theta, "gamma_step": 0}  # never read
    else:
        in_memory["gamma"] = gamma.to(theta.device)
    for name, x in in_memory.items():
        shared = x.numel() == 1
        constants[name] = (x if shared else x.expand(shape)).reshape(-1).contiguous()
        constants[f"{name}_step"] = 0 if shared else 1
    if lattice.slack is None:
        constants["slack"], constants["slack_step"] = constants["capacity"], constants["capacity_step"]
    return Batch(theta, lattice.reach, lattice.heaviest, regularizer, lattice.options, constants)


def limits_of(batch: Batch) -> tuple[Tensor, Tensor]:
    """The state from which the way back starts, and how much of it may stay unused, as in steps.limits_of; one of each
    if all instances share them, else one per instance."""
    capacity = batch.constants["capacity"]
    goal = capacity.clamp(min=0)
    slack = torch.minimum(batch.constants["slack"].clamp(min=-1), goal) if batch.constants["SLACK"] else goal
    goal, slack = torch.broadcast_tensors(goal, torch.where(capacity < 0, -1, slack))
    return goal.contiguous(), slack.contiguous()


def is_number(gamma: Any) -> bool:
    """Whether gamma is a number that the host knows."""
    return isinstance(gamma, np.ndarray) or (not gamma.is_cuda and gamma.numel() == 1)


def strength(gamma: Any, theta: Tensor) -> dict[str, Any]:
    """Gamma as an argument of a launch."""
    if is_number(gamma):
        number = float(gamma)
        return {"scale": 1.0 / number if number > 0 else float("nan")}
    gamma = gamma if gamma.numel() == 1 else gamma.expand(theta.shape[:-1])
    return {"gamma": gamma.reshape(-1).contiguous().to(theta.device)}


def laid(x: Tensor, theta: Tensor) -> Tensor:
    """x as the kernels want it: contiguous, of theta's type."""
    if x.dtype != theta.dtype:
        x = x.to(theta.dtype)
    return x if x.is_contiguous() else x.contiguous()


@cache
def multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2
