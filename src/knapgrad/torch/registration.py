"""Makes torch operators of kernels: schema, fake implementation, vmap rule and derivative, under the name ``knapgrad``.

The arguments of an operator are: tensors with one row per instance (theta first), a lattice, gamma, the name of a
regularizer, and options. Its derivative is assembled three times from the same parts:

- registered with the operator, for torch.compile;
- as an autograd.Function with a vmap rule, because torch.func's transforms ignore the registered one;
- as a plain autograd.Function, because the other two add tens of microseconds to an eager call, more than a small
  kernel takes.

torch's dispatcher takes tensors and numbers only, so a lattice is passed to it as its fields. The arrays of a lattice
may be NumPy arrays; they become tensors where torch needs tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, from_numpy, is_grad_enabled
from torch.compiler import is_compiling

from knapgrad.kernels import numba
from knapgrad.lattice import Lattice
from knapgrad.torch import private
from knapgrad.torch.private import CONSTANTS

_DEVICES = ("cpu", "cuda")
_library = torch.library.Library("knapgrad", "DEF")

_LATTICE = {"weights": "Tensor", "capacity": "Tensor", "slack": "Tensor?", "sizes": "Tensor", "options": "int"}
_SMOOTHING = {"gamma": "Tensor", "regularizer": "str"}


@dataclass(frozen=True)
class Signature:
    """What an operator takes and returns, by name; types are torch's.

    Attributes:
        own: tensors with one row per instance; theta is the first.
        sampled: those of them that have a dimension of samples in front of the batch.
        smoothed: whether gamma and a regularizer follow the lattice.
        options: what comes last.
        returns: the types of the results.
        samples: whether the results have a dimension of samples in front.
    """

    own: tuple[str, ...] = ("theta",)
    sampled: tuple[str, ...] = ()
    smoothed: bool = True
    options: dict[str, str] = field(default_factory=dict)
    returns: str = "Tensor"
    samples: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the arguments in eager mode."""
        return (*self.own, "lattice", *(_SMOOTHING if self.smoothed else ()), *self.options)

    @property
    def flat_types(self) -> dict[str, str]:
        """The types of the arguments, with the fields of the lattice instead of the lattice."""
        smoothing = _SMOOTHING if self.smoothed else {}
        return dict.fromkeys(self.own, "Tensor") | _LATTICE | smoothing | self.options

    @property
    def schema(self) -> str:
        return f"({', '.join(f'{kind} {name}' for name, kind in self.flat_types.items())}) -> {self.returns}"

    def flat(self, arguments: tuple[Any, ...]) -> list[Any]:
        """The arguments with the fields of the lattice instead of the lattice."""
        at = len(self.own)
        lattice = arguments[at]
        options = _COUNTS if lattice.counts else lattice.options
        parts = [lattice.weights, lattice.capacity, lattice.slack, _sizes(lattice), options]
        return [
            as_tensor(x) if isinstance(x, np.ndarray) else x for x in (*arguments[:at], *parts, *arguments[at + 1 :])
        ]

    def whole(self, flat: tuple[Any, ...]) -> list[Any]:
        """The reverse of :meth:`flat`."""
        at, end = len(self.own), len(self.own) + len(_LATTICE)
        return [*flat[:at], _lattice(*flat[at:end]), *flat[end:]]


_COUNTS = -1  # in place of options: items that all weigh 1


def _sizes(lattice: Lattice) -> Tensor:
    if lattice.sizes is None:
        return torch.stack([open_integer(x) for x in (lattice.reach, lattice.heaviest, *lattice.box)])
    return as_tensor(lattice.sizes) if isinstance(lattice.sizes, np.ndarray) else lattice.sizes


def _lattice(weights: Tensor, capacity: Tensor, slack: Tensor | None, sizes: Tensor, options: int) -> Lattice:
    return Lattice(weights, capacity, slack, None, None, max(options, 0), sizes=sizes, counts=options == _COUNTS)


def as_tensor(x: np.ndarray) -> Tensor:
    """Copies read-only arrays, of which torch warns; torch.compile does not know that flag."""
    return from_numpy(x if is_compiling() or x.flags.writeable else x.copy())


def open_integer(x: Any) -> Tensor:
    """A tensor of one integer, which may be one that torch.compile keeps open."""
    return x if isinstance(x, Tensor) else torch.full((), x, dtype=torch.int64)


class Kept:
    """What an operator keeps for its derivative.

    Attributes:
        own: the first of its own tensors; theta is the first of them.
        problem: lattice, gamma and regularizer.
        result: what was kept of its results; None if nothing was.
        wants_theta, wants_gamma: which gradients are needed.
    """

    __slots__ = ("gamma", "own", "problem", "result", "theta", "wants_gamma", "wants_theta")
    own: tuple[Tensor, ...]
    problem: tuple[Lattice, Any, str]
    result: Any
    theta: Tensor
    gamma: Any
    wants_theta: bool
    wants_gamma: bool


def define(
    name: str,
    signature: Signature,
    *,
    fake: Callable[..., Any],
    kernel: Callable[..., Any] | None = None,
    keep: int = 1,
    keep_of: Callable[..., Tensor | None] | None = None,
    backward: Callable[..., dict[str, Tensor | None] | Tensor] | None = None,
    jvp: Callable[..., Any] | None = None,
) -> Callable[..., Any]:
    """Registers ``torch.ops.knapgrad.<name>``; returns what to call, with arguments in the order of
    ``signature.names``.

    Args:
        fake: the shapes of the results, from the arguments.
        kernel: what to run on every device; None for the kernel of that name on each.
        keep: how many of its own tensors, from theta on, the derivative needs.
        keep_of: ``(output, *options) -> what it needs of the results``, a tensor or None.
        backward: ``(kept, *grads) -> gradients by name of the argument``, or that of theta alone.
        jvp: ``(kept, tangents by name) -> tangents of the results``.
    """
    qualified = f"knapgrad::{name}"
    torch.library.define(qualified, signature.schema, lib=_library, tags=[torch.Tag.pt2_compliant_tag])
    label = "knapgrad::value_and_relax" if name == "operator" else qualified  # in a profile
    at, end = len(signature.own), len(signature.own) + (2 if signature.smoothed else 1)  # theta .., lattice, gamma
    run, on_cpu = kernel or kernel_of(name, at), None if kernel else getattr(numba, name)

    def of_flat(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *flat: function(*signature.whole(flat))

    for device in _DEVICES:
        torch.library.impl(qualified, device.upper(), of_flat(run), lib=_library)
    torch.library.register_fake(qualified, of_flat(fake), lib=_library)
    operator = getattr(torch.ops.knapgrad, name).default
    torch.library.register_vmap(qualified, _vmap_rule(signature, operator), lib=_library)

    def run_plain(*arguments: Any) -> Any:
        """Calls the kernel directly, if the dispatcher would do nothing else."""
        if on_cpu is not None and type(arguments[at].weights) is np.ndarray:
            arrays = private.arrays_of(arguments)
            if arrays is not None:
                results = on_cpu(*arrays)
                return from_numpy(results) if type(results) is np.ndarray else tuple(map(from_numpy, results))
        if private.is_plain(arguments[:end]):  # options are tensors of ours
            if private.is_profiling():
                with torch.profiler.record_function(label):  # as the dispatcher would
                    return run(*arguments)
            return run(*arguments)
        with private.below_autograd():
            return operator(*signature.flat(arguments))

    if backward is None:

        def call_constant(*arguments: Any) -> Any:
            is_traced = is_compiling() or private.is_transforming()
            return operator(*signature.flat(arguments)) if is_traced else run_plain(*arguments)

        return call_constant

    parts = keep, keep_of, backward, jvp
    flat, whole = _Derivative(tuple(signature.flat_types), at, *parts), _Derivative(signature.names, at, *parts)
    torch.library.register_autograd(qualified, flat.backward, setup_context=flat.setup, lib=_library)

    def forward(ctx: Any, *arguments: Any) -> Any:
        output = run_plain(*arguments)
        whole.setup(ctx, arguments, output)
        return output

    eager = private.apply_of(_autograd_function(name, forward=forward, **whole.parts))
    functional = _autograd_function(name, forward=lambda *a: operator(*a), setup_context=flat.setup, **flat.parts)
    functional.vmap = staticmethod(_vmap_rule(signature, functional.apply))  # type: ignore[method-assign]

    def call(*arguments: Any) -> Any:
        if is_compiling():
            return operator(*signature.flat(arguments))
        if private.is_transforming():
            return functional.apply(*signature.flat(arguments))
        if is_grad_enabled():
            for x in arguments[:end]:
                if type(x) not in CONSTANTS and x.requires_grad:
                    return eager(*arguments)
        return eager(*arguments) if private.is_forward_mode() else run_plain(*arguments)

    return call


def define_plain(schema: str, function: Callable[..., Any], *, fake: Callable[..., Any], tags: list[Any]) -> Any:
    """An operator of tensors and numbers without a derivative, the same on every device."""
    name = schema.split("(")[0]
    torch.library.define(f"knapgrad::{name}", schema[len(name) :], lib=_library, tags=tags)
    torch.library.impl(f"knapgrad::{name}", "default", function, lib=_library)
    torch.library.register_fake(f"knapgrad::{name}", fake, lib=_library)
    return getattr(torch.ops.knapgrad, name).default


class _Derivative:
    """The derivative of an operator as autograd wants it: what is kept, and gradients in the order of the arguments.

    A small call notices every line of it, hence places in place of names.
    """

    def __init__(
        self,
        names: tuple[str, ...],
        at: int,  # where the problem begins, as a lattice or as its fields
        keep: int,
        keep_of: Callable[..., Tensor | None] | None,
        backward: Callable[..., dict[str, Tensor | None] | Tensor],
        jvp: Callable[..., Any] | None,
    ) -> None:
        self.names, self.at, self.keep, self.keep_of = names, at, keep, keep_of
        self._backward, self._jvp = backward, jvp
        self.places = {name: place for place, name in enumerate(names)}
        self.gamma, self.end = self.places["gamma"], self.places["regularizer"] + 1
        self.others = (None,) * (len(names) - 1)

    @property
    def parts(self) -> dict[str, Callable[..., Any]]:
        return {"backward": self.backward} | ({"jvp": self.jvp} if self._jvp else {})

    def setup(self, ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """Keeps tensors by autograd's rules, the rest as it is."""
        tensors, problem = inputs[: self.keep], inputs[self.at : self.end]
        places: tuple[int, ...] = ()
        if len(problem) > 3 or type(problem[1]) is not np.ndarray:  # the fields of a lattice, or a gamma to learn
            places = tuple(place for place, x in enumerate(problem) if isinstance(x, Tensor))
            tensors += tuple(problem[place] for place in places)
            problem = tuple(None if place in places else x for place, x in enumerate(problem))
        if self.keep_of is not None:
            result = self.keep_of(output, *inputs[self.end :])
            tensors += () if result is None else (result,)
        ctx.problem, ctx.places = problem, places
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors)
        if private.is_forward_mode():  # only then: it makes a cycle that would keep the output until it is collected
            ctx.save_for_forward(*tensors)

    def restore(self, ctx: Any) -> Kept:
        tensors, problem, places, end = ctx.saved_tensors, ctx.problem, ctx.places, self.keep
        if places:
            problem, end = list(problem), end + len(places)
            for place, x in zip(places, tensors[self.keep :]):
                problem[place] = x
        if len(problem) > 3:  # the fields of a lattice
            problem = _lattice(*problem[: len(_LATTICE)]), *problem[len(_LATTICE) :]
        kept = Kept()
        kept.problem, kept.theta, kept.gamma, kept.result = problem, tensors[0], problem[1], None
        kept.own = tensors
        if len(tensors) > self.keep:
            kept.own, kept.result = tensors[: self.keep], tensors[end] if tensors[end:] else None
        return kept

    def backward(self, ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        kept, needed = self.restore(ctx), ctx.needs_input_grad
        kept.wants_theta, kept.wants_gamma = needed[0], needed[self.gamma]
        found = self._backward(kept, *grads)
        return (found, *self.others) if isinstance(found, Tensor) else tuple(map(found.get, self.names))

    def jvp(self, ctx: Any, *tangents: Any) -> Any:
        return self._jvp(self.restore(ctx), dict(zip(self.names, tangents)))  # type: ignore[misc]


def _autograd_function(name: str, **parts: Callable[..., Any]) -> type[torch.autograd.Function]:
    methods = {key: staticmethod(part) for key, part in parts.items()}
    return type(f"knapgrad_{name}", (torch.autograd.Function,), methods)


def kernel_of(name: str, at: int) -> Callable[..., Any]:
    """The kernel of that name, which takes the lattice as its at-th argument, on the device of theta."""
    on_cpu = getattr(numba, name)

    def run(*arguments: Any) -> Any:
        if not arguments[0].is_cpu:
            return _run_on_cuda(name, at, arguments)
        given = list(arguments)
        for place, x in enumerate(arguments):
            if type(x) not in CONSTANTS:
                given[place] = x.numpy(force=True)
        if type(given[at].weights) is not np.ndarray:
            given[at] = _in_numpy(given[at].resolved)
        if len(given) > at + 1 and not (given[at + 1] > 0).all():  # in eager calls it was looked at
            raise ValueError(f"gamma must be positive, got {given[at + 1].min()}")
        results = on_cpu(*given)
        return tuple(map(from_numpy, results)) if type(results) is tuple else from_numpy(results)

    return run


def _in_numpy(lattice: Lattice) -> Lattice:
    """Values that were not known when a graph was compiled are checked here."""
    slack = None if lattice.slack is None else lattice.slack.long().numpy()
    lattice = lattice.replace(
        weights=lattice.weights.long().numpy(), capacity=lattice.capacity.long().numpy(), slack=slack
    )
    if (lattice.capacity < 0).any():
        instance = int(np.argmax(lattice.capacity < 0))
        raise ValueError(
            f"instance {instance} (counted over the flattened batch) has a limit that is not valid: a negative weight, "
            "capacity, k or at_least; a capacity above max_capacity; k above the number of items; required groups that "
            "exceed the capacity, or items that cannot reach at_least. Call the function once without compiling it: "
            "there the error says which, and gives the number"
        )
    return lattice


def _run_on_cuda(name: str, at: int, arguments: tuple[Any, ...]) -> Any:
    lattice = arguments[at].resolved
    return getattr(_cuda_kernels(), name)(*arguments[:at], lattice, *arguments[at + 1 :])


@cache
def _cuda_kernels() -> Any:
    try:
        from knapgrad.kernels.triton import from_torch
    except ImportError as error:
        raise ImportError(
            f"theta is on a CUDA device, and knapgrad's GPU kernels need Triton ({error}); it comes with torch's CUDA "
            "builds for Linux: install one of those, or `pip install triton` (on Windows `triton-windows`), or use "
            "theta.cpu()"
        ) from error
    return from_torch


def _vmap_rule(signature: Signature, call: Callable[..., Any]) -> Callable[..., Any]:
    """The batch may have any rank, so a vmapped dimension is one more: before the batch, after the samples."""

    def rule(info: Any, in_dims: tuple[int | None, ...], *arguments: Any) -> Any:
        rank = arguments[0].dim() - (in_dims[0] is not None)  # of theta, as the operator was called
        moved = []
        for name, x, dim in zip(signature.flat_types, arguments, in_dims):
            if not isinstance(x, Tensor):
                moved.append(x)
            elif name in signature.own:  # must have the dimension
                front = int(name in signature.sampled)
                if dim is None:
                    moved.append(x.unsqueeze(front).expand(*x.shape[:front], info.batch_size, *x.shape[front:]))
                else:
                    moved.append(x.movedim(dim, front))
            elif name in signature.options:
                moved.append(None)  # a table of other batches
            elif dim is None:  # constants broadcast
                moved.append(x)
            else:  # filled up, so that the new dimension is left of the whole batch
                x, full = x.movedim(dim, 0), rank - (name != "weights")
                moved.append(x.reshape(x.shape[0], *[1] * (full - x.dim() + 1), *x.shape[1:]))
        results = call(*moved)
        out = int(signature.samples)
        return results, (out,) * len(results) if isinstance(results, tuple) else out

    return rule
