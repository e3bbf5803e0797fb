"""The paper's second experiment: which items of a store to display, so that customers spend the most.

Parts: ``train`` makes one row for each agent, its replicas trained side by side, and for each policy without learning;
``time`` measures a gradient estimate; ``report`` draws both and writes the tables. A training that was stopped goes on
from its checkpoint. What the paper leaves open and what is ours is in experiments/README.md.
"""

from __future__ import annotations

import argparse
import json
from functools import partial
from pathlib import Path
from typing import Any

from experiments import command_line, sweep
from experiments.assortment.agents import AGENTS, Settings
from experiments.assortment.environment import Stores, count_feasible
from experiments.assortment.measure import measure, transitions_a_second
from experiments.assortment.policies import POLICIES
from experiments.assortment.training import judge, train

MODULE, PACKAGES = "experiments.assortment", ("numpy", "torch", "gymnasium")
FULL = {"validations": 20, "validation_episodes": 1_000, "test_episodes": 10_000}
QUICK = {"validations": 2, "validation_episodes": 20, "test_episodes": 100}


def main() -> None:
    options = parse()
    options.output.mkdir(parents=True, exist_ok=True)
    rows_file, times_file = options.output / "assortment.jsonl", options.output / "assortment_time.json"
    if "train" in options.parts:
        tasks = [
            {"agent": agent, "replicas": options.replicas, "seed": seed, "episodes": options.episodes}
            for seed in range(options.first_group, options.first_group + options.groups)
            for agent in options.agents
        ]
        if not options.first_group:
            tasks += [{"agent": name, "replicas": 1, "seed": 0, "episodes": 0} for name in POLICIES]
        tasks = [task | {"test_episodes": options.lengths["test_episodes"]} for task in tasks]
        make_row = partial(row, provenance(options), options.output / "checkpoints", options.lengths)
        sweep.run(make_row, tasks, rows_file, options.jobs)
        for task in tasks:
            checkpoint(options.output / "checkpoints", task).unlink(missing_ok=True)
    if "time" in options.parts:
        found = {
            "environment": provenance(options),
            "transitions_a_second": {
                name: transitions_a_second(policy, options.lengths["test_episodes"], repeats=5)
                for name, policy in POLICIES.items()
            },
            "rows": measure(options.seconds),
        }
        times_file.write_text(json.dumps(found, indent=1) + "\n")
    if "report" in options.parts:
        from experiments.assortment import report

        times = json.loads(times_file.read_text()) if times_file.exists() else None
        rows = [
            one
            for one in sweep.read(rows_file)
            if one["episodes"] in (0, options.episodes) and one["test_episodes"] == options.lengths["test_episodes"]
        ]
        report.write(rows, times, options.output, command_line.to_page(options))


def row(known: sweep.Row, checkpoints: Path, lengths: dict[str, int], **task: Any) -> sweep.Row:
    """Of one agent or policy."""
    if task["agent"] in POLICIES:
        return judge(POLICIES[task["agent"]], task["test_episodes"]) | known
    settings = Settings(episodes=task["episodes"])
    path = checkpoint(checkpoints, task)
    return train(task["agent"], task["replicas"], task["seed"], settings, path, **lengths) | known


def checkpoint(folder: Path, task: sweep.Task) -> Path:
    name = "-".join(str(part).replace(" ", "-") for part in task.values())
    return folder / f"assortment-{name}.pt"


def provenance(options: argparse.Namespace) -> sweep.Row:
    feasible = count_feasible(Stores(1).weights)
    return command_line.provenance(MODULE, PACKAGES, options.commit, feasible_assortments=feasible)


def parse() -> argparse.Namespace:
    parser = command_line.make_parser(MODULE, __doc__)
    parser.add_argument("--quick", action="store_true", help="four episodes: a look, under a minute")
    parser.add_argument("--agents", nargs="+", metavar="NAME", help=f"of {', '.join(AGENTS)} (all)")
    parser.add_argument("--replicas", type=int, default=3, help="of each agent, trained side by side (3)")
    parser.add_argument("--groups", type=int, default=1, help="of replicas, each with a seed of its own (1)")
    parser.add_argument("--first-group", type=int, default=0, help="the seed of the first group (0)")
    parser.add_argument("--episodes", type=int, help=f"of training ({Settings.episodes}; quick: 4)")
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time (1)")
    parser.add_argument("--output", type=Path, help="folder of the results (experiments/results; quick: quick in it)")
    options = parser.parse_args()
    options.parts = command_line.choose(parser, "part", options.parts, command_line.PARTS)
    options.agents = command_line.choose(parser, "agent", options.agents, AGENTS)
    options.episodes = (4 if options.quick else Settings.episodes) if options.episodes is None else options.episodes
    if min(options.replicas, options.groups, options.jobs, options.episodes) < 1:
        parser.error("--replicas, --groups, --jobs and --episodes must be at least 1")
    options.lengths, options.seconds = (QUICK, 0.5) if options.quick else (FULL, 20.0)
    options.output = options.output or command_line.usual_output(options)
    return options


if __name__ == "__main__":
    from experiments.assortment.__main__ import main as imported  # workers find it under this name, not as __main__

    imported()
