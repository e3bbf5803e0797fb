"""Layers, a loss and a distribution for torch. The operations themselves are in :mod:`knapgrad` and take tensors."""

try:
    import torch as _torch  # noqa: F401
except ImportError as error:
    raise ImportError("knapgrad.torch needs PyTorch; install it with: pip install 'knapgrad[torch]'") from error

import knapgrad.torch.divergence  # noqa: F401  registers it with torch.distributions
from knapgrad.torch.distribution import SubsetDistribution
from knapgrad.torch.modules import FenchelYoungLoss, GammaSchedule, Relax, Sample

__all__ = ["FenchelYoungLoss", "GammaSchedule", "Relax", "Sample", "SubsetDistribution"]
