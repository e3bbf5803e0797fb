"""A store that displays items under a capacity, to customers who change what the next ones want.

The dynamic assortment problem of the paper's section 6.2, built on that of Hoppe et al. (arXiv:2505.19053) with weights
instead of a number of items. In each of 80 steps one customer comes, buys one of the displayed items or none, by a
multinomial logit model with hidden coefficients; the reward is the price. What is bought is one less in stock, gets
more satisfying by 1%, and hyped by 2%; what was bought 2 to 5 steps ago loses 0.5% of its hype each time.

:class:`Stores` is many episodes at once, in NumPy; :class:`Store` is one of them as a plain Gymnasium environment.
"""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box, MultiBinary
from gymnasium.vector import AutoresetMode, VectorEnv

import knapgrad as kg

ITEMS, STEPS, CAPACITY, STOCK = 20, 80, 40, 5
CHOICE = {"first": 0.3, "second": 0.5, "hype": 0.6, "satisfaction": -0.4, "price": -0.8}  # hidden from the agents
HYPE_GROWTH = np.array([0.02, -0.005, -0.005, -0.005, -0.005])  # by purchases 1 to 5 steps ago
FEATURES = (
    "first", "second", "hype", "satisfaction", "price", "time", "hype change", "satisfaction change",
    "hype since the start", "satisfaction since the start", "stock", "weight",
)  # fmt: skip
WEIGHTS_SEED = 1090  # the first whose weights have as many feasible assortments as the paper's: 989,034


def draw_weights(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(1, 6, ITEMS)


def count_feasible(weights: np.ndarray, capacity: int = CAPACITY) -> int:
    """How many assortments fit, all in stock."""
    ways = np.zeros(capacity + 1, dtype=np.int64)
    ways[0] = 1
    for weight in weights:
        ways[weight:] += ways[:-weight].copy()
    return int(ways.sum())


class Stores(VectorEnv):
    """``num_envs`` episodes side by side, all of the same length. Arrays are (num_envs, items).

    An action is what to display, zeros and ones. If it does not fit, or has an item that is sold out, nothing is
    displayed, and ``info["feasible"]`` says so. An episode begins with ``reset``, which draws prices, the two static
    features and the first hype and satisfaction, each uniform in [1, 10], anew; the weights stay.
    """

    metadata = {"autoreset_mode": AutoresetMode.DISABLED}  # noqa: RUF012

    def __init__(self, num_envs: int, weights: np.ndarray | None = None, capacity: int = CAPACITY) -> None:
        self.weights = draw_weights(WEIGHTS_SEED) if weights is None else np.asarray(weights)
        self.capacity, self.num_envs, self.step_count = capacity, num_envs, STEPS
        self.constraint = kg.Knapsack(self.weights, capacity)
        items = len(self.weights)
        self.single_observation_space = Box(-5.0, 5.0, (items, len(FEATURES)), np.float32)
        self.single_action_space = MultiBinary(items)
        self.observation_space = Box(-5.0, 5.0, (num_envs, items, len(FEATURES)), np.float32)
        self.action_space = MultiBinary((num_envs, items))

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        shape = (self.num_envs, len(self.weights))
        first, second, hype, satisfaction, self.prices = self.np_random.uniform(1, 10, (5, *shape))
        self.static_utility = CHOICE["first"] * first + CHOICE["second"] * second + CHOICE["price"] * self.prices
        self.hype, self.satisfaction = hype, satisfaction
        self.stock = np.full(shape, STOCK)
        self.step_count = 0
        self.bought = np.full((5, self.num_envs), -1)  # what was bought 1 to 5 steps ago, -1 for nothing
        self.start = np.stack([hype, satisfaction])
        self.change = np.zeros_like(self.start)
        self.observation = np.empty((*shape, len(FEATURES)), np.float32)
        for column, static in enumerate((first, second)):
            self.observation[..., column] = static / 10
        self.observation[..., FEATURES.index("price")] = self.prices / 10
        self.observation[..., FEATURES.index("weight")] = self.weights / self.capacity
        return self._observe(), {}

    def step(self, display: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        if self.step_count == STEPS:
            raise RuntimeError("no episode has begun, or all steps are made: call reset")
        display = np.asarray(display, dtype=np.float64)
        if display.shape != self.stock.shape:
            raise ValueError(f"an action is {self.stock.shape}, zeros and ones for every item, got {display.shape}")
        if not ((display == 0) | (display == 1)).all():
            raise ValueError("an action has zeros and ones alone")
        feasible = (display @ self.weights <= self.capacity) & ~(display * self.sold_out).any(-1)
        bought = self._customers_choose(display * feasible[:, None])
        buyers = np.flatnonzero(bought >= 0)
        items = bought[buyers]
        reward = np.zeros(self.num_envs)
        reward[buyers] = self.prices[buyers, items]
        self._change_features(bought, buyers, items)
        self.stock[buyers, items] -= 1
        self.step_count += 1
        over = np.full(self.num_envs, self.step_count == STEPS)
        return self._observe(), reward, over, np.zeros_like(over), {"feasible": feasible, "bought": bought}

    @property
    def sold_out(self) -> np.ndarray:
        return self.stock == 0

    @property
    def utility(self) -> np.ndarray:
        """What the customer sees in each item. Agents must not look; the expert does."""
        return self.static_utility + CHOICE["hype"] * self.hype + CHOICE["satisfaction"] * self.satisfaction

    def _customers_choose(self, display: np.ndarray) -> np.ndarray:
        """What each buys, or -1: with v = exp(utility) of what is displayed, i has probability v_i / (1 + sum v)."""
        reaches = np.cumsum(display * np.exp(self.utility), axis=-1)
        at = self.np_random.random(self.num_envs) * (1 + reaches[:, -1])
        bought = (reaches <= at[:, None]).sum(-1)
        return np.where(bought < reaches.shape[1], bought, -1)

    def _change_features(self, bought: np.ndarray, buyers: np.ndarray, items: np.ndarray) -> None:
        self.bought = np.concatenate([bought[None], self.bought[:-1]])
        growth = np.ones((self.num_envs, self.hype.shape[1] + 1))  # in the last column: no purchase, -1
        np.add.at(growth, (np.arange(self.num_envs), self.bought), HYPE_GROWTH[:, None])
        before = np.stack([self.hype, self.satisfaction])
        self.hype = self.hype * growth[:, :-1]
        self.satisfaction = self.satisfaction.copy()
        self.satisfaction[buyers, items] *= 1.01
        self.change = np.stack([self.hype, self.satisfaction]) - before

    def _observe(self) -> np.ndarray:
        now = np.stack([self.hype, self.satisfaction])
        self.observation[..., 2:4] = np.moveaxis(now / 10, 0, -1)
        self.observation[..., 5] = (1 + 9 * self.step_count / STEPS) / 10
        self.observation[..., 6:8] = np.moveaxis(self.change / 10, 0, -1)
        self.observation[..., 8:10] = np.moveaxis((now - self.start) / 10, 0, -1)
        self.observation[..., 10] = self.stock / STOCK
        return self.observation.copy()


class Store(gymnasium.Env):
    """One episode at a time, as Gymnasium has it."""

    metadata = {"render_modes": []}  # noqa: RUF012

    def __init__(self) -> None:
        self.stores = Stores(1)
        self.observation_space = self.stores.single_observation_space
        self.action_space = self.stores.single_action_space

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self.stores.np_random = self.np_random
        observation, info = self.stores.reset()
        return observation[0], info

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        observation, reward, over, _, info = self.stores.step(np.asarray(action)[None])
        return observation[0], float(reward[0]), bool(over[0]), False, {name: x[0] for name, x in info.items()}


gymnasium.register("knapgrad/Assortment-v0", entry_point=f"{__name__}:Store", vector_entry_point=f"{__name__}:Stores")
