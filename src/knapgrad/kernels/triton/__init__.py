"""The GPU kernels, in Triton: every sweep of :mod:`knapgrad.reference`, fused per instance.

The step from row to row is the same wherever rows live: in registers (narrow rows), in scratch memory of the program
(wider ones), in the registers of several programs, a tile each (few instances of many items), or in memory that many
programs share, with one launch per item (rows beyond LARGEST_ROW). Choices among options have steps of their own, with
rows in scratch memory whatever their length; a frontier of items is one of choices between two. Several budgets are
items whose picks must not borrow between digits of a state (:func:`knapgrad.kernels.triton.steps.can_pick`).

What a kernel is compiled for has a name in capital letters: :mod:`knapgrad.kernels.triton.steps` lists them.

V is in float64 for every dtype of theta, because a decision is a difference of two large V. All else has theta's type.
Tags such as [V] name the equations in docs/math.md.
"""
