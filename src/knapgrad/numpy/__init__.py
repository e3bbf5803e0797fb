"""NumPy arrays. The operations are in :mod:`knapgrad` and take them as they are."""
