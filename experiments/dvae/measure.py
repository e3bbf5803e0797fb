"""The layer's share of a training step: forwards, penalty and backwards, batch 64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from experiments.dvae.data import CLASSES, Stacks
from experiments.dvae.training import Run, Settings
from measuring import clocks

IN_A_GRAPH = 20  # calls


def measure(data: Stacks, settings: Settings, bottlenecks: list[str], seconds: float) -> list[dict[str, Any]]:
    """Steps and layers in turn, each alone on the device; on a GPU in CUDA graphs."""
    on_gpu = data.rows.device.type == "cuda"
    contestants: dict[tuple[str, str], Callable[[], Any]] = {}
    for name in bottlenecks:
        run = Run(name, 0, data, settings)
        run.begin_epoch()
        generator = torch.Generator(data.rows.device).manual_seed(0)  # a graph needs one of its own
        for part, call, random in (("step", _step(run), run.generator), ("layer", _layer(run, generator), generator)):
            contestants[name, part] = _as_graph(call, random) if on_gpu else call
    calls = IN_A_GRAPH if on_gpu else 1
    times = {key: found / calls for key, found in clocks.take_turns(contestants, seconds).items()}
    return [
        {
            "bottleneck": name,
            "step_microseconds": clocks.microseconds(times[name, "step"]),
            "layer_microseconds": clocks.microseconds(times[name, "layer"]),
            "share": round(float(np.median(times[name, "layer"]) / np.median(times[name, "step"])), 4),
        }
        for name in bottlenecks
    ]


def _step(run: Run) -> Callable[[], Any]:
    def call() -> None:
        run.at.zero_()
        run.step()

    return call


def _layer(run: Run, generator: torch.Generator) -> Callable[[], Any]:
    bottleneck, device = run.model.bottleneck, run.data.rows.device
    shape = (run.settings.batch, CLASSES)
    theta = torch.randn(shape, generator=generator, device=device).requires_grad_()
    weight = torch.randn(shape, generator=generator, device=device)

    def call() -> Any:
        loss = (bottleneck(theta, generator) * weight).sum() + bottleneck.penalty(theta).sum()
        return torch.autograd.grad(loss, theta)

    return call


def _as_graph(call: Callable[[], Any], generator: torch.Generator) -> Callable[[], None]:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    graph.register_generator_state(generator)
    with torch.cuda.graph(graph, stream=stream):
        results = [call() for _ in range(IN_A_GRAPH)]

    def replay(_kept: Any = (call, generator, results)) -> None:
        """A graph keeps none of the memory that it reads and writes."""
        graph.replay()
        torch.cuda.synchronize()

    return replay
