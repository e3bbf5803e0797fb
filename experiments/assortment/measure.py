"""The time of a gradient estimate: candidates, target and Fenchel-Young gradient by the scores, for a batch of 32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import knapgrad as kg
from benchmarks import timing
from experiments.assortment.agents import EXPLORERS, Settings, Structured, masked, mix, sold_out
from experiments.assortment.environment import CAPACITY, STEPS, Stores
from experiments.assortment.policies import greedy

BASELINE = "SRL perturbed"


def measure(seconds: float) -> list[dict[str, Any]]:
    """All ways to explore in turn, on one thread, in stores where half of the customers have come."""
    timing.set_threads(1)
    settings, generator = Settings(), torch.Generator().manual_seed(0)
    stores = Stores(settings.batch)
    stores.reset(seed=0)
    for _ in range(STEPS // 2):
        stores.step(greedy(stores))
    observation = torch.from_numpy(stores.observation)[None]
    weights = torch.where(sold_out(observation[0]), CAPACITY + 1, torch.from_numpy(stores.weights)).numpy()
    scores = 5 * torch.randn(1, *stores.stock.shape, generator=generator)
    values = torch.randn(settings.candidates, 1, settings.batch, generator=generator)
    contestants: dict[tuple[str, str], Callable[[], Any]] = {}
    for name, explorer in EXPLORERS.items():
        agent = Structured(explorer, 1, settings, generator)

        def by_weight(explorer=explorer):
            constraint = kg.Knapsack(weights, CAPACITY)
            candidates, mean = explorer.explore(scores, constraint, 5.0, settings.candidates, generator)
            return mean - mix(candidates, values)

        def by_score(explorer=explorer):
            constraint = kg.Knapsack(stores.weights, CAPACITY)
            candidates, mean = explorer.explore(
                masked(scores, observation), constraint, 5.0, settings.candidates, generator
            )
            return mean - mix(candidates, values)

        def with_critic(agent=agent):
            return agent.estimate(masked(scores, observation), observation, stores.constraint)

        contestants["weight C + 1", name] = by_weight
        contestants["score -inf", name] = by_score
        contestants["score -inf, and the critic", name] = with_critic
    times = timing.take_turns(contestants, seconds)
    return [
        {
            "sold_out": way,
            "agent": name,
            "microseconds": timing.microseconds(measured),
            "times_faster_than_perturbed": timing.ratio(times[way, BASELINE], measured),
        }
        for (way, name), measured in times.items()
    ]
