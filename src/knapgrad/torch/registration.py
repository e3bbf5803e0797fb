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
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

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
        parts = [lattice.weights, lattice.capacity, lattice.slack, _sizes(lattice), lattice.options]
        return [
            as_tensor(x) if isinstance(x, np.ndarray) else x for x in (*arguments[:at], *parts, *arguments[at + 1 :])
        ]

    def whole(self, flat: tuple[Any, ...]) -> list[Any]:
        """The reverse of :meth:`flat`."""
        at, end = len(self.own), len(self.own) + len(_LATTICE)
        return [*flat[:at], _lattice(*flat[at:end]), *flat[end:]]


def _sizes(lattice: Lattice) -> Tensor:
    if lattice.sizes is None:
        return torch.stack([open_integer(lattice.reach), open_integer(lattice.heaviest)])
    return as_tensor(lattice.sizes) if isinstance(lattice.sizes, np.ndarray) else lattice.sizes


def _lattice(weights: Tensor, capacity: Tensor, slack: Tensor | None, sizes: Tensor, options: int) -> Lattice:
    return Lattice(weights, capacity, slack, None, None, options, sizes)


def as_tensor(x: np.ndarray) -> Tensor:
    """Copies read-only arrays, of which torch warns; torch.compile does not know that flag."""
    return torch.from_numpy(x if torch.compiler.is_compiling() or x.flags.writeable else x.copy())


def open_integer(x: Any) -> Tensor:
    """A tensor of one integer, which may be one that torch.compile keeps open."""
    return x if isinstance(x, Tensor) else torch.full((), x, dtype=torch.int64)


Kept = SimpleNamespace  # what an operator keeps for its derivative, by name


def define(
    name: str,
    signature: Signature,
    *,
    fake: Callable[..., Any],
    kernel: Callable[..., Any] | None = None,
    keep: tuple[str, ...] = ("theta",),
    keep_of: Callable[..., dict[str, Any]] | None = None,
    backward: Callable[..., dict[str, Tensor | None]] | None = None,
    jvp: Callable[..., Any] | None = None,
) -> Callable[..., Any]:
    """Registers ``torch.ops.knapgrad.<name>``; returns what to call, with arguments in the order of
    ``signature.names``.

    Args:
        fake: the shapes of the results, from the arguments.
        kernel: what to run on every device; None for the kernel of that name on each.
        keep: arguments that the derivative needs, besides ``problem``: lattice, gamma and regularizer.
        keep_of: ``(output, **options) -> what else it needs``, tensors or None.
        backward: ``(kept, *grads) -> gradients by name of the argument``. ``kept.wants_theta`` and ``kept.wants_gamma``
            say which are needed.
        jvp: ``(kept, tangents by name) -> tangents of the results``.
    """
    qualified = f"knapgrad::{name}"
    torch.library.define(qualified, signature.schema, lib=_library, tags=[torch.Tag.pt2_compliant_tag])
    label = "knapgrad::value_and_relax" if name == "operator" else qualified  # in a profile
    at, end = len(signature.own), len(signature.own) + (2 if signature.smoothed else 1)  # theta .., lattice, gamma
    run = kernel or kernel_of(name, at)

    def of_flat(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *flat: function(*signature.whole(flat))

    for device in _DEVICES:
        torch.library.impl(qualified, device.upper(), of_flat(run), lib=_library)
    torch.library.register_fake(qualified, of_flat(fake), lib=_library)
    operator = getattr(torch.ops.knapgrad, name).default
    torch.library.register_vmap(qualified, _vmap_rule(signature, operator), lib=_library)

    def run_plain(*arguments: Any) -> Any:
        """Calls the kernel directly, if the dispatcher would do nothing else."""
        if private.is_plain(arguments[:end]):  # options are tensors of ours
            if private.is_profiling():
                with torch.profiler.record_function(label):  # as the dispatcher would
                    return run(*arguments)
            return run(*arguments)
        with private.below_autograd():
            return operator(*signature.flat(arguments))

    if backward is None:

        def call_constant(*arguments: Any) -> Any:
            is_traced = torch.compiler.is_compiling() or private.is_transforming()
            return operator(*signature.flat(arguments)) if is_traced else run_plain(*arguments)

        return call_constant

    flat = _Derivative(tuple(signature.flat_types), keep, tuple(signature.options), keep_of, backward, jvp)
    whole = _Derivative(signature.names, keep, tuple(signature.options), keep_of, backward, jvp)
    torch.library.register_autograd(qualified, flat.backward, setup_context=flat.setup, lib=_library)

    def forward(ctx: Any, *arguments: Any) -> Any:
        output = run_plain(*arguments)
        whole.setup(ctx, arguments, output)
        return output

    eager = private.apply_of(_autograd_function(name, forward=forward, **whole.parts))
    functional = _autograd_function(name, forward=lambda *a: operator(*a), setup_context=flat.setup, **flat.parts)
    functional.vmap = staticmethod(_vmap_rule(signature, functional.apply))  # type: ignore[method-assign]

    def call(*arguments: Any) -> Any:
        if torch.compiler.is_compiling():
            return operator(*signature.flat(arguments))
        if private.is_transforming():
            return functional.apply(*signature.flat(arguments))
        if torch.is_grad_enabled():
            for x in arguments[:end]:
                if type(x) not in CONSTANTS and x.requires_grad:
                    return eager(*arguments)
        return eager(*arguments) if private.is_forward_mode() else run_plain(*arguments)

    return call


class _Derivative:
    """The derivative of an operator as autograd wants it: what is kept, and gradients in the order of the arguments."""

    def __init__(
        self,
        names: tuple[str, ...],
        keep: tuple[str, ...],
        options: tuple[str, ...],
        keep_of: Callable[..., dict[str, Any]] | None,
        backward: Callable[..., dict[str, Tensor | None]],
        jvp: Callable[..., Any] | None,
    ) -> None:
        self.names, self.keep_of, self._backward, self._jvp = names, keep_of, backward, jvp
        always = ("lattice", *_LATTICE, *_SMOOTHING)
        self.kept = [(name, position) for position, name in enumerate(names) if name in keep or name in always]
        self.options = [(name, position) for position, name in enumerate(names) if name in options]
        self.gamma = names.index("gamma")

    @property
    def parts(self) -> dict[str, Callable[..., Any]]:
        return {"backward": self.backward} | ({"jvp": self.jvp} if self._jvp else {})

    def setup(self, ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """Keeps tensors by autograd's rules, the rest as it is."""
        plain, names, tensors = {}, [], []
        for name, position in self.kept:
            x = inputs[position]
            if type(x) not in CONSTANTS and isinstance(x, Tensor):
                names.append(name)
                tensors.append(x)
            else:
                plain[name] = x
        if self.keep_of is not None:
            more = self.keep_of(output, **{name: inputs[position] for name, position in self.options})
            plain |= {name: x for name, x in more.items() if x is None}
            names += [name for name, x in more.items() if x is not None]
            tensors += [x for x in more.values() if x is not None]
        ctx.plain, ctx.names = plain, names
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors)
        if private.is_forward_mode():  # only then: it makes a cycle that would keep the output until it is collected
            ctx.save_for_forward(*tensors)

    def restore(self, ctx: Any) -> Kept:
        kept = Kept(**ctx.plain)
        attributes = kept.__dict__
        attributes.update(zip(ctx.names, ctx.saved_tensors))
        if "lattice" not in attributes:
            kept.lattice = _lattice(*(attributes[name] for name in _LATTICE))
        kept.problem = kept.lattice, kept.gamma, kept.regularizer
        return kept

    def backward(self, ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        kept, needed = self.restore(ctx), ctx.needs_input_grad
        kept.wants_theta, kept.wants_gamma = needed[0], needed[self.gamma]
        found = self._backward(kept, *grads)
        return tuple(map(found.get, self.names))

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
        results = on_cpu(*given)
        return tuple(map(torch.from_numpy, results)) if type(results) is tuple else torch.from_numpy(results)

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
            f"instance {instance} (counted over the flattened batch) has a capacity or k, a least weight or a weight "
            "that is negative, or a capacity above max_capacity, or k above the number of items, or groups whose "
            "lightest options are above the capacity, or items that all together weigh less than at_least"
        )
    return lattice


def _run_on_cuda(name: str, at: int, arguments: tuple[Any, ...]) -> Any:
    run, lattice = getattr(_cuda_kernels(), name), arguments[at]
    if lattice.reach is None:
        return run(*arguments[:at], lattice.resolved, *arguments[at + 1 :])
    return run(*arguments)


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
