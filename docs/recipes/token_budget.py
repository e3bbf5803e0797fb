# %% [markdown]
# # Tokens under a budget
#
# **Which tokens should a transformer read, if it cannot afford all of them?** Each image has 16 tokens of 2 × 2 pixels. A token has a cost from 1 to 4, an image has a budget, and blank tokens are
# padding. A scorer learns which tokens to keep, together with the network that reads them.
#
# The data and the model are those of [examples/token_budget.py](../../examples/token_budget.py); run this notebook in the folder `examples`.

# %%
import inspect

import matplotlib.pyplot as plt
import torch
from token_budget import TokenBudget, data

import knapgrad as kg

torch.manual_seed(0)
torch.set_num_threads(1)
train, test = data(seed=0)
inputs = ("patches", "present", "cost", "budget")
print({name: tuple(train[name].shape) for name in inputs})

# %% [markdown]
# ## The model
#
# A scorer, the layer that selects, and attention over what is kept:

# %%
print(inspect.getsource(TokenBudget), end="")

# %% [markdown]
# There are 16 tokens of 4 pixels, `WIDTH` is 64 and `LARGEST_BUDGET` is 40. The layer `select` gets no constraint of its own, since costs and budget differ between images: the constraint is made
# in `forward`. With `straight_through=True` the layer gives zeros and ones in training too, with the exact gradient of the relaxed selection.

# %%
model = TokenBudget(kg.torch.Relax(None, kg.Gini(1.0), hard_eval=True, straight_through=True))
epochs, batch = 15, 64
steps = epochs * (len(train["label"]) // batch)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.05)
rate = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps)
for _ in range(epochs):
    for rows in torch.randperm(len(train["label"]))[: batch * (len(train["label"]) // batch)].split(batch):
        logits, kept = model(*(train[name][rows] for name in inputs))
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(logits, train["label"][rows]).backward()
        optimizer.step()
        rate.step()

# %% [markdown]
# ## How much budget does it need?
#
# The same model, with the same share of all costs as the budget of every image. It was trained with shares from 20 to 50%. No image ever spends more than it has.

# %%
model.eval()
shares = [0.0, 0.1, 0.2, 0.3, 0.4, 0.5]
accuracies, examples = [], {}
for share in shares:
    budget = (share * test["cost"].sum(-1)).long()
    with torch.no_grad():
        logits, kept = model(test["patches"], test["present"], test["cost"], budget)
    assert ((kept * test["cost"]).sum(-1) <= budget).all()
    accuracies.append(float((logits.argmax(-1) == test["label"]).double().mean()))
    examples[share] = kept
    print(f"{share:.0%} of all costs: {accuracies[-1]:.1%} of 360 new images are read correctly")

# %%
figure, axes = plt.subplots(1, 4, figsize=(7.4, 2.6), width_ratios=[2.2, 1, 1, 1])
axes[0].plot([100 * share for share in shares], [100 * x for x in accuracies], "o-")
axes[0].set(xlabel="budget, % of all costs", ylabel="accuracy, %")
for axis, share in zip(axes[1:], (0.1, 0.3, 0.5)):
    image = test["patches"][3].view(4, 4, 2, 2).permute(0, 2, 1, 3).reshape(8, 8)
    seen = examples[share][3].view(4, 4).repeat_interleave(2, 0).repeat_interleave(2, 1)
    axis.imshow(1 - image / image.max() * (0.15 + 0.85 * seen), cmap="gray", vmin=0, vmax=1)
    axis.set(title=f"{share:.0%}", xticks=[], yticks=[])
    axis.grid(visible=False)

# %% [markdown]
# ## For your own problem
#
# - Costs may be anything that adds up: tokens, milliseconds, bytes. They are integers, or `kg.Knapsack.from_real(cost, budget)`,
#   which needs concrete values: call it outside of a compiled model, and pass the constraint to the model in place of costs and budgets.
# - Mask padding by a score of `-inf`. Keep other scores positive (here by `softplus`): a knapsack never picks an item with a negative score.
# - Give the scores a fixed scale (here by a layer norm), so that `gamma = 1` means the same throughout training.
# - `max_capacity` is the largest budget that can come; with it, `torch.compile` makes one graph for all.
# - [From soft to hard](../hard.md) compares this way of training with three others, on five seeds.
