"""Layers and a loss.

The arrays of a constraint (weights, capacity and at_least, or k) are buffers: they follow ``.to()``, are saved in
``state_dict``, and loading a state restores them, with the real units that they stand for. The same holds for a gamma
that is a tensor or a parameter. A gamma that is a number is not saved.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from knapgrad import ops
from knapgrad.constraints import Constraint, check_constraint
from knapgrad.real import Scale
from knapgrad.regularizers import Regularizer, check_positive, check_regularizer
from knapgrad.torch import backend, operators


class _Selection(nn.Module):
    """Holds a constraint and a regularizer; a gamma that is an ``nn.Parameter`` becomes one of the module."""

    def __init__(self, constraint: Constraint | None, regularizer: Regularizer) -> None:
        super().__init__()
        self._arrays: dict[str, Any] = {}  # those arguments of the constraint that are arrays, and so buffers
        self.constraint = constraint
        self.regularizer = regularizer

    @property
    def constraint(self) -> Constraint | None:
        """What may be selected. To change it, assign another constraint; the buffers are a copy of its arrays."""
        return self._constraint

    @constraint.setter
    def constraint(self, constraint: Constraint | None) -> None:
        constraint = None if constraint is None else check_constraint(constraint)
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
        """The smoothing, with the gamma that it has now. To change it, assign another one, or a number to ``gamma``."""
        gamma: Any = self._parameters.get("gamma", self._buffers.get("gamma"))
        if gamma is None and isinstance(self._regularizer._strength, Tensor):
            gamma = self.gamma  # computed, by torch.nn.utils.parametrize
        return self._regularizer if gamma is None else type(self._regularizer)(gamma)

    @regularizer.setter
    def regularizer(self, regularizer: Regularizer) -> None:
        check_regularizer(regularizer)
        gamma = regularizer.gamma
        if isinstance(gamma, Tensor) and gamma.grad_fn is not None:
            raise ValueError(
                "gamma must be a number, an nn.Parameter or a tensor without history in a module; for a gamma that is "
                "computed, such as log_gamma.exp(), call knapgrad.relax and its like in your own forward"
            )
        for place in (self._parameters, self._buffers, self.__dict__):
            place.pop("gamma", None)
        self._regularizer = regularizer
        if isinstance(gamma, nn.Parameter):
            self.register_parameter("gamma", gamma)
        elif isinstance(gamma, Tensor):
            self.register_buffer("gamma", gamma)
        else:
            self.__dict__["gamma"] = gamma

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "gamma" and isinstance(value, Tensor) and value.grad_fn is not None:  # of a copy on another device
            self._buffers["gamma"] = value
        elif name == "gamma":
            self.regularizer = type(self._regularizer)(value)
        elif name in self.__dict__.get("_arrays", ()):
            raise AttributeError(f"{name} cannot be set: it is a copy of what the constraint has; assign .constraint")
        else:
            super().__setattr__(name, value)

    def __prepare_scriptable__(self) -> Any:
        raise NotImplementedError("knapgrad's layers cannot be scripted or traced by torch.jit; use torch.export")

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        units = _units_of(self._constraint)
        if units is not None:  # no buffer, which .half() would round
            destination[prefix + _UNITS] = units

    def _load_from_state_dict(self, state: Any, prefix: str, *arguments: Any) -> None:
        """Nothing, if something in it does not fit, or the constraint that it holds is not valid."""
        errors, units = arguments[-1], state.pop(prefix + _UNITS, None)
        before = len(errors)
        try:
            constraint = self._constraint_in(state, prefix, units)
        except (TypeError, ValueError) as error:
            errors.append(f'the state under "{prefix}" is not valid, and was not loaded: {error}')
            return
        places: list[dict[str, Any]] = [self._buffers, self._parameters]
        old = [(place, name, x, x.clone()) for place in places for name, x in place.items() if x is not None]
        arrays, self._arrays = self._arrays, {}  # may be set meanwhile
        super()._load_from_state_dict(state, prefix, *arguments)
        self._arrays = arrays
        if len(errors) == before:
            self._constraint = constraint
            return
        with torch.no_grad():
            for place, name, x, copy in old:
                place[name] = x.copy_(copy)

    def _constraint_in(self, state: Any, prefix: str, units: Any) -> Constraint | None:
        """The constraint of a state; that of the module, where the state has none, or one of other shapes."""
        gamma = state.get(prefix + "gamma")
        is_gamma = isinstance(gamma, Tensor) and not gamma.is_meta and "gamma" in {**self._parameters, **self._buffers}
        if is_gamma and not (gamma > 0).all():
            raise ValueError(f"gamma must be positive, got {gamma.min().item()}")
        constraint = self._constraint
        found = {name: state[prefix + name] for name in self._arrays if prefix + name in state}
        fits = all(isinstance(x, Tensor) and x.shape == getattr(self, name).shape for name, x in found.items())
        if constraint is None or not found or not fits:  # torch says what does not fit
            return constraint
        for name, x in found.items():
            if x.is_floating_point():
                raise TypeError(f"{name} must be integers, got {x.dtype}")
            if x.is_meta:
                raise ValueError(f"{name} is on the meta device, and has no values")
        is_whole = len(found) == len(self._arrays)  # else it counts in the units of the module
        scales = _scales_from(constraint, units) if is_whole else {}
        return type(constraint)(**constraint.arguments | found | scales)

    def extra_repr(self) -> str:
        gamma = "learnable" if isinstance(self.gamma, nn.Parameter) else self.gamma
        return f"{self.constraint}, {type(self._regularizer).__name__}(gamma={gamma})"


_UNITS = "units"  # in a state: what integers stand for, of each budget (unit, offset, whether it is exact, ...)


def _units_of(constraint: Constraint | None) -> Tensor | None:
    """(budgets, 3, ...), or None for integers that stand for themselves."""
    given = {} if constraint is None else constraint.arguments
    scales: Any = given["scales"] if "scales" in given else (given.get("scale"),)
    if not scales or scales[0] is None:
        return None
    numbers = [np.asarray(x, np.float64) for each in scales for x in (each.unit, each.offset, each.exact)]
    rows = np.stack(np.broadcast_arrays(*numbers))
    return torch.tensor(rows.reshape(len(scales), 3, *rows.shape[1:]))


def _scales_from(constraint: Constraint, units: Any) -> dict[str, Any]:
    """As an argument of the constraint. What would be optimistic is not saved; where nothing changes, it stays."""
    name = "scales" if "scales" in constraint.arguments else "scale"
    if name not in constraint.arguments:
        return {}
    present = _units_of(constraint)
    rows: Any = (
        [] if units is None else _rows_of(units, len(constraint.arguments["weights"]) if name == "scales" else 1)
    )
    if units is not None and present is not None and np.array_equal(rows, present.numpy()):
        return {}
    scales = tuple(Scale(unit, offset, exact=bool(exact.all())) for unit, offset, exact in rows)
    return {name: (scales or None) if name == "scales" else (scales or (None,))[0]}


def _rows_of(units: Any, budgets: int) -> np.ndarray:
    """The units of a state, checked."""
    shape = f"({budgets}, 3, ...): unit, offset, and whether it is exact"
    if not isinstance(units, Tensor) or units.is_complex():
        given = units.dtype if isinstance(units, Tensor) else type(units).__name__
        raise TypeError(f"{_UNITS} must be a real tensor {shape}; got {given}")
    if units.is_meta:
        raise ValueError(f"{_UNITS} is on the meta device, and has no values")
    if tuple(units.shape[:2]) != (budgets, 3):
        raise ValueError(f"{_UNITS} must have the shape {shape}; got {tuple(units.shape)}")
    rows = units.double().cpu().numpy()
    if not (np.isfinite(rows).all() and (rows[:, 0] > 0).all()):
        raise ValueError(f"{_UNITS} must be positive and finite, got {rows.tolist()}")
    return rows


def _arrays_of(constraint: Constraint | None) -> dict[str, Any]:
    arguments = {} if constraint is None else constraint.arguments
    return {name: x for name, x in arguments.items() if isinstance(x, np.ndarray)}


class _Layer(_Selection):
    """With ``hard_eval``, the exact selection in eval mode."""

    def __init__(self, constraint: Constraint | None, regularizer: Regularizer, hard_eval: bool = False) -> None:
        super().__init__(constraint, regularizer)
        self.hard_eval = hard_eval

    @property
    def _is_hard(self) -> bool:
        return self.hard_eval and not self.training

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, hard_eval={self.hard_eval}"


class Relax(_Layer):
    """The relaxed selection as a layer: ``(*batch, n) -> (*batch, n)``, with its exact gradient.

    Args:
        constraint: what may be selected, for example a :class:`knapgrad.Knapsack`, which is
            saved in ``state_dict``; None if it is given with each call.
        regularizer: with its gamma, which may be an ``nn.Parameter``.
        hard_eval: in eval mode give the exact 0/1 selection (:func:`knapgrad.solve`) instead.
        straight_through: in training too: the exact selection forwards, the gradient of the relaxed one backwards. The
            rest of the model then sees what it will see in use.

    To change gamma, assign it: ``layer.gamma = 0.1``, or let :class:`GammaSchedule` lower it. To change more, assign
    ``layer.regularizer`` or ``layer.constraint``.

    >>> import torch, knapgrad as kg
    >>> layer = kg.torch.Relax(kg.Knapsack([3, 2, 2], 4), kg.Gini(0.5), hard_eval=True).eval()
    >>> layer(torch.tensor([3.0, 2.0, 2.0]))
    tensor([0., 1., 1.])
    """

    def __init__(
        self,
        constraint: Constraint | None,
        regularizer: Regularizer,
        hard_eval: bool = False,
        *,
        straight_through: bool = False,
    ) -> None:
        super().__init__(constraint, regularizer, hard_eval)
        self.straight_through = straight_through

    def forward(self, theta: Tensor, constraint: Constraint | None = None) -> Tensor:
        """The selection. A ``constraint`` given here, for example one per instance, replaces the module's."""
        constraint = self._in_force(constraint)
        if self._is_hard:
            return ops.solve(theta, constraint)
        if not self.straight_through:
            return ops.relax(theta, constraint, self.regularizer)
        call = ops.prepare(theta, constraint, self.regularizer)
        scores = backend.computable(call.theta)
        y = operators.surrogate(scores, backend.solve(scores, call.problem.lattice).unsqueeze(0), *call.problem)[0]
        return backend.as_type(call.whole(y), theta)

    def extra_repr(self) -> str:
        return super().extra_repr() + (", straight_through=True" if self.straight_through else "")


class Sample(_Layer):
    """The stochastic layer: a random feasible 0/1 selection forwards, the exact gradient of its mean backwards.

    Args:
        constraint: what may be selected, for example a :class:`knapgrad.Knapsack`, which is
            saved in ``state_dict``; None if it is given with each call.
        regularizer: with its gamma, which may be an ``nn.Parameter``.
        hard_eval: in eval mode give the exact selection (:func:`knapgrad.solve`) instead of a random one.

    Random numbers come from torch's global generator, or from the ``rng`` given to a call.

    >>> import torch, knapgrad as kg
    >>> layer = kg.torch.Sample(kg.TopK(2), kg.Shannon())
    >>> layer(torch.zeros(3, 5)).sum(-1)
    tensor([2., 2., 2.])
    """

    def forward(
        self,
        theta: Tensor,
        constraint: Constraint | None = None,
        rng: torch.Generator | None = None,
        *,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """The selection. A ``constraint`` given here, for example one per instance, replaces the module's.
        ``generator`` is another name of ``rng``."""
        if rng is not None and generator is not None:
            raise TypeError("rng and generator are two names of the same argument; give one of them")
        constraint = self._in_force(constraint)
        if self._is_hard:
            return ops.solve(theta, constraint)
        call = ops.prepare(theta, constraint, self.regularizer)
        scores = backend.computable(call.theta)
        uniforms = backend.uniforms(generator if rng is None else rng, (1, *scores.shape), scores)
        return backend.as_type(call.whole(backend.rsample(scores, uniforms, *call.problem, None)[0]), theta)


class FenchelYoungLoss(_Selection):
    """:func:`knapgrad.fenchel_young_loss` with a reduction: ``(*batch, n), (*batch, n) -> ()``.

    Args:
        constraint: what may be selected, for example a :class:`knapgrad.Knapsack`, which is
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


class GammaSchedule:
    """Lowers the gamma of all layers of a model, by the same factor in each step: from a soft selection, which learns
    easily, to nearly the hard one that will be used.

    Args:
        model: a module with layers whose gamma is a number.
        last: the gamma after the last step.
        steps: how many calls of :meth:`step` there will be. More of them change nothing.

    :meth:`state_dict` and :meth:`load_state_dict` save it with a checkpoint and go on from there, with the gamma that
    the layers had.

    >>> import torch, knapgrad as kg
    >>> layer = kg.torch.Relax(kg.TopK(2), kg.Gini(1.0))
    >>> schedule = kg.torch.GammaSchedule(layer, last=0.01, steps=2)
    >>> for epoch in range(3):
    ...     print(round(layer.gamma, 6))
    ...     schedule.step()
    1.0
    0.1
    0.01
    """

    def __init__(self, model: nn.Module, last: float, steps: int) -> None:
        check_positive(last)
        if not isinstance(steps, int) or steps < 1:
            raise ValueError(f"steps must be a positive integer, got {steps!r}")
        self.layers = [module for module in model.modules() if isinstance(module, _Selection)]
        if not self.layers:
            raise ValueError("model has no layers of knapgrad.torch whose gamma could be lowered")
        if not all(isinstance(layer.gamma, float) for layer in self.layers):
            raise ValueError("gamma must be a number in all layers, not a tensor or a parameter")
        self.first: list[Any] = [layer.gamma for layer in self.layers]
        self.last, self.steps, self.done = last, steps, 0

    def step(self) -> None:
        """Once per epoch, or per batch, after the optimizer's step."""
        self.done = min(self.done + 1, self.steps)
        self._set()

    def _set(self) -> None:
        for layer, first in zip(self.layers, self.first):
            layer.gamma = first * (self.last / first) ** (self.done / self.steps)

    def state_dict(self) -> dict[str, Any]:
        """The steps that are done, and from which gamma to which, to be saved with that of the optimizer."""
        return {name: getattr(self, name) for name in ("first", "last", "steps", "done")}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from a state, and sets the gamma of all layers to what it was."""
        if set(state) != set(self.state_dict()):
            raise ValueError(f"the state must have {list(self.state_dict())}, got {list(state)}")
        if len(state["first"]) != len(self.layers):
            raise ValueError(f"the state is of {len(state['first'])} layers, and the model has {len(self.layers)}")
        self.first, self.last, self.steps, self.done = (state[name] for name in ("first", "last", "steps", "done"))
        self._set()
