"""The eight operations: check the arguments, find the framework by theta's type, call the kernels.

Everything here is written once for all frameworks, in terms of the functions that :class:`knapgrad.backends.Backend`
names. Kernels compute functions of theta / gamma: ``value(theta; gamma) = gamma value(theta / gamma; 1)`` and
``relax(theta; gamma) = relax(theta / gamma; 1)``.

Scores: -inf takes an item out. An instance with a score of NaN or +inf is NaN, in every result and every gradient, even
if no selection has that item; other instances are not affected. ``abs(theta) / gamma`` must not exceed 1e290: beyond,
there is an error on the CPU, and on a device and in JAX the instance is NaN. :func:`solve` has no such limit.
"""

from __future__ import annotations

from math import inf, nan, prod
from typing import Any, NamedTuple, TypeVar

import numpy as np

from knapgrad.arguments import broadcasts
from knapgrad.backends import Backend, backend_of, check_array, concrete, is_compiling, plain, scores_of
from knapgrad.constraints import Constraint, check_constraint
from knapgrad.lattice import Lattice
from knapgrad.regularizers import Hard, Regularizer, check_regularizer

Array = TypeVar("Array", bound=Any)  # a NumPy array, a torch tensor or a JAX array


def solve(theta: Array, constraint: Constraint) -> Array:
    """The best feasible selection, ``argmax_y <theta, y>``, exactly, as zeros and ones.

    Not differentiable: the result is detached. Ties are broken in a fixed way.

    Args:
        theta: scores (*batch, n) of any size; -inf takes an item out. NaN and +inf make the instance NaN.
        constraint: what may be selected, for example a :class:`Knapsack`.

    Returns:
        Zeros and ones (*batch, n), of theta's type. Time O(n C) per instance.

    >>> import numpy as np, knapgrad as kg
    >>> kg.solve(np.array([4.0, 3.0, 2.5]), kg.Knapsack([4, 3, 2], capacity=5))
    array([0., 1., 1.])
    """
    theta = scores_of(theta)
    backend, scores, (lattice, _, _), _, constraint = _begin(theta, constraint, _HARD)
    y = backend.solve(backend.computable(scores), lattice)
    return backend.as_type(constraint.whole(y, theta.shape), theta)


def value(theta: Array, constraint: Constraint, regularizer: Regularizer) -> Array:
    """The smoothed optimum, a convex function of theta whose gradient is :func:`relax`.

    It is the last entry of the table that the smoothed recursion fills (docs/math.md, [V]). For :class:`Shannon` it is
    ``gamma log sum_y exp(<theta, y> / gamma)`` over the feasible y.

    Args:
        theta: scores (*batch, n), up to 1e290 gamma; -inf takes an item out. NaN and +inf make the instance NaN.
        constraint: what may be selected, for example a :class:`Knapsack`.
        regularizer: :class:`Shannon`, :class:`Gini` or :class:`Tsallis`, with its gamma.

    Returns:
        (*batch,). Time O(n C) per instance. In torch and JAX twice differentiable.

    >>> import numpy as np, knapgrad as kg
    >>> kg.value(np.zeros(4), kg.TopK(2), kg.Shannon()).round(6) == np.log(6).round(6)
    np.True_
    """
    theta = scores_of(theta)
    call = prepare(theta, constraint, regularizer)
    return call.backend.as_total(_value(call, call.theta), theta)


def relax(theta: Array, constraint: Constraint, regularizer: Regularizer) -> Array:
    """The relaxed selection: for each item the probability to be picked, a point in the convex hull of the feasible
    selections.

    It is the gradient of :func:`value` and the mean of :func:`sample`, exactly. Its own Jacobian is symmetric; in torch
    and JAX its vector-Jacobian product is exact as well and costs about 2.5 times as much as the forward pass.

    Args:
        theta: scores (*batch, n).
        constraint: what may be selected, for example a :class:`Knapsack`.
        regularizer: :class:`Shannon`, :class:`Gini` or :class:`Tsallis`, with its gamma.

    Returns:
        (*batch, n), in [0, 1]; sums to k for top-k, weighs at most the capacity for a knapsack. Time O(n C) per
        instance; between forward and backward theta and the result are kept, whatever C.

    >>> import numpy as np, knapgrad as kg
    >>> kg.relax(np.array([4.0, 3.0, 2.5]), kg.Knapsack([4, 3, 2], capacity=5), kg.Gini(0.5))
    array([0., 1., 1.])
    """
    if type(theta) is not np.ndarray:  # a small call notices another function
        theta = scores_of(theta)
    backend, scores, problem, _, constraint = _begin(theta, constraint, regularizer)
    wide = backend.computable(scores)
    y = constraint.whole(backend.relax(wide, *problem), theta.shape)
    return y if wide is scores else backend.as_type(y, theta)


def sample(
    theta: Array, constraint: Constraint, regularizer: Regularizer, *, num_samples: int | None = None, rng: Any = None
) -> Array:
    """Feasible selections from the distribution whose mean is :func:`relax`.

    Drawn item by item, from the last to the first, by ancestral sampling: exact and independent, no rejection, no
    chain. For :class:`Shannon` a selection has probability proportional to ``exp(<theta, y> / gamma)``.

    Args:
        theta: scores (*batch, n).
        constraint: what may be selected, for example a :class:`Knapsack`.
        regularizer: :class:`Shannon`, :class:`Gini` or :class:`Tsallis`, with its gamma.
        num_samples: how many selections per instance; None for one, without a dimension for it.
        rng: a NumPy Generator or a seed (NumPy), a torch Generator (torch), a key (JAX), or None for the global
            generator of the framework (JAX has none: a key is needed).

    Returns:
        Zeros and ones, (num_samples, *batch, n) or (*batch, n), of theta's type, detached. For gradients see
        ``rsample`` of :class:`knapgrad.torch.SubsetDistribution`. O(n C) per instance, then O(n) per sample.

    >>> import numpy as np, knapgrad as kg
    >>> kg.sample(np.zeros(5), kg.TopK(2), kg.Shannon(), num_samples=3, rng=0).sum(-1)
    array([2., 2., 2.])
    """
    theta = scores_of(theta)
    call = prepare(theta, constraint, regularizer)
    is_count = isinstance(num_samples, (int, np.integer)) and not isinstance(num_samples, bool) and num_samples >= 0
    if num_samples is not None and not is_count:
        raise ValueError(f"num_samples must be a non-negative integer or None, got {num_samples!r}")
    backend = call.backend
    scores = backend.computable(call.theta)
    uniforms = backend.uniforms(rng, (1 if num_samples is None else int(num_samples), *scores.shape), scores)
    y = backend.as_type(call.whole(backend.sample(scores, uniforms, *call.problem)), theta)
    return y[0] if num_samples is None else y


def log_prob(theta: Array, y: Array, constraint: Constraint, regularizer: Regularizer) -> Array:
    """The log-probability of selections under the distribution that :func:`sample` draws from.

    ``sum_i log(Q[i, c_i] if y_i else 1 - Q[i, c_i])`` along the path of y; for :class:`Shannon`
    ``(<theta, y> - value(theta)) / gamma``. -inf for a selection that is infeasible, or that a sparse regularizer
    never draws.

    Args:
        theta: scores (*batch, n).
        y: zeros and ones of theta's shape, or with dimensions of samples in front.
        constraint: what may be selected, for example a :class:`Knapsack`.
        regularizer: :class:`Shannon`, :class:`Gini` or :class:`Tsallis`, with its gamma.

    Returns:
        (*samples, *batch), computed in float64 (in JAX if x64 is on), of theta's type. Differentiable in theta and
        gamma in torch and JAX; the gradient of a log-probability of -inf is taken as 0. A y that is neither 0 nor 1 is
        an error, or NaN where it cannot be looked at: on a device, and under jit.

    >>> import numpy as np, knapgrad as kg
    >>> y = np.array([1, 0, 1, 0])
    >>> np.exp(kg.log_prob(np.zeros(4), y, kg.TopK(2), kg.Shannon())).round(6)
    np.float64(0.166667)
    """
    theta = scores_of(theta)
    call = prepare(theta, constraint, regularizer)
    backend = call.backend
    y = backend.array(plain("y", y), theta, "y")
    if y.shape[max(y.ndim - theta.ndim, 0) :] != theta.shape:
        raise ValueError(
            f"y must have the shape of theta, {tuple(theta.shape)}, or that with samples in front; got {tuple(y.shape)}"
        )
    seen = backend.known(y)
    if seen is not None and not ((seen == 0) | (seen == 1)).all():
        raise ValueError("y must be a selection of zeros and ones; for soft targets use knapgrad.fenchel_young_loss")
    scores, selections = backend.double(call.theta), backend.double(constraint.flat(backend, y, is_selection=True))
    if regularizer.name == "shannon":
        gamma = call.gamma_for(scores)
        optimum, _ = backend.operator(scores, *call.problem, backend.differentiates(scores, gamma))
        result = gibbs_log_prob(backend, scores, selections, optimum, gamma, constraint.contains(y))
    else:
        flat = selections.reshape((prod(y.shape[: y.ndim - theta.ndim]), *scores.shape))
        result = backend.log_prob(scores, flat, *call.problem).reshape(selections.shape[:-1])
    if seen is None:
        hard = (y == 0) | (y == 1)
        for _ in range(constraint.event_dims):
            hard = hard.all(-1)
        result = backend.where(hard, result, nan)
    return backend.as_total(result, theta)


def entropy(theta: Array, constraint: Constraint, regularizer: Regularizer) -> Array:
    """The Shannon entropy, in nats, of the distribution that :func:`sample` draws from.

    ``-sum_y p(y) log p(y)``, summed over paths instead of subsets: ``sum_i sum_c E[i, c] h(Q[i, c])``.

    Args:
        theta: scores (*batch, n).
        constraint: what may be selected, for example a :class:`Knapsack`.
        regularizer: :class:`Shannon`, :class:`Gini` or :class:`Tsallis`, with its gamma.

    Returns:
        (*batch,), computed in float64 (in JAX if x64 is on), of theta's type. Differentiable in theta and gamma in
        torch and JAX.

    >>> import numpy as np, knapgrad as kg
    >>> kg.entropy(np.zeros(4), kg.TopK(2), kg.Shannon()).round(6) == np.log(6).round(6)
    np.True_
    """
    theta = scores_of(theta)
    call = prepare(theta, constraint, regularizer)
    result = call.backend.entropy(call.backend.double(call.theta), *call.problem)
    return call.backend.as_total(result, theta)


def fenchel_young_loss(theta: Array, target: Array, constraint: Constraint, regularizer: Regularizer) -> Array:
    """``value(theta) - <theta, target>``: the Fenchel-Young loss, up to a constant that depends on the target alone.

    Convex in theta, with gradient ``relax(theta) - target``: it trains scores so that the relaxed selection matches
    observed ones. It is not a loss for gamma: it grows with gamma, so a gamma that is learned from it goes to 0. The
    target is not checked: with one that is not feasible the loss is unbounded below.

    Args:
        theta: scores (*batch, n).
        target: a selection, or a point in the convex hull of the feasible ones, of theta's shape.
        constraint: what may be selected, for example a :class:`Knapsack`.
        regularizer: :class:`Shannon`, :class:`Gini` or :class:`Tsallis`, with its gamma.

    Returns:
        (*batch,), one loss per instance. For a reduction see :class:`knapgrad.torch.FenchelYoungLoss`.

    >>> import numpy as np, knapgrad as kg
    >>> kg.fenchel_young_loss(np.array([5.0, 0.0, 0.0]), np.array([1.0, 0.0, 0.0]), kg.TopK(1), kg.Gini())
    array(0.)
    """
    theta = scores_of(theta)
    call = prepare(theta, constraint, regularizer)
    backend = call.backend
    target = backend.array(plain("target", target), theta, "target")
    if target.shape != theta.shape:
        raise ValueError(f"target must have the shape of theta, {tuple(theta.shape)}, got {tuple(target.shape)}")
    score = inner(backend, backend.computable(call.theta), call.flat(target))
    loss = _value(call, call.theta) - score
    return backend.as_total(loss, theta)


def divergence(theta: Array, constraint: Constraint, regularizer: Regularizer, *, prior: Array | None = None) -> Array:
    """The Fenchel-Young divergence of ``relax(theta)`` from a prior score: ``value(prior) - value(theta) + <theta -
    prior, relax(theta)>``.

    Never negative, 0 at ``theta = prior``: where rounding makes it negative it is 0, with the gradient that it has. For
    :class:`Shannon` it is gamma times the Kullback-Leibler divergence between the two distributions, the regulariser of
    a discrete VAE. Its gradient is the Jacobian of :func:`relax` applied to ``theta - prior``.

    Args:
        theta: scores (*batch, n).
        constraint: what may be selected, for example a :class:`Knapsack`.
        regularizer: :class:`Shannon`, :class:`Gini` or :class:`Tsallis`, with its gamma.
        prior: scores broadcastable to theta; None for 0, which prefers no item.

    Returns:
        (*batch,), of theta's type.

    >>> import numpy as np, knapgrad as kg
    >>> kg.divergence(np.array([9.0, 0.0, 0.0]), kg.TopK(1), kg.Gini()).round(3)
    np.float64(0.391)
    """
    theta = scores_of(theta)
    call = prepare(theta, constraint, regularizer)
    backend = call.backend
    prior = backend.array(0.0 if prior is None else plain("prior", prior), theta, "prior")
    if not broadcasts(prior.shape, theta.shape):
        raise ValueError(f"prior must broadcast to theta, {tuple(theta.shape)}, got {tuple(prior.shape)}")
    prior = call.flat(backend.as_type(backend.broadcast_to(prior, theta.shape), theta))
    scores, prior = backend.computable(call.theta), backend.computable(prior)
    optimum, y = backend.operator(scores, *call.problem, True)
    gap = _value(call, prior) - call.gamma * optimum
    gap = gap + inner(backend, scores, y) - inner(backend, prior, y)
    return backend.as_total(not_negative(backend, gap), theta)


_HARD = Hard()


class Problem(NamedTuple):
    """What every operation of a backend takes."""

    lattice: Lattice
    gamma: Any  # as an array
    regularizer: str


class Call(NamedTuple):
    """A call whose arguments were checked."""

    backend: Backend
    theta: Any  # as the kernels take it, (*batch, n)
    problem: Problem
    regularizer: Regularizer
    constraint: Constraint
    shape: tuple[int, ...]  # of theta as it was given

    @property
    def gamma(self) -> Any:
        """A number or an array."""
        return self.gamma_for(self.theta)

    def gamma_for(self, theta: Any) -> Any:
        """That of results for these scores."""
        own = self.backend.factor(self.regularizer) if _is_number(self.regularizer) else self.problem.gamma
        return self.backend.strength(own, theta)

    @property
    def event(self) -> tuple[int, ...]:
        """What theta has per instance."""
        return tuple(self.shape[-self.constraint.event_dims :])

    def flat(self, x: Any) -> Any:
        """Scores, or anything else of theta's shape, as the kernels take them."""
        return self.constraint.flat(self.backend, x)

    def whole(self, y: Any) -> Any:
        """The reverse."""
        return self.constraint.whole(y, self.shape)


def prepare(theta: Any, constraint: Constraint, regularizer: Regularizer | None) -> Call:
    """The checked call; without a regularizer, of the hard maximum."""
    smoothing = _HARD if regularizer is None else regularizer
    backend, flat, problem, smoothing, constraint = _begin(theta, constraint, smoothing)
    return Call(backend, flat, Problem(*problem), smoothing, constraint, theta.shape)


def _begin(
    theta: Any, constraint: Constraint, regularizer: Regularizer
) -> tuple[Backend, Any, tuple[Lattice, Any, str], Regularizer, Constraint]:
    """The first parts of a call, without an object around them, which a small call notices. The checks take as long as
    a small kernel, so they are made once for each type and shape."""
    compiling = is_compiling()
    try:
        backend = None if compiling else constraint._fitting.get((type(theta), theta.dtype, theta.shape))
    except AttributeError:  # not what it should be
        backend = None
    if backend is None:
        backend, constraint = _checked(theta, constraint, compiling)
    if regularizer is not _HARD:
        check_regularizer(regularizer)
    strength = regularizer._strength
    if type(strength) is not np.ndarray or strength.ndim:  # not one number
        regularizer = regularizer.checked
        strength = _gamma_of_each(backend, theta, constraint, regularizer)
    flat = constraint.flat(backend, theta)
    return backend, flat, (backend.lattice(constraint, flat), strength, regularizer.name), regularizer, constraint


def _is_number(regularizer: Regularizer) -> bool:
    """Whether its gamma is one number, rather than an array or tensor of any shape."""
    strength = regularizer._strength
    return type(strength) is np.ndarray and strength.ndim == 0


def _gamma_of_each(backend: Backend, theta: Any, constraint: Constraint, regularizer: Regularizer) -> Any:
    """A gamma that is an array or a tensor, which must broadcast to the batch."""
    if _is_number(regularizer):  # JAX put it together
        return regularizer._strength
    regularizer.check_again()
    strength = backend.array(regularizer._strength, theta, "gamma")
    if backend.differentiates(strength):
        strength = backend.double(strength)  # its gradient is a small difference of large terms
    strength, batch = backend.computable(strength), theta.shape[: -constraint.event_dims]
    if not broadcasts(strength.shape, batch):
        raise ValueError(
            f"gamma of shape {tuple(strength.shape)} does not broadcast to the batch shape of theta, "
            f"{tuple(batch)}; give it that shape, or one that broadcasts to it"
        )
    return strength


def _checked(theta: Any, constraint: Constraint, compiling: bool) -> tuple[Backend, Constraint]:
    """The backend of theta, and the constraint, after checking both."""
    backend = check_array("theta", theta)
    if not backend.is_floating(theta):
        raise TypeError(f"theta must hold floating-point scores, got {theta.dtype}; convert it to float32 or float64")
    if theta.ndim == 0:
        raise ValueError("theta must have shape (*batch, n), got a single number; for one item use shape (1,)")
    constraint = check_constraint(constraint)
    constraint.check(theta.shape)
    for name, x in () if compiling else constraint.arguments.items():
        if backend_of(x) not in (None, backend):
            concrete(x, theta, name)
    if not compiling and len(constraint._fitting) < _MOST_KINDS:
        constraint._fitting[type(theta), theta.dtype, theta.shape] = backend
    return backend, constraint


_MOST_KINDS = 1000  # that are remembered


def _value(call: Call, theta: Any) -> Any:
    backend, gamma = call.backend, call.gamma_for(theta)
    relaxed = backend.differentiates(theta, gamma)  # the gradient costs little more than the value
    return gamma * backend.operator(backend.computable(theta), *call.problem, relaxed)[0]


def gibbs_log_prob(backend: Backend, scores: Any, y: Any, optimum: Any, gamma: Any, feasible: Any) -> Any:
    """Shannon's log-probability, <theta, y> / gamma - optimum, and -inf for an infeasible y; all in float64."""
    out = abs(scores) == inf  # the optimum has the NaN of +inf
    feasible = feasible & ~(out & (y != 0)).any(-1)
    result = backend.sum_double(backend.where(out, 0.0, scores) * y) / gamma - optimum
    result = result - backend.detached(backend.where(result > 0, result, 0.0))  # not above 1 by rounding
    return backend.where(feasible, result, 0.0 * optimum - inf)  # NaN where the optimum is


def not_negative(backend: Backend, gap: Any) -> Any:
    """A divergence that rounding has made negative as 0, with its gradient; NaN stays NaN."""
    return gap - backend.detached(backend.where(gap < 0, gap, 0.0))


def inner(backend: Backend, scores: Any, y: Any) -> Any:
    """<scores, y> in float64, where an infinite score counts 0 if its item is not picked."""
    scores, y = backend.double(scores), backend.double(y)
    return backend.sum_double(backend.where((y == 0) & (abs(scores) == inf), 0.0, scores) * y)
