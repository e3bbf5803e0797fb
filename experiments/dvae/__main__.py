"""The paper's third experiment: an autoencoder whose hidden layer selects which 3 of 10 digits are in an image.

Parts: ``train`` makes one row for each hidden layer, seed and epoch, all models side by side on one device; ``time``
measures the layer's share of a step; ``report`` draws both and writes the tables. A training that was stopped goes on
from its checkpoint. What the paper leaves open and what is ours is in experiments/README.md.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

from experiments import command_line, sweep
from experiments.dvae import data
from experiments.dvae.bottlenecks import BOTTLENECKS
from experiments.dvae.measure import measure
from experiments.dvae.training import Run, Settings, evaluate, examples, load, run_epoch, save
from measuring import origin

MODULE = "experiments.dvae"
KEY = ("bottleneck", "seed", "reconstruction", "prior", "epochs", "epoch")  # of a row
PLACES = " or ".join(map(str, data.USUAL_PLACES))
QUICK = Settings(epochs=2, batch=16, train=96, test=64)


def main() -> None:
    options = parse()
    options.output.mkdir(parents=True, exist_ok=True)
    times_file = options.output / "dvae_time.json"
    if {"train", "time"} & set(options.parts):
        if options.quick:
            torch.set_num_threads(1)  # such small batches are slower on several
        if options.device == "cuda":
            os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")  # streams that do not wait for each other
            torch.backends.cudnn.benchmark = True
            torch.set_float32_matmul_precision("high")
        try:
            train, test = make_data(options)
        except (FileNotFoundError, ValueError) as error:
            raise SystemExit(str(error)) from None
    if "train" in options.parts and not train_all(options, train, test):
        print("the time is up; the same command goes on from here")
        return
    if "time" in options.parts:
        rows = measure(train, options.settings, options.bottlenecks, options.seconds)
        times_file.write_text(json.dumps({"environment": provenance(options), "rows": rows}, indent=1) + "\n")
    if "report" in options.parts:
        from experiments.dvae import report

        times = json.loads(times_file.read_text()) if times_file.exists() else None
        rows = sweep.read(options.output / "dvae.jsonl")
        if not rows:
            raise SystemExit(f"{options.output / 'dvae.jsonl'} has no rows to report: run the part train first")
        report.write(rows, times, options.output, command_line.to_page(options))


def make_data(options: argparse.Namespace) -> tuple[data.Stacks, data.Stacks]:
    settings = options.settings
    if options.quick:
        train, test = data.small_digits()
    else:
        folder = data.download(options.data or data.CACHE) if options.download else data.find(options.data)
        train, test = data.mnist(folder, "train"), data.mnist(folder, "t10k")
    device = torch.device(options.device)
    return data.stack(train, settings.train, seed=0).to(device), data.stack(test, settings.test, seed=1).to(device)


def train_all(options: argparse.Namespace, train: data.Stacks, test: data.Stacks) -> bool:
    """Trains all models one epoch at a time, until they are done (True) or the time is up (False)."""
    settings, path = options.settings, options.output / "dvae.jsonl"
    variant = settings.reconstruction, settings.prior, settings.epochs
    deadline = time.monotonic() + 60 * options.minutes
    checkpoint = options.output / "checkpoints" / f"dvae-{settings.variant}.pt"
    known, longest = provenance(options), 0.0
    with sweep.alone(path):
        written = {tuple(row[name] for name in KEY) for row in sweep.mend(path)}
        runs = [
            Run(name, seed, train, settings)
            for seed in range(options.seeds)
            for name in options.bottlenecks
            if (name, seed, *variant, settings.epochs) not in written  # what is in the file is not run again
        ]
        load(runs, checkpoint)
        for run in runs:
            last = max((row[-1] for row in written if row[:-1] == (run.bottleneck, run.seed, *variant)), default=0)
            if last > run.epoch:
                raise SystemExit(
                    f"{path} has rows of {run.bottleneck}, seed {run.seed}, up to epoch {last}, but "
                    f"{checkpoint} ends at {run.epoch}: choose another --output, or remove those rows"
                )

        def write_rows(evaluated_now: list[Run]) -> None:
            for run in evaluated_now:
                key = run.bottleneck, run.seed, *variant, run.epoch
                if key not in written:
                    sweep.append(path, dict(zip(KEY, key)) | evaluate(run, test) | known)

        write_rows([run for run in runs if is_evaluated(run.epoch, settings.epochs)])  # a run was stopped before it
        with tqdm(total=settings.epochs * len(runs), desc="dvae", unit="epoch") as bar:
            bar.update(sum(run.epoch for run in runs))
            while left := [run for run in runs if run.epoch < settings.epochs]:
                start = time.monotonic()
                run_epoch(left)
                bar.update(len(left))
                now = [run for run in left if is_evaluated(run.epoch, settings.epochs)]
                longest = max(longest, time.monotonic() - start)
                out_of_time = time.monotonic() + 1.5 * longest > deadline
                if now or out_of_time:
                    save(runs, checkpoint)  # before the rows: they can be written again, an epoch is not run again
                write_rows(now)
                if out_of_time and any(run.epoch < settings.epochs for run in left):
                    return False
    shown = {run.bottleneck: examples(run, test, 4) for run in runs if run.seed == 0}
    add_examples(shown, options.output / f"dvae_examples_{settings.variant}.npz")
    return True


def add_examples(shown: dict[str, dict[str, np.ndarray] | None], path: Path) -> None:
    """To those of other hidden layers in the file."""
    arrays = {f"{name}/{key}": array for name, found in shown.items() if found for key, array in found.items()}
    if arrays:
        others = dict(np.load(path)) if path.exists() else {}
        np.savez_compressed(path, **(others | arrays))


def is_evaluated(epoch: int, epochs: int) -> bool:
    """After the first five epochs, every fifth, and the last."""
    return epoch > 0 and (epoch <= 5 or epoch % 5 == 0 or epoch == epochs)


def provenance(options: argparse.Namespace) -> sweep.Row:
    on_gpu = options.device == "cuda"
    packages, device = (("triton",), torch.cuda.get_device_name()) if on_gpu else ((), origin.cpu_model())
    return command_line.provenance(MODULE, ("numpy", "torch", *packages), options.commit, device=device)


def parse() -> argparse.Namespace:
    parser = command_line.make_parser(MODULE, __doc__)
    parser.add_argument("--quick", action="store_true", help="two epochs on few small digits: a look, under a minute")
    parser.add_argument("--bottlenecks", nargs="+", metavar="NAME", help=f"of {'; '.join(BOTTLENECKS)} (all)")
    parser.add_argument("--seeds", type=int, help="trainings of each (3; quick: 1)")
    parser.add_argument("--epochs", type=int, help=f"({Settings.epochs}; quick: {QUICK.epochs})")
    parser.add_argument("--reconstruction", choices=["sum", "mean"], default="sum", help="of squared errors (sum)")
    parser.add_argument("--prior", type=float, default=0.0, help="weight of both divergences that falls to 0 (0)")
    parser.add_argument(
        "--minutes", type=float, default=float("inf"), help="of training, then stop with a checkpoint (no limit)"
    )
    parser.add_argument("--data", type=Path, help=f"folder with MNIST's four files ({PLACES})")
    parser.add_argument("--download", action="store_true", help=f"fetch MNIST into --data ({data.CACHE})")
    parser.add_argument("--device", choices=["cpu", "cuda"], help="(cuda where there is one)")
    parser.add_argument("--output", type=Path, help="folder of the results (experiments/results; quick: quick in it)")
    options = parser.parse_args()
    options.parts = command_line.choose(parser, "part", options.parts, command_line.PARTS)
    options.bottlenecks = command_line.choose(parser, "bottleneck", options.bottlenecks, BOTTLENECKS)
    options.seeds = (1 if options.quick else 3) if options.seeds is None else options.seeds
    options.settings = replace(
        QUICK if options.quick else Settings(), reconstruction=options.reconstruction, prior=options.prior
    )
    if options.epochs is not None:
        options.settings = replace(options.settings, epochs=options.epochs)
    if min(options.seeds, options.settings.epochs) < 1:
        parser.error("--seeds and --epochs must be at least 1")
    if not 0 <= options.prior < float("inf"):
        parser.error("--prior must be a number of at least 0")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch finds no GPU here; leave it out or choose cpu")
    if options.quick and (options.data or options.download):
        parser.error("--quick has small digits of its own: leave out --data and --download")
    options.device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    options.seconds = 1.0 if options.quick else 20.0
    options.output = options.output or command_line.usual_output(options)
    return options


if __name__ == "__main__":
    main()
