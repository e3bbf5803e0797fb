"""How many bits does each layer of a network need? The best allocation, for every size at once.

Each layer of a small network that reads digits is quantised alone, to 2, 3, 4, 6, 8 and 16 bits, and the loss that this
adds is measured. One option per layer within a number of bytes is a multiple-choice knapsack: `kg.solve` finds the
allocation that adds the least, and `kg.frontier` the least for every number of bytes, next to HiGHS, a greedy rule and
the same bits for all. All these add up what layers cost alone. The last allocation sees what they do to one another: it
is learned from the loss of the whole network, through the relaxed choice.

    python examples/bit_allocation.py --help
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch
from matplotlib.figure import Figure
from scipy.optimize import milp
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from tqdm import trange

import knapgrad as kg

BITS, ONE = np.array([2, 3, 4, 6, 8, 16]), np.eye(6)


def quantise(weight: Tensor, bits: int) -> Tensor:
    """Symmetric and uniform, with the scale that has the least squared error."""
    top = 2 ** (bits - 1) - 1
    scales = weight.abs().max() / top * torch.linspace(0.1, 1, 37)
    rounded = [(weight / scale).round().clamp(-top, top) * scale for scale in scales]
    return min(rounded, key=lambda tried: float((tried - weight).square().sum()))


def greedy(losses: np.ndarray, sizes: np.ndarray, budget: float) -> np.ndarray:
    """From the fewest bits on, the change that saves the most loss per byte and fits, until there is none."""
    chosen = ONE[[0] * len(losses)]
    while True:
        saved = (chosen * losses).sum(-1, keepdims=True) - losses
        more = sizes - (chosen * sizes).sum(-1, keepdims=True)
        fits = (saved > 0) & (more > 0) & (more <= budget - (chosen * sizes).sum())
        if not fits.any():
            return chosen
        ratios = np.divide(saved, more, where=fits, out=np.zeros_like(saved))
        layer, option = np.unravel_index(ratios.argmax(), ratios.shape)
        chosen[layer] = ONE[option]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="of the network and of the split of the data (0)")
    parser.add_argument("--budget", type=float, default=13_000, help="bytes; 10372 are 2 bits per weight (13000)")
    parser.add_argument("--epochs", type=int, default=30, help="of the network, and then of the allocation (30)")
    parser.add_argument("--output", type=Path, default=Path("results"), help="folder for the figure (results)")
    given = parser.parse_args()
    torch.manual_seed(given.seed)
    torch.set_num_threads(1)  # such small networks are slower on several
    digits = load_digits()
    images, labels = torch.tensor(digits.images).float().unsqueeze(1) / 16, torch.tensor(digits.target)
    train, test = torch.randperm(len(labels)).split([1200, 597])
    first = nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)
    second = nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)
    last = nn.Flatten(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10)
    network = nn.Sequential(*first, *second, *last)
    optimizer = torch.optim.Adam(network.parameters(), lr=2e-3)
    for _ in trange(given.epochs, desc="training the network", unit="epoch"):
        for batch in train[torch.randperm(len(train))].split(50):
            optimizer.zero_grad()
            cross_entropy(network(images[batch]), labels[batch]).backward()
            optimizer.step()

    # What each layer alone adds to the loss at each number of bits, and its bytes. Biases stay as they are.
    layers = {name: weight for name, weight in network.requires_grad_(False).named_parameters() if weight.ndim > 1}
    options = {name: torch.stack([quantise(weight, bits) for bits in BITS]) for name, weight in layers.items()}
    sizes = np.array([weight.numel() * BITS / 8 for weight in layers.values()])

    def measure(weights: dict[str, Tensor]) -> tuple[float, float]:
        out = torch.func.functional_call(network, weights, images)
        return cross_entropy(out[train], labels[train]).item(), (out.argmax(1) == labels)[test].double().mean().item()

    loss, accuracy = measure({})
    losses = np.array([[measure({name: one})[0] - loss for one in many] for name, many in options.items()])
    print(f"\nLoss {loss:.4f}, test accuracy {accuracy:.1%}. One layer alone adds to the loss, at so many bits:")
    print(f"{'layer':13} {'weights':>8}" + "".join(f"{bits:9}" for bits in BITS))
    for weight, row in zip(layers.values(), losses):
        print(f"{'x'.join(map(str, weight.shape)):13} {weight.numel():8,}" + "".join(f"{added:9.4f}" for added in row))

    # The allocation as parameters. The choice hardens as gamma falls, and never leaves the budget.
    def mixture(y: Tensor) -> dict[str, Tensor]:
        return {name: torch.tensordot(share, many, 1) for share, (name, many) in zip(y, options.items())}

    budget = kg.MultipleChoice.from_real(sizes, given.budget, resolution=100_000)
    choose = kg.torch.Relax(budget, kg.Shannon(torch.ones(())), hard_eval=True)
    theta, used = torch.zeros(sizes.shape, requires_grad=True), 0.0
    optimizer = torch.optim.Adam([theta], lr=0.1)
    for _ in trange(given.epochs, desc="learning the allocation", unit="epoch"):
        for batch in train[torch.randperm(len(train))].split(100):
            y = choose(theta)
            optimizer.zero_grad()
            cross_entropy(torch.func.functional_call(network, mixture(y), images[batch]), labels[batch]).backward()
            optimizer.step()
            used = max(used, (y.detach().numpy() * sizes).sum())
        choose.gamma.mul_(0.02 ** (1 / given.epochs))

    # Sizes from 2 to 8 bits: all in one frontier; of some, the exact allocations in one batch.
    tried = np.append(np.geomspace(sizes[:, 0].sum(), sizes[:, 4].sum(), 30), given.budget)
    every = kg.MultipleChoice.from_real(sizes, tried, resolution=100_000)
    frontier = -kg.frontier(-losses, every)
    choices = {"same bits": ONE[:5, None].repeat(len(layers), 1)}
    choices["greedy"] = np.array([greedy(losses, sizes, size) for size in tried])
    choices["exact"] = kg.solve(np.broadcast_to(-losses, (len(tried), *sizes.shape)), every)
    choices["learned"] = choose.eval()(theta).numpy()[None]
    least = frontier[np.searchsorted(every.budgets, tried, side="right") - 1]
    assert np.allclose((choices["exact"] * losses).sum((1, 2)), least, rtol=0, atol=1e-9)
    for size, value in zip(tried, least):  # HiGHS stops at an absolute gap of 1e-6, hence the factor
        limits = (np.kron(np.eye(len(layers)), np.ones(len(BITS))), 1, 1), (sizes.ravel(), 0, size)
        best = milp(1000 * losses.ravel(), integrality=1, constraints=limits, options={"mip_rel_gap": 0})
        assert abs(best.x.round() @ losses.ravel() - value) < 1e-8

    print(f"\n{'':10} {'bytes':>7} {'predicted loss':>15} {'measured':>9} {'test accuracy':>14}   bits")
    panels, results = Figure(figsize=(13, 4), layout="constrained").subplots(1, 3), {}
    panels[0].plot(every.budgets, loss + frontier, "k", lw=0.5, label="frontier")
    for name, many in choices.items():
        size, predicted = (many * sizes).sum((1, 2)), loss + (many * losses).sum((1, 2))
        measured, correct = np.array([measure(mixture(torch.tensor(y).float())) for y in many]).T
        results[name] = {"predicted loss": predicted, "measured loss": measured, "test accuracy": correct}
        for axes, (title, column) in zip(panels, results[name].items()):
            axes.plot(size, column, {"exact": ".", "greedy": "x"}.get(name, "o"), label=name)
            axes.set(title=title, xlabel="bytes", yscale="log" if "loss" in title else "linear")
        at = np.flatnonzero(size <= given.budget)[-1]
        row = f"{name:10} {size[at]:7,.0f} {predicted[at]:15.4f} {measured[at]:9.4f} {correct[at]:14.1%}"
        print(row, " ", (many[at] @ BITS).astype(int))
    print(f"While it was soft, the mean size of the learned choice was {used:,.0f} bytes at most.")
    print(f"\nAt {len(tried)} sizes from 2 to 8 bits, exact = HiGHS = frontier. Greedy compared with them:")
    for what in ("predicted loss", "measured loss"):
        gap = results["greedy"][what] / results["exact"][what] - 1
        print(f"  {what} higher at {(gap > 1e-9).sum()}, lower at {(gap < -1e-9).sum()}, {gap.mean():+.1%} on average")
    panels[0].legend(frameon=False)
    given.output.mkdir(parents=True, exist_ok=True)
    panels[0].figure.savefig(path := given.output / "bit_allocation.png", dpi=120)
    print(f"Figure: {path}")


if __name__ == "__main__":
    main()
