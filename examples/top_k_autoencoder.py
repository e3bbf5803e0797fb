"""Which three digits are in a stack of three? An autoencoder with top-k as its hidden layer, without labels.

An image is the average of three digits. The encoder scores ten slots, the layer selects three, and the image is drawn
as the average of what they show. The Fenchel-Young divergence keeps the scores near the uniform prior at first, and is
then let go: without it (--prior 0) many trainings end up with the same three slots for every image.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch
from scipy.optimize import linear_sum_assignment
from sklearn.datasets import load_digits
from torch import Tensor, nn
from tqdm import trange

import knapgrad as kg

SLOTS, STACKED, PIXELS = 10, 3, 64
REGULARIZERS = {"shannon": kg.Shannon, "gini": kg.Gini, "tsallis": kg.Tsallis}


class Autoencoder(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        hidden = nn.Linear(PIXELS, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU()
        self.score = nn.Sequential(*hidden, nn.Linear(256, SLOTS))
        self.shown = nn.Parameter(torch.randn(SLOTS, PIXELS) / 2 - 1)
        self.layer = layer

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Images drawn again, scores and selections."""
        theta = self.score(images)
        y = self.layer(theta)  # (batch, 10), adds up to 3
        return y @ self.shown.sigmoid() / STACKED, theta, y


def stack(size: int, part: slice) -> tuple[Tensor, Tensor]:
    """Images (size, 64), and the digits in them (size, 10) as zeros and ones, which the training never sees."""
    digits = load_digits()
    images, labels = torch.tensor(digits.data[part]).float() / 16, torch.tensor(digits.target[part])
    chosen = torch.rand(size, 10).argsort(1)[:, :STACKED]
    rows = torch.multinomial((labels == chosen.reshape(-1, 1)).float(), 1)
    return images[rows].view(size, STACKED, PIXELS).mean(1), torch.zeros(size, 10).scatter(1, chosen, 1.0)


def recovered(theta: Tensor, digits: Tensor) -> tuple[float, Tensor]:
    """The share of digits whose slot is among the three with the highest scores, and the slot of each digit."""
    best = kg.solve(theta, kg.TopK(STACKED))
    slots = torch.tensor(linear_sum_assignment(-(digits.T @ best).numpy())[1])
    return float((best[:, slots] * digits).sum() / digits.sum()), slots


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--regularizer", choices=REGULARIZERS, default="gini")
    parser.add_argument("--gamma", type=float, default=0.5, help="its strength (0.5)")
    parser.add_argument("--prior", type=float, default=1.0, help="weight of the divergence at first (1; try 0)")
    parser.add_argument("--steps", type=int, default=4000, help="of training (4000)")
    parser.add_argument("--seed", type=int, default=0, help="of the data and the network (0)")
    parser.add_argument("--output", type=Path, default=Path("results"), help="of the figure (results)")
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    torch.set_num_threads(1)  # such small networks are slower on several
    three, regularizer = kg.TopK(STACKED), REGULARIZERS[options.regularizer](options.gamma)
    (train, _), (test, digits) = stack(4000, slice(1200)), stack(1000, slice(1200, None))
    model = Autoencoder(kg.torch.Relax(three, regularizer))
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    for step in trange(options.steps, desc="training", unit="step"):
        images = train[torch.randint(len(train), (128,))]
        drawn, theta, _ = model(images)
        prior = options.prior * max(0.0, 1 - 2 * step / options.steps)
        loss = (drawn - images).square().sum(-1) + prior * kg.divergence(theta, three, regularizer)
        optimizer.zero_grad()
        loss.mean().backward()
        optimizer.step()
    with torch.no_grad():
        drawn, theta, y = model(test)
    share, slots = recovered(theta, digits)
    error, selected = (drawn - test).square().sum(-1).mean(), (y > 0).sum(-1).float().mean()
    print(f"{100 * share:.0f}% of the digits recovered (30% by chance)")
    print(f"squared error {error:.2f}, non-zeros of y {selected:.1f}")
    figure, panels = plt.subplots(1, 10, figsize=(12, 1.7))
    for digit, axes in enumerate(panels):
        axes.imshow(model.shown[slots[digit]].detach().sigmoid().view(8, 8), cmap="gray")
        axes.set(title=digit, xticks=[], yticks=[])
    options.output.mkdir(parents=True, exist_ok=True)
    figure.savefig(path := options.output / "top_k_autoencoder.png", dpi=120)
    print(f"Figure: {path}")


if __name__ == "__main__":
    main()
