"""The time of a gradient estimate: candidates, target and Fenchel-Young gradient by the scores, for a batch of 32."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

import knapgrad as kg
from experiments.assortment.agents import EXPLORERS, Settings, Structured, masked, mix
from experiments.assortment.environment import CAPACITY, STEPS, Stores
from experiments.assortment.policies import Policy, greedy, play
from measuring import clocks

BASELINE = "SRL perturbed"


def measure(seconds: float) -> list[dict[str, Any]]:
    """All ways to explore in turn, on one thread, in stores where half of the customers have come."""
    clocks.set_threads(1)
    settings, generator = Settings(), torch.Generator().manual_seed(0)
    stores = Stores(settings.batch)
    stores.reset(seed=0)
    for _ in range(STEPS // 2):
        stores.step(greedy(stores))
    observation = torch.from_numpy(stores.observation)[None]
    scores = 5 * torch.randn(1, *stores.stock.shape, generator=generator)
    values = torch.randn(settings.candidates, 1, settings.batch, generator=generator)
    ways = {
        "weight C + 1": (scores, np.where(stores.sold_out, CAPACITY + 1, stores.weights)),
        "score -inf": (masked(scores, observation), stores.weights),
    }
    contestants: dict[tuple[str, str], Callable[[], Any]] = {}
    for name, explorer in EXPLORERS.items():
        for way, (given, weights) in ways.items():

            @torch.no_grad()
            def estimate(explorer=explorer, given=given, weights=weights) -> Tensor:
                constraint = kg.Knapsack(weights, CAPACITY)
                strength, candidates = settings.strength[0], settings.candidates
                candidates, mean = explorer.explore(given, constraint, strength, candidates, generator)
                return mean - mix(candidates, values)

            contestants[way, name] = estimate
        agent = Structured(explorer, 1, settings, generator)
        contestants["score -inf, with critic", name] = partial(
            agent.estimate, ways["score -inf"][0], observation, stores.constraint, generator
        )
    times = clocks.take_turns(contestants, seconds)
    return [
        {
            "sold_out": way,
            "agent": name,
            "microseconds": clocks.microseconds(measured),
            "times_faster_than_perturbed": clocks.ratio(times[way, BASELINE], measured),
        }
        for (way, name), measured in times.items()
    ]


def transitions_a_second(policy: Policy, episodes: int, repeats: int) -> dict[str, float]:
    """Of the stores with a policy, on one thread."""
    clocks.set_threads(1)
    stores, found = Stores(episodes), []
    play(policy, Stores(1), 0)  # compiles
    for seed in range(repeats):
        start = time.perf_counter()
        play(policy, stores, seed)
        found.append(episodes * STEPS / (time.perf_counter() - start))
    return {key: round(value) for key, value in clocks.spread(np.array(found)).items()}
