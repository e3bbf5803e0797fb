# %% [markdown]
# # Learn from decisions
#
# **What are items worth, if we only see what was bought?** A buyer sees the features of a day, values every item by a rule that we do not know, and buys the best selection that the
# budget allows. We are shown features and purchases, never values.

# %%
import matplotlib.pyplot as plt
import torch

import knapgrad as kg

torch.manual_seed(0)
torch.set_num_threads(1)  # small networks run slower on several threads
ITEMS, FEATURES, DAYS = 20, 8, 1000

prices = torch.randint(3, 9, (ITEMS,))
budget = kg.Knapsack(prices, int(prices.sum()) // 2)
taste = torch.randn(FEATURES, ITEMS) / FEATURES**0.5


def observe(days):
    features = torch.randn(days, FEATURES)
    values = prices * (1 + 0.5 * features @ taste + 0.5 * torch.tanh(features @ taste) ** 3).clamp(min=0.1)
    return features, values, kg.solve(values, budget)


features, _, bought = observe(DAYS)
test_features, test_values, test_bought = observe(DAYS)
print(f"{ITEMS} items cost {int(prices.sum())} together, the budget is {budget.capacity}")
print("bought on the first day:", bought[0].nonzero().flatten().tolist())

# %% [markdown]
# ## The loss
#
# The Fenchel-Young loss is smallest when the relaxed selection of the predicted scores is the purchase. It is convex in the scores, and its gradient is `relax(theta) - bought`.
# As a baseline we take what is often tried first: the exact selection forwards, the identity backwards.


# %%
def fenchel_young(theta, bought):
    return kg.fenchel_young_loss(theta, bought, budget, kg.Gini(1.0)).mean()


def straight_through(theta, bought):
    selected = theta + (kg.solve(theta, budget) - theta).detach()
    return (selected - bought).square().sum(-1).mean()


def regret(model):
    """The part of the best selection's true value that is lost."""
    with torch.no_grad():
        selected = kg.solve(model(test_features), budget)
    best = (test_values * test_bought).sum(-1)
    return float(((best - (test_values * selected).sum(-1)) / best).mean())


def fit(loss, epochs=30):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(FEATURES, 64), torch.nn.ReLU(), torch.nn.Linear(64, ITEMS))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    curve = [regret(model)]
    for _ in range(epochs):
        for days in torch.randperm(DAYS).split(50):
            optimizer.zero_grad()
            loss(model(features[days]), bought[days]).backward()
            optimizer.step()
        curve.append(regret(model))
    return model, curve


model, learned = fit(fenchel_young)
_, baseline = fit(straight_through)
print(f"lost value on new days: {learned[-1]:.2%} by Fenchel-Young, {baseline[-1]:.2%} by straight-through")

# %%
plt.plot([100 * x for x in learned], label="Fenchel-Young, Gini")
plt.plot([100 * x for x in baseline], "--", label="straight-through")
plt.yscale("log")
plt.xlabel("epoch")
plt.ylabel("lost value on new days, %")
plt.legend()

# %% [markdown]
# ## For your own problem
#
# - `prices` and the capacity become your weights and budget; `kg.TopK(k)` if only the number of items is limited.
# - A budget that changes from day to day: `kg.Knapsack(prices, capacities[days])` inside the loss.
# - `gamma = 1` fits scores of order one. The loss only has to be smooth enough to learn from; the selections that you use afterwards come from `kg.solve`.
# - If you know what items are worth, and not only what was bought, train on that as well: in our [experiments](../experiments.md) it is better.
