"""The CPU kernels, in Numba: every sweep of :mod:`knapgrad.reference`, fused per group of instances, in SIMD."""

from knapgrad.kernels.numba.launch import entropy as entropy
from knapgrad.kernels.numba.launch import entropy_grad as entropy_grad
from knapgrad.kernels.numba.launch import frontier as frontier
from knapgrad.kernels.numba.launch import frontier_vjp as frontier_vjp
from knapgrad.kernels.numba.launch import log_prob as log_prob
from knapgrad.kernels.numba.launch import log_prob_vjp as log_prob_vjp
from knapgrad.kernels.numba.launch import mode as mode
from knapgrad.kernels.numba.launch import operator as operator
from knapgrad.kernels.numba.launch import relax as relax
from knapgrad.kernels.numba.launch import sample as sample
from knapgrad.kernels.numba.launch import solve as solve
from knapgrad.kernels.numba.launch import tabulate as tabulate
from knapgrad.kernels.numba.launch import vjp as vjp
