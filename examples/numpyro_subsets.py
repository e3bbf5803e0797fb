"""What do shoppers like, when all we see is what they could afford? Bayesian inference with NumPyro.

Every shopper fills a basket within a budget, at random, but rather with items of more appeal. How often an item is
bought does not tell its appeal: a dear one leaves no money for others. The likelihood of whole baskets, `log_prob` of
`kg.jax.SubsetDistribution`, accounts for that. NUTS infers each appeal, and with it what sells at twice the budget.

    pip install numpyro matplotlib
    python examples/numpyro_subsets.py --help
"""

from __future__ import annotations

import argparse
from pathlib import Path

import jax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
from matplotlib.figure import Figure
from numpyro.diagnostics import summary
from numpyro.distributions import constraints
from numpyro.infer import MCMC, NUTS

import knapgrad as kg


class Subsets(dist.Distribution):
    """Selections under a budget, for NumPyro."""

    arg_constraints = {"theta": constraints.real_vector}  # noqa: RUF012 (as in NumPyro)
    support = constraints.independent(constraints.boolean, 1)
    pytree_data_fields = ("theta", "constraint", "regularizer")

    def __init__(self, theta, constraint, regularizer, *, validate_args=None):
        self.theta, self.constraint, self.regularizer = theta, constraint, regularizer
        super().__init__(theta.shape[:-1], theta.shape[-1:], validate_args=validate_args)

    def sample(self, key, sample_shape=()):
        return self.subsets.sample(key, sample_shape)

    def log_prob(self, value):
        return self.subsets.log_prob(value)

    subsets = property(lambda self: kg.jax.SubsetDistribution(self.theta, self.constraint, self.regularizer))
    mean = property(lambda self: self.subsets.mean)


def model(limits: kg.Knapsack, shoppers: int, items: int, baskets: jax.Array | None = None) -> None:
    spread = numpyro.sample("spread", dist.HalfNormal(2.0))
    appeal = numpyro.sample("appeal", dist.Normal(0.0, spread).expand([items]).to_event(1))
    theta = jnp.broadcast_to(appeal, (shoppers, items))
    with numpyro.plate("shoppers", shoppers):
        numpyro.sample("baskets", Subsets(theta, limits, kg.Shannon()), obs=baskets)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="of the shoppers and of the chains (0)")
    parser.add_argument("--shoppers", type=int, default=300, help="one basket each (300)")
    parser.add_argument("--samples", type=int, default=300, help="of each of two chains, after as many to adapt (300)")
    parser.add_argument("--output", type=Path, default=Path("results"), help="folder for the figure (results)")
    given = parser.parse_args()
    keys = jax.random.split(jax.random.key(given.seed), 4)
    prices = jnp.tile(jnp.arange(1, 7), 2)
    truth = 0.4 * (prices - 3.5) + jax.random.normal(keys[0], prices.shape)  # dear items are better
    limits = kg.Knapsack(prices, jax.random.randint(keys[1], (given.shoppers,), 4, 13), max_capacity=12)
    baskets = Subsets(jnp.broadcast_to(truth, (given.shoppers, len(prices))), limits, kg.Shannon()).sample(keys[2])

    n, two = given.samples, {"num_chains": 2, "chain_method": "vectorized"}
    chains = MCMC(NUTS(model), num_warmup=n, num_samples=n, progress_bar=False, **two)
    chains.run(keys[3], limits, *baskets.shape, baskets)
    found = summary(chains.get_samples(group_by_chain=True), prob=0.9)["appeal"]
    inside = int(((found["5.0%"] <= truth) & (truth <= found["95.0%"])).sum())
    print(f"{2 * n} samples, largest r-hat {found['r_hat'].max():.3f}")
    print(f"{inside} of {len(prices)} true values in their 90% intervals")

    # At another budget: the mean of the distribution, exact, for every sample of the posterior.
    samples = truth, chains.get_samples()["appeal"]
    sold, predicted = (Subsets(appeal, kg.Knapsack(prices, 24), kg.Shannon()).mean for appeal in samples)
    shares = baskets.mean(0).clip(0.5 / given.shoppers, 1 - 0.5 / given.shoppers)
    odds = jnp.log(shares / (1 - shares))
    for what, true, *guesses in (("appeal", truth, found["mean"], odds), ("share", sold, predicted.mean(0), shares)):
        errors = [abs(guess - true).mean() for guess in guesses]
        print(f"{what:6} mean error {errors[0]:.3f} by the posterior, {errors[1]:.3f} by how often items are bought")

    axes = (figure := Figure(figsize=(5, 4.5), layout="constrained")).subplots()
    axes.vlines(truth, found["5.0%"], found["95.0%"])
    axes.plot(truth, found["mean"], "o", label="posterior mean, 90% interval")
    axes.plot(truth, odds, "x", label="log-odds of being bought")
    axes.axline((0, 0), slope=1, color="k", lw=0.5)
    axes.set(xlabel="true appeal", ylabel="estimate")
    axes.legend()
    given.output.mkdir(parents=True, exist_ok=True)
    figure.savefig(given.output / "numpyro_subsets.png", dpi=120)


if __name__ == "__main__":
    main()
