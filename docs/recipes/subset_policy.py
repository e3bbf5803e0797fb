# %% [markdown]
# # A policy over subsets
#
# **How do you train a policy whose actions are subsets?** A shop shows some of its 12 articles, as many as fit on a shelf, to a customer of whom it knows a few features. It
# learns from sales alone which ones to show. There are 2,048 feasible shelves here, and the number doubles with each article, so a softmax over all of them does not scale. The distribution over subsets
# has exact log-probabilities and an exact entropy, which is all that a policy gradient needs.
#
# Everything is in JAX, and one step is one compiled function.

# %%
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

import knapgrad as kg

ARTICLES, FEATURES, BATCH, STEPS = 12, 4, 64, 1500
keys = jax.random.split(jax.random.key(0), 5)
widths = jax.random.randint(keys[0], (ARTICLES,), 1, 5)
shelf = kg.Knapsack(widths, capacity=int(widths.sum()) // 2)
prices = jax.random.uniform(keys[1], (ARTICLES,), minval=1.0, maxval=3.0)
taste = jax.random.normal(keys[2], (FEATURES, ARTICLES))


def sales(customer, shown, key):
    """The customer buys one of the articles shown, or nothing, by a logit model that the shop does not know."""
    appeal = jnp.where(shown > 0, customer @ taste - 0.5 * prices, -jnp.inf)
    logits = jnp.append(appeal, jnp.zeros(()))  # the last alternative: buy nothing
    bought = jax.random.categorical(key, logits)
    return jnp.append(prices, 0.0)[bought]


# %% [markdown]
# ## The policy
#
# A linear model gives scores; the distribution turns them into shelves. `log_prob` is differentiable, `sample` is not, and need not be.


# %%
def policy(weights, customers):
    return kg.jax.SubsetDistribution(customers @ weights["W"] + weights["b"], shelf, kg.Shannon(1.0))


@jax.jit
def step(weights, baseline, key):
    draw, choose, buy = jax.random.split(key, 3)
    customers = jax.random.normal(draw, (BATCH, FEATURES))
    shown = policy(weights, customers).sample(choose)
    reward = jax.vmap(sales)(customers, shown, jax.random.split(buy, BATCH))

    def objective(weights):
        distribution = policy(weights, customers)
        return ((reward - baseline) * distribution.log_prob(shown)).mean() + 0.01 * distribution.entropy().mean()

    gradient = jax.grad(objective)(weights)
    weights = jax.tree.map(lambda w, g: w + 0.3 * g, weights, gradient)
    return weights, 0.95 * baseline + 0.05 * reward.mean(), reward.mean()


weights = {"W": jnp.zeros((FEATURES, ARTICLES)), "b": jnp.zeros(ARTICLES)}
baseline, rewards = jnp.zeros(()), []
for key in jax.random.split(keys[3], STEPS):
    weights, baseline, reward = step(weights, baseline, key)
    rewards.append(float(reward))
print(f"sales per customer: {np.mean(rewards[:100]):.3f} at first, {np.mean(rewards[-100:]):.3f} at last")

# %% [markdown]
# ## How good is it?
#
# With 12 articles all shelves can be enumerated, so the best possible sales are known: for each customer, the shelf with the highest expected sales under the true model.

# %%
subsets = (np.arange(2**ARTICLES)[:, None] >> np.arange(ARTICLES)) % 2
subsets = jnp.array(subsets[np.array(shelf.contains(subsets))], float)


@jax.jit
def expected(customer, shown):
    chances = shown * jnp.exp(customer @ taste - 0.5 * prices)
    return (chances @ prices) / (1 + chances.sum(-1))


customers = jax.random.normal(keys[4], (500, FEATURES))
best = jax.vmap(lambda customer: expected(customer, subsets).max())(customers).mean()
uniform = jax.vmap(lambda customer: expected(customer, subsets).mean())(customers).mean()
shown = kg.solve(customers @ weights["W"] + weights["b"], shelf)  # in use: the best shelf, without noise
learned = jax.vmap(expected)(customers, shown).mean()
print(f"{len(subsets)} shelves; expected sales: random {uniform:.3f}, learned {learned:.3f}, best possible {best:.3f}")

# %%
window = np.convolve(rewards, np.ones(50) / 50, "valid")
plt.plot(np.arange(len(window)) + 50, window, label="while learning, mean of 50 steps")
for value, name in ((best, "best possible"), (learned, "learned, without noise"), (uniform, "random shelf")):
    plt.axhline(float(value), ls="--", lw=1, color="#7a8290")
    plt.text(0, float(value) + 0.005, name, va="bottom", fontsize=9)
plt.xlabel("step")
plt.ylabel("sales per customer")

# %% [markdown]
# ## For your own problem
#
# - Replace `sales` by your environment, and the linear model by your network. The constraint may differ from state to state: `kg.Knapsack(widths, capacities)` with one capacity each, which may
#   be traced since the widths are known, and `jnp.where(available, scores, -jnp.inf)`.
# - `Shannon` gives every feasible subset a probability, so `log_prob` is finite for all; `gamma` and the weight of the entropy set how much is explored.
# - In PyTorch it is `kg.torch.SubsetDistribution(scores, shelf, kg.Shannon(1.0))`, with the same methods.
