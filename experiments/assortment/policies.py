"""Policies without learning: what to display, (episodes, items), from the state of the stores."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

import knapgrad as kg
from experiments.assortment.environment import STEPS, Stores

Policy = Callable[[Stores], np.ndarray]


def best(scores: np.ndarray, stores: Stores) -> np.ndarray:
    """The assortment with the highest sum of scores, exactly, of what is in stock.

    A score of -inf keeps an item out just as the paper's weight C + 1 does, and lets all stores share their weights,
    which the solver puts to use.
    """
    return kg.solve(np.where(stores.sold_out, -np.inf, scores), stores.constraint)


def greedy(stores: Stores) -> np.ndarray:
    return best(stores.prices, stores)


def at_random(stores: Stores) -> np.ndarray:
    """The best by random scores: as many items as fit. The scores must not move the customers' random numbers."""
    return best(np.random.default_rng(stores.step_count).random(stores.stock.shape), stores)


def expert(stores: Stores) -> np.ndarray:
    return highest_revenue(stores.utility, stores)[0]


def highest_revenue(utility: np.ndarray, stores: Stores) -> tuple[np.ndarray, np.ndarray]:
    """The assortment with the highest expected revenue of one customer, exactly, and that revenue (episodes,).

    With v = exp(utility), the revenue of y is the ratio <v s, y> / (1 + <v, y>) of two linear functions. Dinkelbach: if
    no y makes <v (s - r), y> - r positive, r is the highest; else the y that makes it largest has a higher revenue,
    which is the next r. Each round is one exact knapsack in place of the enumeration of all assortments.
    """
    v = np.exp(utility)
    revenue = np.zeros(len(v))
    while True:
        display = best(v * (stores.prices - revenue[:, None]), stores)
        higher = (display * v * stores.prices).sum(-1) / (1 + (display * v).sum(-1))
        if not (higher > revenue * (1 + 1e-12)).any():
            return display, higher
        revenue = np.maximum(revenue, higher)


POLICIES: dict[str, Policy] = {"greedy": greedy, "random": at_random, "expert": expert}


def play(policy: Policy, stores: Stores, seed: int) -> np.ndarray:
    """Revenue (episodes,) of an episode in each store. A seed has the same items and customers for every policy."""
    stores.reset(seed=seed)
    revenue = np.zeros(stores.num_envs)
    for _ in range(STEPS):
        revenue += stores.step(policy(stores))[1]
    return revenue
