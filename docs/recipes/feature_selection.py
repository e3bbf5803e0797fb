# %% [markdown]
# # Feature selection in JAX
#
# **Which inputs are worth their cost?** Measuring a feature costs money. A network predicts the target from the features that a relaxed knapsack keeps, and the scores of the
# features are trained together with it. Decisions become firmer as gamma falls, and at the end `kg.solve` says which features to buy.

# %%
import equinox as eqx
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import optax

import knapgrad as kg

FEATURES, SAMPLES, STEPS = 24, 1000, 1500
keys = jax.random.split(jax.random.key(0), 6)
x = jax.random.normal(keys[0], (2 * SAMPLES, FEATURES))
useful = jnp.arange(FEATURES) % 4 == 0  # every fourth; the model does not know
influence = jnp.where(useful, jax.random.uniform(keys[1], (FEATURES,), minval=0.5, maxval=2.0), 0.0)
y = jnp.tanh(x) @ influence + 0.1 * jax.random.normal(keys[2], (2 * SAMPLES,))
costs = jax.random.randint(keys[3], (FEATURES,), 1, 6)
(x, test_x), (y, test_y) = jnp.split(x, 2), jnp.split(y, 2)

# %% [markdown]
# ## A module that holds a constraint
#
# Constraints are pytrees: an Equinox module can hold one, and its integers are not trained.


# %%
class Selective(eqx.Module):
    scores: jax.Array
    network: eqx.nn.MLP
    budget: kg.Knapsack

    def kept(self, gamma):
        return kg.relax(self.scores, self.budget, kg.Tsallis(gamma))

    def __call__(self, x, kept):
        return jax.vmap(self.network)(x * kept)


def error(model, x, y, kept):
    return ((model(x, kept) - y) ** 2).mean() / y.var()


network = eqx.nn.MLP(FEATURES, "scalar", width_size=32, depth=2, key=keys[4])
model = Selective(jnp.zeros(FEATURES), network, kg.Knapsack(costs, int(costs.sum()) // 3))
optimizer = optax.adam(optax.cosine_decay_schedule(3e-3, STEPS))  # smaller steps as the selection hardens
state = optimizer.init(eqx.filter(model, eqx.is_inexact_array))


@eqx.filter_jit
def step(model, state, key, gamma):
    batch = jax.random.randint(key, (64,), 0, SAMPLES)
    loss, gradient = eqx.filter_value_and_grad(lambda m: error(m, x[batch], y[batch], m.kept(gamma)))(model)
    updates, state = optimizer.update(gradient, state)
    return eqx.apply_updates(model, updates), state, loss


gammas, history = jnp.geomspace(1.0, 0.01, STEPS), []
for number, key in enumerate(jax.random.split(keys[5], STEPS)):
    model, state, _ = step(model, state, key, gammas[number])
    if number % 10 == 0:
        history.append(model.kept(gammas[number]))

# %%
hard = kg.solve(model.scores, model.budget)
print(f"spent {int(costs @ hard)} of {model.budget.capacity}; all features would cost {int(costs.sum())}")
print(f"useful features kept: {int(hard @ useful)} of {int(useful.sum())}; others: {int(hard @ ~useful)}")
print(f"test error, share of the variance: {error(model, test_x, test_y, hard):.3f}")

for share, good in zip(jnp.array(history).T, useful):
    plt.plot(10 * jnp.arange(len(history)), share, color="#3b76e1" if good else "#b0b5bf", lw=1.5 if good else 0.8)
plt.plot([], [], color="#3b76e1", label="useful features")
plt.plot([], [], color="#b0b5bf", label="others")
plt.xlabel("step")
plt.ylabel("share that is kept")
plt.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2)

# %% [markdown]
# The useful features separate from the others early, and their shares go to one as gamma falls. The budget has room for more than these. Among the others it is nearly a tie, so their
# shares stay in between, and `kg.solve` takes those with the best scores. A knapsack takes whatever fits and has a positive score; a penalty on the scores would leave room unused.
#
# ## For your own problem
#
# - Costs may be prices or times: `kg.Knapsack.from_real(costs, limit)`. To choose a number of features: `kg.TopK(k)`.
# - For a selection that depends on the sample, let a network give the scores; they then have shape `(batch, features)`.
# - gamma falls geometrically from the scale of the scores to a hundredth of it. If the selection settles too early, begin with a larger one.
# - Without Equinox: a dictionary of arrays works too, with the constraint as a constant.
