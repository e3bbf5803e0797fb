"""Small networks in several replicas, trained side by side: one call for all costs little more than for one.

Every tensor has the replicas in front. Replicas share nothing, and Adam treats each weight by itself, so each is
trained as if it were alone.
"""

from __future__ import annotations

from copy import deepcopy
from itertools import pairwise

import torch
from torch import Tensor, nn

from experiments.assortment.environment import FEATURES

HIDDEN = 32


class Linear(nn.Module):
    """(replicas, ..., inputs) to (replicas, ..., outputs), with the initial weights of torch's own layer."""

    def __init__(self, replicas: int, inputs: int, outputs: int, generator: torch.Generator) -> None:
        super().__init__()
        bound = inputs**-0.5
        for name, rows in (("weight", inputs), ("bias", 1)):
            initial = torch.empty(replicas, rows, outputs).uniform_(-bound, bound, generator=generator)
            self.register_parameter(name, nn.Parameter(initial))

    def forward(self, x: Tensor) -> Tensor:
        return torch.baddbmm(self.bias, x.flatten(1, -2), self.weight).reshape(*x.shape[:-1], -1)


def layers(replicas: int, *sizes: int, generator: torch.Generator) -> nn.Sequential:
    """Linear layers with ReLU between them."""
    linear = [Linear(replicas, *ends, generator=generator) for ends in pairwise(sizes)]
    return nn.Sequential(*(module for layer in linear for module in (layer, nn.ReLU())))[:-1]


class Actor(nn.Module):
    """Observations (replicas, batch, items, features) to scores (replicas, batch, items), each item by itself."""

    def __init__(self, replicas: int, generator: torch.Generator) -> None:
        super().__init__()
        self.score = layers(replicas, len(FEATURES), HIDDEN, HIDDEN, 1, generator=generator)

    def forward(self, observation: Tensor) -> Tensor:
        return self.score(observation).squeeze(-1)

    def alone(self, replica: int) -> Actor:
        """One of the replicas."""
        actor = deepcopy(self)
        for parameter in actor.parameters():
            parameter.data = parameter.data[replica : replica + 1]
        return actor


class Critic(nn.Module):
    """Revenue from the next customer, and discounted revenue from those after: (replicas, batch, displays, 2).

    Of observations (replicas, batch, items, features) and displays (replicas, batch, displays, items). Items are
    embedded one by one; those that are displayed are added up, and all of the store.
    """

    def __init__(self, replicas: int, generator: torch.Generator) -> None:
        super().__init__()
        self.embed = layers(replicas, len(FEATURES), HIDDEN, HIDDEN, generator=generator)
        self.shown, self.store = (Linear(replicas, HIDDEN, HIDDEN, generator) for _ in range(2))
        self.head = Linear(replicas, HIDDEN, 2, generator)

    def forward(self, observation: Tensor, displays: Tensor) -> Tensor:
        items = self.embed(observation).relu()
        hidden = self.shown(displays @ items / 5) + self.store(items.mean(-2, keepdim=True))
        return self.head(hidden.relu()) * torch.tensor([10.0, 100.0])  # within reach of small weights
