"""Spend a grant: at least 80% of it, or the rest is lost, and at most all of it.

Projects have real costs, in any number of digits, and some of them are a burden by themselves. `from_real` rounds the
costs so that both limits hold in truth, and tells what rounding can have cost.

    python examples/spend_at_least.py --help
"""

from __future__ import annotations

import argparse

import numpy as np

import knapgrad as kg


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="of the projects (0)")
    parser.add_argument("--projects", type=int, default=60, help="to choose from (60)")
    arguments = parser.parse_args()
    rng = np.random.default_rng(arguments.seed)
    costs = rng.lognormal(10, 0.7, arguments.projects)
    benefits = rng.normal(0.2, 1.0, arguments.projects) - costs / costs.mean()  # few are worth it by themselves
    grant = 0.4 * costs.sum()

    plans = {
        "at most all of it": kg.Knapsack.from_real(costs, grant),
        "from 80% to all of it": kg.Knapsack.from_real(costs, grant, at_least=0.8 * grant),
    }
    print(f"{arguments.projects} projects, a grant of {grant:,.2f}\n")
    print(f"{'':24} {'projects':>8} {'spent':>14} {'of the grant':>13} {'benefit':>9} {'at best':>9}")
    for name, plan in plans.items():
        chosen = kg.solve(benefits, plan)
        best = kg.solve(benefits, plan.optimistic)  # an upper bound of what is possible
        spent = float(chosen @ costs)
        row = f"{name:24} {int(chosen.sum()):8} {spent:14,.2f} {spent / grant:13.2%}"
        print(f"{row} {benefits @ chosen:9.3f} {benefits @ best:9.3f}")

    must = plans["from 80% to all of it"]
    chance = kg.relax(benefits, must, kg.Shannon(0.1))
    spent = chance @ costs / grant
    print(f"\nOne unit is {must.unit:,.2f}; exact: {must.exact}.")
    print(f"Relaxed (Shannon, gamma 0.1), {spent:.2%} is spent on average; nearest to a coin flip:")
    for project in np.argsort(abs(chance - 0.5))[:3]:
        print(
            f"  project {project}: {chance[project]:.0%}, cost {costs[project]:,.2f}, benefit {benefits[project]:.2f}"
        )


if __name__ == "__main__":
    main()
