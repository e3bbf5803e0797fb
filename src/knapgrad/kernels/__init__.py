"""The sweeps of :mod:`knapgrad.reference`, once per kind of hardware, with the same names, argument order and tags."""
