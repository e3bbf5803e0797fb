# %% [markdown]
# # PyEPO without a solver
#
# **How do you train a predictor for the quality of the decisions that follow from it?** [PyEPO](https://github.com/khalil-research/PyEPO) has losses for that, and asks an optimisation model for decisions. Its
# knapsack models need a solver. `knapgrad.pyepo.knapsackModel` needs none, is exact, and solves a batch in one call; and there are losses that are exact where PyEPO's are sampled.

# %%
import matplotlib.pyplot as plt
import pyepo
import torch
from pyepo.data.dataset import optDataset
from torch import nn
from torch.utils.data import DataLoader

from knapgrad.pyepo import knapsackModel, regularizedKnapsackFenchelYoung

ITEMS, FEATURES, EPOCHS = 20, 5, 10
torch.manual_seed(0)
torch.set_num_threads(1)

weights, features, values = pyepo.data.knapsack.genData(1500, FEATURES, ITEMS, deg=3, noise_width=0.3, seed=1)
model = knapsackModel(weights, [weights.sum() / 2])  # the weights have two decimals; the model finds their unit
train = DataLoader(optDataset(model, features[:1000], values[:1000]), batch_size=32, shuffle=True)
test = DataLoader(optDataset(model, features[1000:], values[1000:]), batch_size=500)

# %% [markdown]
# ## Three losses
#
# Ours and PyEPO's perturbed loss see decisions only. The squared error of the predicted values sees the values themselves.

# %%
losses = {
    "Fenchel-Young, Gini": regularizedKnapsackFenchelYoung(model, 5.0, "gini"),
    "PyEPO's perturbed loss": pyepo.func.perturbedFenchelYoung(model, n_samples=10, sigma=5.0, processes=1),
    "squared error of values": nn.MSELoss(),
}
curves = {}
for name, loss in losses.items():
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(FEATURES, 32), nn.ReLU(), nn.Linear(32, ITEMS))
    optimizer = torch.optim.Adam(network.parameters(), lr=5e-3)
    curves[name] = [pyepo.metric.regret(network, model, test)]
    for _ in range(EPOCHS):
        for x, value, decision, _ in train:
            optimizer.zero_grad()
            loss(network(x), value if isinstance(loss, nn.MSELoss) else decision).mean().backward()
            optimizer.step()
        curves[name].append(pyepo.metric.regret(network, model, test))
    print(f"{name:24} regret {curves[name][0]:.1%} before training, {curves[name][-1]:.2%} after")

# %%
for name, curve in curves.items():
    plt.plot([100 * regret for regret in curve], label=name)
plt.yscale("log")
plt.xlabel("epoch")
plt.ylabel("normalized regret, %")
plt.legend()

# %% [markdown]
# ## For your own problem
#
# - Give `knapsackModel` your weights and capacity; `at_least=` asks for a least weight. SPO+, PFY, DBB and the other losses of PyEPO run on it as they are: PyEPO asks for one
#   solution at a time, and the model notices that the requests are rows of one batch.
# - Where true values are known, train on them too: on this benchmark the squared error is better than any loss that sees decisions alone. [Our reruns](../experiments.md) have
#   12 methods, 4 sizes and up to 10 seeds.
# - One split and one seed, as here, cannot rank methods that are close.
