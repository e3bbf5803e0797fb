"""JAX arrays. The operations are in :mod:`knapgrad` and take them as they are, under every transformation."""

try:
    import jax as _jax
except ImportError as error:
    raise ImportError("knapgrad.jax needs JAX; install it with: pip install 'knapgrad[jax]'") from error
if _jax.__version_info__ < (0, 10):
    raise ImportError(
        f"knapgrad needs JAX 0.10 or later, found {_jax.__version__}; install it, with Python 3.11 or later, by: "
        "pip install 'knapgrad[jax]'"
    )
