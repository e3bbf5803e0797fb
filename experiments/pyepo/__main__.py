"""The paper's first experiment: predict item values from features, so that the best selection is the right one.

Parts: ``train`` makes one row for each method, number of items and seed; ``time`` measures a gradient step; ``report``
draws both and writes the tables. What the paper leaves open and what is ours is in experiments/README.md.
"""

from __future__ import annotations

import argparse
import json
from functools import partial
from pathlib import Path
from typing import Any

from experiments import command_line, sweep
from experiments.pyepo.measure import measure
from experiments.pyepo.methods import METHODS
from experiments.pyepo.training import EPOCHS, train

MODULE, PACKAGES = "experiments.pyepo", ("numpy", "torch", "pyepo")
ITEMS = (10, 25, 50, 100)
SEEDS = {10: 10, 25: 10, 50: 10, 100: 5}


def main() -> None:
    options = parse()
    options.output.mkdir(parents=True, exist_ok=True)
    rows_file, times_file = options.output / "pyepo_knapsack.jsonl", options.output / "pyepo_knapsack_time.json"
    known = command_line.provenance(MODULE, PACKAGES, options.commit)
    if "train" in options.parts:
        tasks = [
            {"method": method, "n": n, "seed": seed, "epochs": options.epochs, "scale": options.scale}
            for seed in range(options.seeds or max(SEEDS.values()))
            for n in options.items
            for method in options.methods
            if options.seeds or seed < SEEDS.get(n, 5)
        ]
        sweep.run(partial(row, known), tasks, rows_file, options.jobs, options.ray)
    if "time" in options.parts:
        rows = [one for n in options.items for one in measure(n, options.seconds, not options.quick)]
        times_file.write_text(json.dumps({"environment": known, "rows": rows}, indent=1) + "\n")
    if "report" in options.parts:
        from experiments.pyepo import report

        times = json.loads(times_file.read_text()) if times_file.exists() else None
        rows = [
            one for one in sweep.read(rows_file) if one["epochs"] == options.epochs and one["scale"] == options.scale
        ]
        report.write(rows, times, options.output, command_line.to_page(options))


def row(known: sweep.Row, **task: Any) -> sweep.Row:
    """Of one training."""
    return train(**task) | known


def parse() -> argparse.Namespace:
    parser = command_line.make_parser(MODULE, __doc__)
    parser.add_argument("--quick", action="store_true", help="two epochs on little data: a look, under a minute")
    parser.add_argument("--items", type=int, nargs="+", metavar="N", help="numbers of items (10 25 50 100; quick: 10)")
    parser.add_argument("--methods", nargs="+", metavar="NAME", help=f"of {', '.join(METHODS)} (all)")
    parser.add_argument("--seeds", type=int, help="trainings of each (10, of 100 items 5; quick: 1)")
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time (1)")
    parser.add_argument("--ray", action="store_true", help="on a Ray cluster, or a local one (RAY_ADDRESS says which)")
    parser.add_argument("--output", type=Path, help="folder of the results (experiments/results; quick: quick in it)")
    options = parser.parse_args()
    options.parts = command_line.choose(parser, "part", options.parts, command_line.PARTS)
    options.methods = command_line.choose(parser, "method", options.methods, METHODS)
    options.items = options.items or ([10] if options.quick else list(ITEMS))
    if min(options.items) < 1 or options.jobs < 1 or (options.seeds is not None and options.seeds < 1):
        parser.error("--items, --seeds and --jobs must be at least 1")
    options.seeds = options.seeds or (1 if options.quick else None)
    options.epochs, options.scale, options.seconds = (2, 0.05, 0.5) if options.quick else (EPOCHS, 1.0, 20.0)
    options.output = options.output or command_line.usual_output(options)
    return options


if __name__ == "__main__":
    from experiments.pyepo.__main__ import main as imported  # workers find it under this name, not as __main__

    imported()
