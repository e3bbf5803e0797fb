"""Triton's compiler for an H100 or H200, on a machine without a GPU."""

from __future__ import annotations

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver


class Device:
    """As much of a driver as the compiler asks for."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


def use() -> None:
    """From now on, in this process."""
    driver.set_active(Device())
