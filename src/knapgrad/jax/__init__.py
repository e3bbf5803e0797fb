"""JAX arrays. The operations are in :mod:`knapgrad` and take them as they are, under every transformation."""

try:
    import jax as _jax  # noqa: F401
except ImportError as error:
    raise ImportError("knapgrad.jax needs JAX; install it with: pip install 'knapgrad[jax]'") from error
