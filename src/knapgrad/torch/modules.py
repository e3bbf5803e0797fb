"""Layers and a loss.

The arrays of a constraint (weights, capacity and at_least, or k) are buffers: they follow ``.to()``, are saved in
``state_dict``, and loading a state restores them. The same holds for a gamma that is a tensor or a parameter. A gamma
that is a number is not saved.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from knapgrad import ops
from knapgrad.constraints import Constraint, check_constraint
from knapgrad.regularizers import Regularizer, check_regularizer
from knapgrad.torch import backend


class _Selection(nn.Module):
    """Holds a constraint and a regularizer; a gamma that is an ``nn.Parameter`` becomes one of the module."""

    def __init__(self, constraint: Constraint | None, regularizer: Regularizer) -> None:
        super().__init__()
        check_regularizer(regularizer)
        self._arrays: dict[
            str, Any
        ] = {}  # those arguments of the constraint that are arrays, of which buffers are made
        self.constraint = constraint
        self._kind = type(regularizer)
        gamma = regularizer.gamma
        if isinstance(gamma, Tensor) and gamma.grad_fn is not None:
            raise ValueError(
                "gamma must be a number, an nn.Parameter or a tensor without history in a module; for a gamma that is "
                "computed, such as log_gamma.exp(), call knapgrad.relax and its like in your own forward"
            )
        if isinstance(gamma, Tensor) and not isinstance(gamma, nn.Parameter):
            self.register_buffer("gamma", gamma)
        else:
            self.gamma = gamma
        self.register_load_state_dict_post_hook(_read_constraint)

    @property
    def constraint(self) -> Constraint | None:
        """What may be selected. To change it, assign another constraint; the buffers are a copy of its arrays."""
        return self._constraint

    @constraint.setter
    def constraint(self, constraint: Constraint | None) -> None:
        if constraint is not None:
            check_constraint(constraint)
        old = [self._buffers.pop(name) for name in self._arrays if name in self._buffers]
        device = old[0].device if old and old[0] is not None else None
        self._constraint, self._arrays = constraint, _arrays_of(constraint)
        for name in self._arrays:
            # A copy: loading a state must not write into a constraint that others may hold.
            self.register_buffer(name, torch.tensor(getattr(constraint, name), device=device))

    def _in_force(self, given: Constraint | None) -> Constraint:
        """The constraint of a call, or the module's."""
        constraint = self._constraint if given is None else given
        if constraint is None:
            raise TypeError("constraint must be given with the call: the module was made with None")
        return constraint

    @property
    def regularizer(self) -> Regularizer:
        return self._kind(self.gamma)

    def extra_repr(self) -> str:
        gamma = "learnable" if isinstance(self.gamma, nn.Parameter) else self.gamma
        return f"{self.constraint}, {self._kind.__name__}(gamma={gamma})"


def _arrays_of(constraint: Constraint | None) -> dict[str, Any]:
    arguments = {} if constraint is None else constraint.arguments
    return {name: x for name, x in arguments.items() if isinstance(x, np.ndarray)}


def _read_constraint(module: _Selection, _incompatible: Any) -> None:
    """After load_state_dict: makes the constraint again from the buffers, with all checks."""
    constraint = module._constraint
    if constraint is not None:
        buffers = {name: getattr(module, name) for name in module._arrays}
        module._constraint = type(constraint)(**constraint.arguments | buffers)


class Relax(_Selection):
    """The relaxed selection as a layer: ``(*batch, n) -> (*batch, n)``, with its exact gradient.

    Args:
        constraint: a :class:`knapgrad.TopK`, :class:`knapgrad.Knapsack` or :class:`knapgrad.MultipleChoice`, which is
            saved in ``state_dict``; None if it is given with each call.
        regularizer: with its gamma, which may be an ``nn.Parameter``.
        hard_eval: in eval mode give the exact 0/1 selection (:func:`knapgrad.solve`) instead.

    >>> import torch, knapgrad as kg
    >>> layer = kg.torch.Relax(kg.Knapsack([3, 2, 2], 4), kg.Gini(0.5), hard_eval=True).eval()
    >>> layer(torch.tensor([3.0, 2.0, 2.0]))
    tensor([0., 1., 1.])
    """

    def __init__(self, constraint: Constraint | None, regularizer: Regularizer, hard_eval: bool = False) -> None:
        super().__init__(constraint, regularizer)
        self.hard_eval = hard_eval

    def forward(self, theta: Tensor, constraint: Constraint | None = None) -> Tensor:
        """The selection. A ``constraint`` given here, for example one per instance, replaces the module's."""
        constraint = self._in_force(constraint)
        if self.hard_eval and not self.training:
            return ops.solve(theta, constraint)
        return ops.relax(theta, constraint, self.regularizer)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, hard_eval={self.hard_eval}"


class Sample(Relax):
    """The stochastic layer: a random feasible 0/1 selection forwards, the exact gradient of its mean backwards.

    Args:
        constraint: a :class:`knapgrad.TopK`, :class:`knapgrad.Knapsack` or :class:`knapgrad.MultipleChoice`, which is
            saved in ``state_dict``; None if it is given with each call.
        regularizer: with its gamma, which may be an ``nn.Parameter``.
        hard_eval: in eval mode give the exact selection (:func:`knapgrad.solve`) instead of a random one.

    Random numbers come from torch's global generator, or from the ``generator`` given to a call.

    >>> import torch, knapgrad as kg
    >>> layer = kg.torch.Sample(kg.TopK(2), kg.Shannon())
    >>> layer(torch.zeros(3, 5)).sum(-1)
    tensor([2., 2., 2.])
    """

    def forward(
        self, theta: Tensor, constraint: Constraint | None = None, generator: torch.Generator | None = None
    ) -> Tensor:
        """The selection. A ``constraint`` given here, for example one per instance, replaces the module's."""
        constraint = self._in_force(constraint)
        if self.hard_eval and not self.training:
            return ops.solve(theta, constraint)
        call = ops.prepare(theta, constraint, self.regularizer)
        scores = backend.computable(call.theta)
        uniforms = backend.uniforms(generator, (1, *scores.shape), scores)
        return backend.as_type(call.whole(backend.rsample(scores, uniforms, *call.problem, None)[0]), theta)


class FenchelYoungLoss(_Selection):
    """:func:`knapgrad.fenchel_young_loss` with a reduction: ``(*batch, n), (*batch, n) -> ()``.

    Args:
        constraint: a :class:`knapgrad.TopK`, :class:`knapgrad.Knapsack` or :class:`knapgrad.MultipleChoice`, which is
            saved in ``state_dict``; None if it is given with each call.
        regularizer: with its gamma.
        reduction: "mean", "sum", or "none" for one loss per instance.

    >>> import torch, knapgrad as kg
    >>> loss = kg.torch.FenchelYoungLoss(kg.TopK(1), kg.Gini())
    >>> loss(torch.tensor([[5.0, 0.0], [0.0, 5.0]]), torch.tensor([[1.0, 0.0], [0.0, 1.0]]))
    tensor(0.)
    """

    def __init__(self, constraint: Constraint | None, regularizer: Regularizer, reduction: str = "mean") -> None:
        super().__init__(constraint, regularizer)
        if reduction not in ("mean", "sum", "none"):
            raise ValueError(f'reduction must be "mean", "sum" or "none", got {reduction!r}')
        self.reduction = reduction

    def forward(self, theta: Tensor, target: Tensor, constraint: Constraint | None = None) -> Tensor:
        """The loss. A ``constraint`` given here, for example one per instance, replaces the module's."""
        loss = ops.fenchel_young_loss(theta, target, self._in_force(constraint), self.regularizer)
        return loss if self.reduction == "none" else getattr(loss, self.reduction)()

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, reduction={self.reduction}"
