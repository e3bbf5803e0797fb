"""The paper's second experiment: which items of a store to display, so that customers spend the most.

Parts: ``train`` makes one row for each agent, its replicas trained side by side, and for each policy without learning;
``time`` measures a gradient estimate; ``report`` draws both and writes the tables. A training that was stopped goes on
from its checkpoint. What the paper leaves open and what is ours is in experiments/README.md.
"""

from __future__ import annotations

import argparse
import json
import sys
from functools import partial
from importlib import metadata
from pathlib import Path

from benchmarks import timing
from experiments import sweep
from experiments.assortment.agents import AGENTS, Settings
from experiments.assortment.environment import Stores, count_feasible
from experiments.assortment.measure import measure
from experiments.assortment.policies import POLICIES
from experiments.assortment.training import test_policy, train

RESULTS = Path(__file__).parent.parent / "results"
PARTS = ("train", "time", "report")
QUICK = {"validations": 2, "validation_episodes": 20, "test_episodes": 100}


def main() -> None:
    options = parse()
    options.output.mkdir(parents=True, exist_ok=True)
    rows_file, times_file = options.output / "assortment.jsonl", options.output / "assortment_time.json"
    if "train" in options.parts:
        tasks = [
            {"agent": agent, "replicas": options.replicas, "seed": seed, "episodes": options.episodes}
            for seed in range(options.groups)
            for agent in options.agents
        ]
        tasks += [{"agent": name, "replicas": 1, "seed": 0, "episodes": 0} for name in POLICIES]
        known = provenance()
        sweep.run(partial(row, known, options.output / "checkpoints", options.lengths), tasks, rows_file, options.jobs)

    if "time" in options.parts:
        rows = measure(options.seconds)
        times_file.write_text(json.dumps({"environment": provenance(), "rows": rows}, indent=1) + "\n")
    if "report" in options.parts:
        from experiments.assortment import report

        times = json.loads(times_file.read_text())["rows"] if times_file.exists() else []
        rows = [one for one in sweep.read(rows_file) if one["episodes"] in (0, options.episodes)]
        report.write(rows, times, options.output, to_page=options.output == RESULTS)


def row(
    known: sweep.Row, checkpoints: Path, lengths: dict[str, int], agent: str, replicas: int, seed: int, episodes: int
) -> sweep.Row:
    """Of one agent or policy."""
    if agent in POLICIES:
        return test_policy(POLICIES[agent], lengths.get("test_episodes", 10_000)) | known
    checkpoint = checkpoints / f"assortment-{agent.replace(' ', '-')}-{replicas}-{seed}-{episodes}.pt"
    return train(agent, replicas, seed, Settings(episodes=episodes), checkpoint, **lengths) | known


def provenance() -> sweep.Row:
    """How a result came about."""
    known = timing.environment(sys.argv[1:], "experiments.assortment")
    versions = {name: known["versions"][name] for name in ("knapgrad", "numpy", "torch")}
    return {
        **{name: known[name] for name in ("date", "commit", "command", "cpu", "cores", "python")},
        "versions": versions | {"gymnasium": metadata.version("gymnasium")},
        "feasible_assortments": count_feasible(Stores(1).weights),
    }


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.assortment",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("parts", nargs="*", help="train, time, report (all, in this order)")
    parser.add_argument("--quick", action="store_true", help="four episodes: a look, under a minute")
    parser.add_argument("--agents", nargs="+", metavar="NAME", help=f"of {', '.join(AGENTS)} (all)")
    parser.add_argument("--replicas", type=int, default=3, help="of each agent, trained side by side (3)")
    parser.add_argument("--groups", type=int, default=1, help="of replicas, one after the other (1)")
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time (1)")
    parser.add_argument("--output", type=Path, help="folder of the results (experiments/results; quick: quick in it)")
    options = parser.parse_args()
    options.parts = options.parts or list(PARTS)
    options.agents = options.agents or list(AGENTS)
    for wrong, kind, there in (
        (set(options.parts) - set(PARTS), "part", PARTS),
        (set(options.agents) - set(AGENTS), "agent", AGENTS),
    ):
        if wrong:
            parser.error(f"no such {kind}: {', '.join(sorted(wrong))}; there are {', '.join(there)}")
    if min(options.replicas, options.groups, options.jobs) < 1:
        parser.error("--replicas, --groups and --jobs must be at least 1")
    options.episodes, options.lengths, options.seconds = (
        (4, QUICK, 0.5) if options.quick else (Settings.episodes, {}, 20.0)
    )
    options.output = options.output or (RESULTS / "quick" if options.quick else RESULTS)
    return options


if __name__ == "__main__":
    from experiments.assortment.__main__ import main as imported  # workers find it under this name, not as __main__

    imported()
