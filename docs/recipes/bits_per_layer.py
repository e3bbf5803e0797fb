# %% [markdown]
# # Bits per layer
#
# **How many bits does each layer of a network need?** Layers differ: some can be stored in 2 bits without harm, others cannot. One option per layer, within a number of bytes, is
# `kg.MultipleChoice`. We measure what each option costs, and get the best allocation for one budget, and for all of them.

# %%
import inspect

import matplotlib.pyplot as plt
import numpy as np
import torch
from bit_allocation import greedy, quantise  # from the folder examples of the repository
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy

import knapgrad as kg

torch.manual_seed(0)
torch.set_num_threads(1)
BITS = np.array([2, 3, 4, 6, 8, 16])  # as bit_allocation has them
digits = load_digits()
images, labels = torch.tensor(digits.images).float().unsqueeze(1) / 16, torch.tensor(digits.target)
train, test = torch.randperm(len(labels)).split([1200, 597])

network = nn.Sequential(
    *(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
    *(nn.Flatten(), nn.Linear(512, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)),
)
optimizer = torch.optim.Adam(network.parameters(), lr=2e-3)
for _ in range(15):
    for batch in train[torch.randperm(len(train))].split(50):
        optimizer.zero_grad()
        cross_entropy(network(images[batch]), labels[batch]).backward()
        optimizer.step()


def measure(weights):
    """Loss on the training set and accuracy on the test set, with some weights replaced."""
    with torch.no_grad():
        out = torch.func.functional_call(network, weights, images)
    return float(cross_entropy(out[train], labels[train])), float((out.argmax(1) == labels)[test].double().mean())


loss, accuracy = measure({})
print(f"loss {loss:.4f}, test accuracy {accuracy:.1%}")

# %% [markdown]
# ## What does each layer lose?
#
# One layer at a time is quantised, by this function, and the loss is measured.

# %%
print(inspect.getsource(quantise), end="")

# %%
layers = {name: w for name, w in network.requires_grad_(False).named_parameters() if w.ndim > 1}
quantised = {name: [quantise(w, bits) for bits in BITS] for name, w in layers.items()}
added = np.array([[measure({name: one})[0] - loss for one in many] for name, many in quantised.items()])
sizes = np.array([w.numel() * BITS / 8 for w in layers.values()])  # bytes

print("bits          " + "".join(f"{bits:9}" for bits in BITS))
for w, row in zip(layers.values(), added):
    print(f"{'x'.join(map(str, w.shape)):14}" + "".join(f"{x:9.4f}" for x in row))

# %% [markdown]
# ## The best allocation for a budget
#
# The score of an option is minus the loss that it adds. Bytes are real numbers here, so `from_real` finds the unit.
# `exact` says that nothing had to be rounded.

# %%
budget = kg.MultipleChoice.from_real(sizes, 15_000)
chosen = kg.solve(-added, budget)
print("bits per layer ", (chosen @ BITS).astype(int))
print(f"bytes           {(chosen * sizes).sum():,.0f} of 15,000, in units of {budget.unit}, exact: {budget.exact}")
weights = {name: many[row.argmax()] for row, (name, many) in zip(chosen, quantised.items())}
print(f"predicted loss  {loss + (chosen * added).sum():.4f}")
print("measured loss   {:.4f}, test accuracy {:.1%}".format(*measure(weights)))

# %% [markdown]
# ## All budgets at once
#
# `kg.frontier` has the least added loss for every number of bytes, from one table. The largest budget is what 8 bits for all layers take. In units of 2 bytes that is more than the 10,000 units that `from_real` takes by
# default, so it would round; `resolution=100_000` allows for more units, and the frontier stays exact.

# %%
largest = float(sizes[:, 4].sum())
every = kg.MultipleChoice.from_real(sizes, largest, resolution=100_000)
print(f"{every.capacity:,} units of {every.unit} bytes, exact: {every.exact}")
default = kg.MultipleChoice.from_real(sizes, largest)
print(f"by default {default.capacity:,} units of {default.unit} bytes, exact: {default.exact}")
frontier = -kg.frontier(-added, every)

# %% [markdown]
# Next to it: the same bits for all layers, and a greedy rule that repeatedly takes the change with the largest loss reduction per byte. (`ONE` is `np.eye(6)`: a row per number of bits.)

# %%
print(inspect.getsource(greedy), end="")

# %%
some = np.geomspace(sizes[:, 0].sum(), largest, 25)
rule = np.array([greedy(added, sizes, size) for size in some])

plt.step(every.budgets, loss + frontier, where="post", label="frontier")
plt.plot((rule * sizes).sum((1, 2)), loss + (rule * added).sum((1, 2)), "x", label="greedy")
plt.plot(sizes[:, :5].sum(0), loss + added[:, :5].sum(0), "o", label="same bits for all")
plt.yscale("log")
plt.xlabel("bytes")
plt.ylabel("predicted loss")
plt.legend()

# %% [markdown]
# ## What is one more byte worth?
#
# The frontier is a staircase, so the difference at a budget is nearly always 0: two more bytes buy nothing, until there are enough for the next better allocation. The slope of its concave envelope is a
# useful price. From one corner of the envelope, the next one is where the steepest line to any later point ends.

# %%
budgets, values = every.budgets, -frontier
corners = [0]
while corners[-1] < len(values) - 1:
    here = corners[-1]
    slopes = (values[here + 1 :] - values[here]) / (budgets[here + 1 :] - budgets[here])
    corners.append(len(values) - 1 - int(slopes[::-1].argmax()))  # the last, if several are on one line
prices = np.diff(values[corners]) / np.diff(budgets[corners])

print(f"differences that are 0: {(np.diff(values) == 0).mean():.1%}")
for size in (11_000, 13_000, 15_000, 20_000, 30_000):
    price = prices[np.searchsorted(budgets[corners], size, side="right") - 1]
    print(f"at {size:,} bytes, one more byte lowers the loss by {price:.1e}")

# %% [markdown]
# The budgets are in bytes, so the price is per byte. A difference of neighbours in `values` would be per unit: divide it by `every.unit`.
#
# ## For your own problem
#
# - Options can be anything with a cost: bits, ranks, widths, experts, sizes of a cache. `added` may be a sensitivity, an error or a time.
# - Groups with fewer options are padded with a score of `-inf`.
# - The sum of what layers cost alone is an approximation; at 2 bits it is a rough one. To learn the allocation from the loss of the whole network, put `kg.torch.Relax(budget,
#   kg.Shannon(gamma))` over the options and train the scores: [examples/bit_allocation.py](../../examples/bit_allocation.py) does, and checks everything against HiGHS.
#   At its default budget with seeds 0 to 4, the measured loss of the learned allocation was lower than that of the exact one in four cases, and that of the greedy one in one.
