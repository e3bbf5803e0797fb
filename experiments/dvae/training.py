"""Training of many models side by side on one device, with checkpoints to go on from.

On a GPU each model has a stream, and a CUDA graph of several steps: small models leave most of a device idle, and the
host cannot launch their kernels one by one as fast as the device runs them.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from experiments import checkpoint
from experiments.dvae.bottlenecks import BOTTLENECKS
from experiments.dvae.data import CLASSES, STACKED, Stacks
from experiments.dvae.model import Autoencoder
from experiments.sweep import Row

MEASURES = (
    "error", "positive", "nonzeros", "style_divergence", "selection_divergence", "sets_recovered", "digits_recovered",
    "slots",
)  # fmt: skip
NONZERO = 1e-6  # what counts as selected, beside all that is positive


@dataclass(frozen=True)
class Settings:
    """The paper's appendix, and two things to vary.

    ``reconstruction``: its formula adds up the squared errors of an image's pixels, its text speaks of their mean,
    which makes the other weights 784 times heavier. ``prior``: beyond the paper, one weight of both divergences in
    the first epoch, which falls to 0 in the first half of the training.
    """

    reconstruction: str = "sum"
    prior: float = 0.0
    epochs: int = 50
    batch: int = 64
    learning_rate: float = 3e-4
    style_weight: float = 1e-5  # beta_KL
    selection_weight: float = 1e-5  # beta_FY, reached after two thirds of the epochs
    train: int = 120_000
    test: int = 20_000

    @property
    def variant(self) -> str:
        """In the names of files."""
        return f"{self.reconstruction}{f'-prior-{self.prior:g}' if self.prior else ''}-{self.epochs}"


class Run:
    """One model: its weights, its optimizer, its order of the data and its random numbers, all on the device."""

    def __init__(self, bottleneck: str, seed: int, data: Stacks, settings: Settings) -> None:
        device = data.rows.device
        self.bottleneck, self.seed, self.data, self.settings = bottleneck, seed, data, settings
        torch.manual_seed(seed)
        self.model = Autoencoder(BOTTLENECKS[bottleneck](STACKED)).to(device, memory_format=torch.channels_last)
        fused = device.type in ("cpu", "cuda")
        self.optimizer = torch.optim.Adam(
            self.model.parameters(), lr=settings.learning_rate, fused=fused, capturable=device.type == "cuda"
        )
        self.generator = torch.Generator(device).manual_seed(seed)
        self.shuffling = torch.Generator().manual_seed(seed)
        self.steps = len(data.rows) // settings.batch  # in an epoch; what is left over waits for the next shuffle
        self.order = torch.zeros(self.steps, settings.batch, dtype=torch.int64, device=device)
        self.at = torch.zeros(1, dtype=torch.int64, device=device)
        self.style_weight, self.selection_weight = torch.zeros(2, device=device)
        self.epoch = 0
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.graph: torch.cuda.CUDAGraph | None = None

    def step(self) -> None:
        images = self.data.at(self.order[self.at].squeeze(0))
        out = self.model(images, self.generator)
        error = (out.image - images).square()
        loss = (
            (error.sum((1, 2)) if self.settings.reconstruction == "sum" else error.mean((1, 2)))
            + self.style_weight * out.style_divergence
            + self.selection_weight * self.model.bottleneck.penalty(out.theta)
        )
        self.optimizer.zero_grad(set_to_none=True)
        loss.mean().backward()
        self.optimizer.step()
        self.at += 1

    def begin_epoch(self) -> None:
        settings, done = self.settings, self.epoch / self.settings.epochs
        rising, prior = min(1.5 * done, 1.0), settings.prior * max(1 - 2 * done, 0.0)
        self.style_weight.fill_(settings.style_weight + prior)
        self.selection_weight.fill_(settings.selection_weight * rising + prior)
        order = torch.randperm(len(self.data.rows), generator=self.shuffling)[: self.order.numel()]
        self.order.copy_(order.view_as(self.order))
        self.at.zero_()

    def capture(self, steps: int, warm_up: int = 3) -> int:
        """A graph of so many steps. A few are made before it, as always; returns how many."""
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            for _ in range(warm_up):
                self.step()
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        self.graph.register_generator_state(self.generator)
        with torch.cuda.graph(self.graph, stream=self.stream):
            for _ in range(steps):
                self.step()
        return warm_up

    def state(self) -> Row:
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "generator": self.generator.get_state(),
            "shuffling": self.shuffling.get_state(),
            "epoch": self.epoch,
        }

    def load(self, state: Row) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.generator.set_state(state["generator"])
        self.shuffling.set_state(state["shuffling"])
        self.epoch = state["epoch"]


def run_epoch(runs: list[Run], steps_per_graph: int = 25) -> None:
    """One epoch of each, side by side."""
    for run in runs:
        run.begin_epoch()
        run.model.train()
    if runs[0].stream is None:
        for run in runs:
            for _ in range(run.steps):
                run.step()
    else:
        _run_graphs(runs, min(steps_per_graph, runs[0].steps))
    for run in runs:
        run.epoch += 1


def _run_graphs(runs: list[Run], steps_per_graph: int) -> None:
    left = {run: run.steps for run in runs}
    for run in runs:
        if run.graph is None:
            left[run] -= run.capture(steps_per_graph)
    torch.cuda.synchronize()
    while any(steps >= steps_per_graph for steps in left.values()):
        for run in runs:
            if left[run] >= steps_per_graph:
                with torch.cuda.stream(run.stream):
                    run.graph.replay()
                left[run] -= steps_per_graph
    torch.cuda.synchronize()
    for run in runs:
        for _ in range(left[run]):
            run.step()
    torch.cuda.synchronize()


@torch.no_grad()
def evaluate(run: Run, test: Stacks, batch: int = 2_000) -> Row:
    """Means over the test set, None for what is not finite and for a model lost to NaN.

    What is sampled in training is sampled here too.
    """
    run.model.eval()
    generator = torch.Generator(test.rows.device).manual_seed(run.seed)
    sums, choices = torch.zeros(5, device=test.rows.device), []
    for index in torch.arange(len(test.rows), device=test.rows.device).split(batch):
        images = test.at(index)
        out = run.model(images, generator)
        sums += torch.stack(
            [
                (out.image - images).square().sum(),
                (out.y > 0).sum(),
                (out.y > NONZERO).sum(),
                out.style_divergence.sum(),
                run.model.bottleneck.penalty(out.theta).sum(),
            ]
        )
        choices.append(torch.zeros_like(out.y).scatter(1, out.theta.topk(STACKED).indices, 1.0))
    error, *others = (sums / len(test.rows)).tolist()
    if not np.isfinite(error):
        return dict.fromkeys(MEASURES)
    chosen = torch.cat(choices)
    slots = best_matching(chosen, test.digits)
    right = (chosen[:, slots] * test.digits).sum(-1)
    recovered = float((right == STACKED).float().mean()), float(right.mean()) / STACKED
    means = [mean if np.isfinite(mean) else None for mean in (error, *others, *recovered)]
    return dict(zip(MEASURES, (*means, slots.tolist())))


def best_matching(choices: Tensor, digits: Tensor) -> Tensor:
    """For each digit the slot that stands for it, (10,), so that most are recovered: (size, 10) zeros and ones both."""
    together = (digits.T @ choices).cpu().numpy()  # (digits, slots)
    _, slots = linear_sum_assignment(-together)
    return torch.as_tensor(slots, device=choices.device)


def save(runs: list[Run], path: Path) -> None:
    """Beside the models of the file that are not trained now."""
    others = torch.load(path, weights_only=True, map_location="cpu") if path.exists() else {}
    checkpoint.save(others | {f"{run.bottleneck}/{run.seed}": run.state() for run in runs}, path)


def load(runs: list[Run], path: Path) -> None:
    states = torch.load(path, weights_only=True, map_location="cpu") if path.exists() else {}
    for run in runs:
        if f"{run.bottleneck}/{run.seed}" in states:
            run.load(states[f"{run.bottleneck}/{run.seed}"])


@torch.no_grad()
def examples(run: Run, test: Stacks, count: int) -> dict[str, np.ndarray] | None:
    """For a picture: stacks, reconstructions, the three slots with the highest scores and the digits they mean.

    A relaxed selection may have more slots. None for a model lost to NaN.
    """
    slots_of_digits = evaluate(run, test)["slots"]
    if slots_of_digits is None:
        return None
    generator = torch.Generator(test.rows.device).manual_seed(0)
    index = torch.arange(count, device=test.rows.device)
    images = test.at(index)
    out = run.model(images, generator)
    slots = out.theta.topk(STACKED).indices.sort().values
    stands_for = torch.empty(CLASSES, dtype=torch.int64)
    stands_for[torch.tensor(slots_of_digits)] = torch.arange(CLASSES)
    parts = out.parts.gather(1, slots[:, :, None, None].expand(-1, -1, *images.shape[1:]))
    as_bytes = {
        name: (255 * x.clamp(0, 1)).byte().cpu().numpy()
        for name, x in (("images", images), ("reconstructions", out.image), ("parts", parts))
    }
    return {**as_bytes, "digits": stands_for[slots.cpu()].numpy(), "truth": test.digits[index].cpu().numpy()}
