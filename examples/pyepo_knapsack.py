"""Decision-focused learning with PyEPO: predict item values so that the knapsack they lead to is a good one.

From install to a trained, evaluated and plotted model. The data, the training loop and the metric are PyEPO's; the
model that solves the knapsacks and the loss are ours.

    pip install "knapgrad[pyepo]" matplotlib
    python examples/pyepo_knapsack.py
"""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import pyepo
import torch
from pyepo.data.dataset import optDataset
from torch import nn
from torch.utils.data import DataLoader
from tqdm import trange

from knapgrad.pyepo import knapsackModel, regularizedKnapsackFenchelYoung

ITEMS, FEATURES, EPOCHS = 20, 5, 15
torch.manual_seed(0)
torch.set_num_threads(1)  # such small networks are slower on several

# Instances: features, and item values that depend on them. The weights have two decimals; the model scales them.
weights, features, values = pyepo.data.knapsack.genData(1500, FEATURES, ITEMS, deg=3, noise_width=0.3, seed=1)
model = knapsackModel(weights, [weights.sum() / 2])
train = DataLoader(optDataset(model, features[:1000], values[:1000]), batch_size=32, shuffle=True)
test = DataLoader(optDataset(model, features[1000:], values[1000:]), batch_size=500)

# A network that predicts values, trained on decisions alone: the loss never sees the true values.
losses = {name: regularizedKnapsackFenchelYoung(model, 5.0, name) for name in ("shannon", "gini", "tsallis")}
losses["two-stage"] = nn.MSELoss()  # for comparison; this one does
curves = {}
for name, loss in losses.items():
    network = nn.Sequential(nn.Linear(FEATURES, 32), nn.ReLU(), nn.Linear(32, ITEMS))
    optimizer = torch.optim.Adam(network.parameters(), lr=5e-3)
    curves[name] = [pyepo.metric.regret(network, model, test)]
    for _ in trange(EPOCHS, desc=name, unit="epoch"):
        for x, value, decision, _ in train:
            optimizer.zero_grad()
            loss(network(x), value if name == "two-stage" else decision).backward()
            optimizer.step()
        curves[name].append(pyepo.metric.regret(network, model, test))

# How much value is lost, against the best selections of the test set.
print(f"\nNormalized regret on {len(test.dataset)} held-out knapsacks of {ITEMS} items")
for name, curve in curves.items():
    print(f"  {name:10} {100 * curve[0]:5.1f}% before training {100 * curve[-1]:6.2f}% after")
    plt.plot([100 * regret for regret in curve], label=name)
plt.xlabel("epoch")
plt.ylabel("normalized regret on the test set, %")
plt.yscale("log")
plt.legend()
figure = Path("results") / "pyepo_knapsack.png"
figure.parent.mkdir(exist_ok=True)
plt.savefig(figure, dpi=150)
print(f"Figure: {figure}")
