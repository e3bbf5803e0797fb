"""Layers, a loss and a distribution for torch. The operations themselves are in :mod:`knapgrad`."""
