"""Choose features under a cost budget while the model that uses them is trained, in JAX with Equinox.

Measuring a feature costs money. A network predicts the target from the features that a relaxed knapsack keeps, and the
scores of the features are trained with it, by the exact gradient of the relaxation, which hardens as gamma falls. At
the end `kg.solve` picks the features to buy.

    pip install equinox optax
    python examples/jax_feature_selection.py --help
"""

from __future__ import annotations

import argparse

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from tqdm import tqdm

import knapgrad as kg


class Selective(eqx.Module):
    """A network behind a relaxed selection of its inputs."""

    scores: jax.Array
    network: eqx.nn.MLP
    budget: kg.Knapsack

    def __init__(self, costs: jax.Array, budget: int, key: jax.Array) -> None:
        self.scores = jnp.zeros(len(costs))
        self.network = eqx.nn.MLP(len(costs), "scalar", width_size=32, depth=2, key=key)
        self.budget = kg.Knapsack(costs, budget)

    def kept(self, gamma: jax.Array | float) -> jax.Array:
        """How much of every feature is kept, in [0, 1]."""
        return kg.relax(self.scores, self.budget, kg.Tsallis(gamma))

    def __call__(self, x: jax.Array, kept: jax.Array) -> jax.Array:
        return self.network(x * kept)


def error(model: Selective, x: jax.Array, y: jax.Array, kept: jax.Array) -> jax.Array:
    """Mean squared error as a share of the variance."""
    return ((jax.vmap(model, (0, None))(x, kept) - y) ** 2).mean() / y.var()


def main() -> None:
    arguments = parse()
    keys = jax.random.split(jax.random.key(arguments.seed), 6)
    features = arguments.features
    x = jax.random.normal(keys[0], (2 * arguments.samples, features))
    useful = jnp.arange(features) % 4 == 0
    influence = jnp.where(useful, jax.random.uniform(keys[1], (features,), minval=0.5, maxval=2.0), 0.0)
    y = jnp.tanh(x) @ influence + 0.1 * jax.random.normal(keys[2], (len(x),))
    costs = jax.random.randint(keys[3], (features,), 1, 6)
    (x, test_x), (y, test_y) = jnp.split(x, 2), jnp.split(y, 2)

    model = Selective(costs, int(costs.sum()) // 3, keys[4])
    gammas = jnp.geomspace(arguments.gamma, arguments.gamma / 100, arguments.steps)
    optimizer = optax.adam(arguments.learning_rate)
    state = optimizer.init(eqx.filter(model, eqx.is_inexact_array))

    @eqx.filter_jit
    def step(model: Selective, state: optax.OptState, key: jax.Array, gamma: jax.Array) -> tuple:
        batch = jax.random.randint(key, (64,), 0, len(x))
        loss, gradient = eqx.filter_value_and_grad(lambda m: error(m, x[batch], y[batch], m.kept(gamma)))(model)
        updates, state = optimizer.update(gradient, state)
        return eqx.apply_updates(model, updates), state, loss

    for key, gamma in tqdm(list(zip(jax.random.split(keys[5], arguments.steps), gammas)), desc="training"):
        model, state, _ = step(model, state, key, gamma)

    soft, hard = model.kept(gammas[-1]), kg.solve(model.scores, model.budget)
    random = kg.sample(jnp.zeros(features), model.budget, kg.Shannon(), num_samples=20, rng=keys[5])
    print(f"budget {model.budget.max_capacity} of {int(costs.sum())}, spent {int(costs @ hard)}")
    print(f"useful features kept: {int(hard @ useful)} of {int(useful.sum())}; others: {int(hard @ ~useful)}")
    print(f"relaxed selection: {(soft * (1 - soft)).sum():.3f} away from zeros and ones")
    print(f"test error, share of the variance: relaxed {error(model, test_x, test_y, soft):.3f}, ", end="")
    print(f"selected {error(model, test_x, test_y, hard):.3f}, ", end="")
    print(f"best of 20 random {min(float(error(model, test_x, test_y, kept)) for kept in random):.3f}")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="of the data and of the network (0)")
    parser.add_argument("--features", type=int, default=24, help="of which every fourth is useful (24)")
    parser.add_argument("--samples", type=int, default=1000, help="for training, and as many for the test (1000)")
    parser.add_argument("--steps", type=int, default=1500, help="of Adam (1500)")
    parser.add_argument("--learning-rate", type=float, default=3e-3, help="of Adam (0.003)")
    parser.add_argument(
        "--gamma", type=float, default=1.0, help="strength of the regularizer at first; a hundredth at last (1)"
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
