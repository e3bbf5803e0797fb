"""Learn what items are worth from decisions alone.

A buyer sees the features of a day, values every item by a rule that we do not know, and buys the best selection that
the budget allows. We are shown features and purchases, never values, and train a network to predict values whose best
selection is the purchase. The Fenchel-Young loss, under each regularizer, meets a straight-through baseline: the exact
selection in the forward pass, the identity in the backward pass, squared distance to the purchase.

    python examples/learn_from_decisions.py --help
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch
from torch import Tensor, nn
from tqdm import tqdm

import knapgrad as kg

Loss = Callable[[Tensor, Tensor], Tensor]


@dataclass
class Arguments:
    seed: int = field(default=0, metadata={"help": "of the data and of the networks"})
    items: int = field(default=20, metadata={"help": "items to choose from"})
    features: int = field(default=8, metadata={"help": "features of a day"})
    train: int = field(default=1000, metadata={"help": "observed days"})
    test: int = field(default=1000, metadata={"help": "held-out days"})
    epochs: int = field(default=40, metadata={"help": "passes over the observed days"})
    batch: int = field(default=50, metadata={"help": "days a step"})
    learning_rate: float = field(default=3e-3, metadata={"help": "of Adam"})
    gamma: float = field(default=1.0, metadata={"help": "strength of the regularizers"})
    output: Path = field(default=Path("results"), metadata={"help": "folder for the figure"})


@dataclass
class Days:
    """Features ``(days, features)``, the hidden values and the purchases ``(days, items)``."""

    features: Tensor
    values: Tensor
    bought: Tensor


def main() -> None:
    arguments = parse()
    torch.set_num_threads(1)  # such small networks are slower on several
    budget, train, test = make_market(arguments)
    losses: dict[str, Loss] = {
        "Fenchel-Young, Shannon": fenchel_young(budget, kg.Shannon(arguments.gamma)),
        "Fenchel-Young, Gini": fenchel_young(budget, kg.Gini(arguments.gamma)),
        "Fenchel-Young, Tsallis": fenchel_young(budget, kg.Tsallis(arguments.gamma)),
        "straight-through": straight_through(budget),
    }
    print(f"{arguments.items} items, {arguments.train} observed days, {arguments.test} held out\n")
    rows, curves = [], {}
    for name, loss in losses.items():
        model, curve, seconds = fit(name, loss, budget, train, test, arguments)
        regret, exact = evaluate(model, budget, test)
        rows.append((name, regret, exact, seconds))
        curves[name] = curve

    print(f"\n{'':24} {'relative regret':>16} {'exact matches':>14} {'training':>9}")
    for name, regret, exact, seconds in rows:
        print(f"{name:24} {regret:>15.2%} {exact:>14.1%} {seconds:>7.1f} s")
    print(
        "\nRegret: the part of the best selection's true value that is lost. Exact: the same purchase, item for item."
    )
    print(f"Figure: {draw(curves, arguments.output)}")


def parse() -> Arguments:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for option in fields(Arguments):
        kind = type(option.default)
        text = f"{option.metadata['help']} ({option.default})"
        parser.add_argument("--" + option.name.replace("_", "-"), type=kind, default=option.default, help=text)
    return Arguments(**vars(parser.parse_args()))


def make_market(arguments: Arguments) -> tuple[kg.Knapsack, Days, Days]:
    """Prices in 3..8, a budget for half of everything, and a buyer whose values are not linear in the features."""
    generator = torch.Generator().manual_seed(arguments.seed)
    prices = torch.randint(3, 9, (arguments.items,), generator=generator)
    budget = kg.Knapsack(prices, int(prices.sum()) // 2)
    taste = torch.randn(arguments.features, arguments.items, generator=generator) / arguments.features**0.5

    def observe(days: int) -> Days:
        features = torch.randn(days, arguments.features, generator=generator)
        noise = 1 + 0.1 * torch.randn(days, arguments.items, generator=generator)
        values = prices * (1 + 0.5 * torch.tanh(features @ taste) ** 3 + 0.5 * features @ taste).clamp(min=0.1) * noise
        return Days(features, values, kg.solve(values, budget))

    return budget, observe(arguments.train), observe(arguments.test)


def fenchel_young(budget: kg.Knapsack, regularizer: kg.Shannon | kg.Gini | kg.Tsallis) -> Loss:
    """Convex in the predicted values; its gradient is relax(theta) - bought."""
    return lambda theta, bought: kg.fenchel_young_loss(theta, bought, budget, regularizer).mean()


def straight_through(budget: kg.Knapsack) -> Loss:
    def loss(theta: Tensor, bought: Tensor) -> Tensor:
        selected = theta + (kg.solve(theta.detach(), budget) - theta).detach()
        return (selected - bought).square().sum(-1).mean()

    return loss


def fit(
    name: str, loss: Loss, budget: kg.Knapsack, train: Days, test: Days, arguments: Arguments
) -> tuple[nn.Module, list[float], float]:
    """The trained network, its regret on the test days after each epoch, and the seconds that training took."""
    torch.manual_seed(arguments.seed)
    model = nn.Sequential(nn.Linear(arguments.features, 64), nn.ReLU(), nn.Linear(64, arguments.items))
    optimizer = torch.optim.Adam(model.parameters(), lr=arguments.learning_rate)
    curve = [evaluate(model, budget, test)[0]]
    loss(model(train.features[:1]), train.bought[:1]).backward()  # compiles kernels, the first time: not timed
    seconds = 0.0
    with tqdm(range(arguments.epochs), desc=f"{name:24}", unit="epoch") as bar:
        for _ in bar:
            start = time.perf_counter()
            for days in torch.randperm(arguments.train).split(arguments.batch):
                optimizer.zero_grad()
                loss(model(train.features[days]), train.bought[days]).backward()
                optimizer.step()
            seconds += time.perf_counter() - start
            curve.append(evaluate(model, budget, test)[0])
            bar.set_postfix(regret=f"{curve[-1]:.2%}", refresh=False)
    return model, curve, seconds


@torch.no_grad()
def evaluate(model: nn.Module, budget: kg.Knapsack, days: Days) -> tuple[float, float]:
    """Mean relative regret and rate of exact matches of the exact selections for the predicted values."""
    selected = kg.solve(model(days.features), budget)
    best = (days.values * days.bought).sum(-1)
    regret = (best - (days.values * selected).sum(-1)) / best
    exact = (selected == days.bought).all(-1)
    return regret.mean().item(), exact.double().mean().item()


def draw(curves: dict[str, list[float]], folder: Path) -> Path:
    figure, axes = plt.subplots(figsize=(6.5, 4), layout="constrained")
    for name, curve in curves.items():
        axes.plot([100 * regret for regret in curve], label=name, linestyle="--" if name == "straight-through" else "-")
    axes.set(xlabel="epoch", ylabel="relative regret on held-out days (%)", yscale="log")
    axes.set_yticks([0.5, 1, 2, 5, 10, 20], labels=["0.5", "1", "2", "5", "10", "20"])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "learn_from_decisions.png"
    figure.savefig(path, dpi=150)
    return path


if __name__ == "__main__":
    main()
