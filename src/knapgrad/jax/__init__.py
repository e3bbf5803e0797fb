"""A distribution and layers for JAX. The operations are in :mod:`knapgrad` and take its arrays as they are, under every
transformation; constraints and regularizers are pytrees."""

from typing import Any

from knapgrad.forks import imported

__all__ = ["Relax", "Sample", "SubsetDistribution"]

try:
    import jax as _jax
except ImportError as error:
    raise ImportError("knapgrad.jax needs JAX; install it with: pip install 'knapgrad[jax]'") from error
if _jax.__version_info__ < (0, 10):
    raise ImportError(
        f"knapgrad needs JAX 0.10 or later, found {_jax.__version__}; install it, with Python 3.11 or later, by: "
        "pip install 'knapgrad[jax]'"
    )

_PLACES = {"Relax": "layers", "Sample": "layers", "SubsetDistribution": "distribution"}


def __getattr__(name: str) -> Any:
    """Imported when they are used: :mod:`knapgrad` itself imports parts of this package."""
    if name in _PLACES:
        return getattr(imported(f"knapgrad.jax.{_PLACES[name]}"), name)
    raise AttributeError(f"module 'knapgrad.jax' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
