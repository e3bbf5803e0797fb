"""The agents: what they try, and how they learn from it.

Structured reinforcement learning (Hoppe et al., arXiv:2505.19053) draws candidates around the actor's scores, mixes
them by softmax of the critic's Q-values into a target, and moves the scores towards it along a Fenchel-Young gradient.
It draws and differentiates either by perturbation or, exactly and from one table, by our operators. PPO takes the
scores with Gaussian noise for its actions, and the solver for a part of the environment.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

import knapgrad as kg
from experiments.assortment.environment import FEATURES
from experiments.assortment.networks import Actor, Critic


@dataclass(frozen=True)
class Settings:
    """The paper's appendix; below the line, and in networks.py, what it leaves open."""

    episodes: int = 10_000
    batch: int = 32
    updates: int = 10  # after each episode
    memory: int = 125  # episodes: 10^4 transitions
    learning_rate: float = 8e-5
    candidates: int = 32
    strength: tuple[float, float] = (5.0, 1.0)  # of regularization or perturbation, in the first and last episode
    temperature: tuple[float, float] = (1.0, 0.5)
    ppo_updates: int = 100
    ppo_noise: tuple[float, float] = (2.0, 1.0)
    ppo_clip: float = 0.2
    # ---
    ppo_memory: int = 20
    discount: float = 0.99


class Batch(NamedTuple):
    """Transitions, (replicas, batch, ...)."""

    observation: Tensor
    action: Tensor  # what was displayed; for PPO the noisy scores
    mean: Tensor  # the scores without noise
    revenue: Tensor
    future: Tensor  # discounted revenue from the customers after


class Agent:
    """An actor and a critic in several replicas. What is annealed follows ``progress``, from 0 to 1."""

    memory: int  # episodes
    updates: int  # after each

    def __init__(self, replicas: int, settings: Settings, generator: torch.Generator) -> None:
        self.settings, self.generator, self.progress = settings, generator, 0.0
        self.actor, self.critic = Actor(replicas, generator), Critic(replicas, generator)
        self.parameters = [*self.actor.parameters(), *self.critic.parameters()]
        self.optimizer = torch.optim.Adam(self.parameters, lr=settings.learning_rate, fused=True)

    def act(self, observation: Tensor, constraint: kg.Knapsack) -> tuple[Tensor, Tensor, Tensor]:
        """What is displayed, the action and the scores, (replicas, batch, items) each."""
        raise NotImplementedError

    def update(self, batch: Batch, constraint: kg.Knapsack) -> None:
        raise NotImplementedError

    def annealed(self, ends: tuple[float, float]) -> float:
        return ends[0] + (ends[1] - ends[0]) * self.progress

    def _step(self, output: Tensor, gradient: Tensor | None, values: Tensor, batch: Batch) -> None:
        """One step of Adam for both networks: along a gradient by an output of the actor, which may be a loss, and
        along that of the critic's squared error."""
        seen = torch.stack([batch.revenue, batch.future], -1)[:, :, None]
        critic_loss = ((values - seen).square() / torch.tensor([10.0, 1000.0])).mean(1).sum()
        self.optimizer.zero_grad()
        torch.autograd.backward([output, critic_loss], [gradient, None])
        self.optimizer.step()


def sold_out(observation: Tensor) -> Tensor:
    return observation[..., FEATURES.index("stock")] == 0


def masked(scores: Tensor, observation: Tensor) -> Tensor:
    """-inf for what is sold out, which keeps it out as the paper's weight C + 1 does."""
    return scores.masked_fill(sold_out(observation), -torch.inf)


class Exact:
    """Exploration by our operators: samples, and their exact mean, from one table."""

    def __init__(self, regularizer: type[kg.Regularizer]) -> None:
        self.regularizer = regularizer

    def draw(self, scores: Tensor, constraint: kg.Knapsack, strength: float, generator: torch.Generator) -> Tensor:
        """One selection (*batch, items) to try."""
        return kg.sample(scores, constraint, self.regularizer(strength), rng=generator)

    def explore(
        self, scores: Tensor, constraint: kg.Knapsack, strength: float, candidates: int, generator: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        """Candidates (candidates, *batch, items), and the relaxed selection (*batch, items)."""
        selections = kg.torch.SubsetDistribution(scores, constraint, self.regularizer(strength), validate_args=False)
        return selections.sample((candidates,), generator), selections.mean


class Perturbed:
    """Exploration by Gaussian noise: best selections, and their mean estimated from as many others."""

    def draw(self, scores: Tensor, constraint: kg.Knapsack, strength: float, generator: torch.Generator) -> Tensor:
        return kg.solve(scores + strength * torch.randn(scores.shape, generator=generator), constraint)

    def explore(
        self, scores: Tensor, constraint: kg.Knapsack, strength: float, candidates: int, generator: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        chosen = self.draw(scores.expand(2 * candidates, *scores.shape), constraint, strength, generator)
        return chosen[:candidates], chosen[candidates:].mean(0)


class Structured(Agent):
    def __init__(
        self, explorer: Exact | Perturbed, replicas: int, settings: Settings, generator: torch.Generator
    ) -> None:
        super().__init__(replicas, settings, generator)
        self.explorer, self.memory, self.updates = explorer, settings.memory, settings.updates

    def act(self, observation: Tensor, constraint: kg.Knapsack) -> tuple[Tensor, Tensor, Tensor]:
        scores = self.actor(observation)
        strength = self.annealed(self.settings.strength)
        display = self.explorer.draw(masked(scores, observation), constraint, strength, self.generator)
        return display, display, scores

    def update(self, batch: Batch, constraint: kg.Knapsack) -> None:
        scores = self.actor(batch.observation)
        fixed = masked(scores.detach(), batch.observation)
        gradient = self.estimate(fixed, batch.observation, constraint, self.generator)
        values = self.critic(batch.observation, batch.action[:, :, None])
        self._step(scores, gradient / scores.shape[1], values, batch)

    @torch.no_grad()
    def estimate(
        self, scores: Tensor, observation: Tensor, constraint: kg.Knapsack, generator: torch.Generator
    ) -> Tensor:
        """The gradient of the Fenchel-Young loss by the scores (replicas, batch, items): relaxed selection - target."""
        strength, temperature = self.annealed(self.settings.strength), self.annealed(self.settings.temperature)
        candidates, mean = self.explorer.explore(scores, constraint, strength, self.settings.candidates, generator)
        values = self.critic(observation, candidates.movedim(0, 2)).sum(-1).movedim(-1, 0)
        return mean - mix(candidates, values / temperature)


def mix(candidates: Tensor, values: Tensor) -> Tensor:
    """Candidates (candidates, *batch, items) weighted by softmax of their values (candidates, *batch)."""
    return (torch.softmax(values, 0)[..., None] * candidates).sum(0)


class PPO(Agent):
    def __init__(self, replicas: int, settings: Settings, generator: torch.Generator) -> None:
        super().__init__(replicas, settings, generator)
        self.memory, self.updates = settings.ppo_memory, settings.ppo_updates

    def act(self, observation: Tensor, constraint: kg.Knapsack) -> tuple[Tensor, Tensor, Tensor]:
        scores = self.actor(observation)
        noise = torch.randn(scores.shape, generator=self.generator)
        noisy = scores + self.annealed(self.settings.ppo_noise) * noise
        return kg.solve(masked(noisy, observation), constraint), noisy, scores

    def update(self, batch: Batch, constraint: kg.Knapsack) -> None:
        scores = self.actor(batch.observation)
        stock = ~sold_out(batch.observation)  # as if all were displayed: a value of the state alone
        values = self.critic(batch.observation, stock.float()[:, :, None])
        advantage = (batch.revenue + batch.future - values.detach().sum(-1).squeeze(-1)).unsqueeze(-1)
        advantage = (advantage - advantage.mean(1, keepdim=True)) / (advantage.std(1, keepdim=True) + 1e-6)
        change = (batch.action - batch.mean).square() - (batch.action - scores).square()
        ratio = (change.sum(-1, keepdim=True) / (2 * self.annealed(self.settings.ppo_noise) ** 2)).exp()
        clipped = ratio.clamp(1 - self.settings.ppo_clip, 1 + self.settings.ppo_clip)
        loss = -torch.minimum(ratio * advantage, clipped * advantage).mean(1).sum()
        self._step(loss, None, values, batch)


EXPLORERS: dict[str, Exact | Perturbed] = {
    "SRL Shannon": Exact(kg.Shannon),
    "SRL Gini": Exact(kg.Gini),
    "SRL Tsallis": Exact(kg.Tsallis),
    "SRL perturbed": Perturbed(),
}
AGENTS: dict[str, Callable[[int, Settings, torch.Generator], Agent]] = {
    **{name: partial(Structured, explorer) for name, explorer in EXPLORERS.items()},
    "PPO": PPO,
}
