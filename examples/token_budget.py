"""A small vision transformer that reads only the tokens that fit into a budget, which differs from image to image.

Each image has 16 tokens; blank ones are padding. A token has a cost, an image a budget, and a scorer learns which ones
to keep. Training is soft, use is hard, and the question is what the step from soft to hard costs: four ways to train
are compared. The model is compiled, with constraints that are made from tensors inside of it.

    python examples/token_budget.py --help
"""

from __future__ import annotations

import argparse
import shutil
import time
from pathlib import Path

import torch
from matplotlib.figure import Figure
from sklearn.datasets import load_digits
from torch import Tensor, nn
from tqdm import tqdm

import knapgrad as kg

TOKENS, PIXELS, WIDTH, LARGEST_BUDGET = 16, 4, 64, 40


def data(seed: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Patches of 2 x 2 pixels, which of them are not blank, costs of 1 to 4, and budgets of 20 to 50% of all."""
    digits = load_digits()
    images = torch.tensor(digits.images / 16, dtype=torch.float32)
    patches = images.unfold(1, 2, 2).unfold(2, 2, 2).reshape(-1, TOKENS, PIXELS)
    generator = torch.Generator().manual_seed(seed)
    cost = torch.randint(1, 5, patches.shape[:2], generator=generator)
    share = 0.2 + 0.3 * torch.rand(len(patches), generator=generator)
    everything = {
        "patches": patches,
        "present": patches.amax(-1) > 0,
        "cost": cost,
        "budget": (share * cost.sum(-1)).long(),
        "label": torch.tensor(digits.target),
    }
    order = torch.randperm(len(patches), generator=generator)
    return tuple({name: x[part] for name, x in everything.items()} for part in (order[360:], order[:360]))  # type: ignore[return-value]


class TokenBudget(nn.Module):
    """Scores tokens, keeps those that fit, and reads them by attention; a token counts as much as it is kept."""

    def __init__(self, select: nn.Module) -> None:
        super().__init__()
        self.select = select
        self.embed, self.place = nn.Linear(PIXELS, WIDTH), nn.Parameter(0.1 * torch.randn(TOKENS, WIDTH))
        self.score = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, 1))
        self.queries, self.keys, self.values = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.read = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, 10))

    def forward(self, patches: Tensor, present: Tensor, cost: Tensor, budget: Tensor) -> tuple[Tensor, Tensor]:
        tokens = self.embed(patches) + self.place
        # a fixed scale: else the model undoes a lower gamma; positive: a knapsack picks nothing negative; -inf: padding
        scores = nn.functional.softplus(nn.functional.layer_norm(self.score(tokens).squeeze(-1), (TOKENS,)))
        scores = scores.masked_fill(~present, -torch.inf)
        kept = self.select(scores, kg.Knapsack(cost, budget, max_capacity=LARGEST_BUDGET))
        weights = torch.exp(self.queries(tokens) @ self.keys(tokens).mT / WIDTH**0.5) * kept.unsqueeze(-2)
        mixed = weights @ self.values(tokens) / (weights.sum(-1, keepdim=True) + 1e-6)
        pooled = ((tokens + mixed) * kept.unsqueeze(-1)).sum(-2) / (kept.sum(-1, keepdim=True) + 1e-6)
        return self.read(pooled), kept


def accuracy(model: nn.Module, test: dict[str, Tensor]) -> float:
    with torch.no_grad():
        logits, kept = model(*(test[name] for name in ("patches", "present", "cost", "budget")))
    spent = (kept.double() * test["cost"]).sum(-1)
    assert (spent <= test["budget"] + 1e-4).all()
    return float((logits.argmax(-1) == test["label"]).float().mean())


def train(
    model: TokenBudget, run: nn.Module, args: argparse.Namespace, last_gamma: float | None
) -> tuple[float, float]:
    """Accuracy on new images with the selection of training, and with the hard one."""
    train_set, test = data(args.seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.05)
    steps = args.epochs * (len(train_set["label"]) // args.batch)
    rate = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps)
    schedule = None if last_gamma is None else kg.torch.GammaSchedule(model, last_gamma, steps)
    for _ in tqdm(range(args.epochs), leave=False):
        for batch in torch.randperm(len(train_set["label"])).split(args.batch):
            if len(batch) < args.batch:
                continue
            part = {name: x[batch] for name, x in train_set.items()}
            label = part.pop("label")
            logits, _ = run(**part)
            optimizer.zero_grad()
            nn.functional.cross_entropy(logits, label).backward()
            optimizer.step()
            rate.step()
            if schedule is not None:
                schedule.step()
    soft = accuracy(model.train(), test)
    return soft, accuracy(model.eval(), test)


WAYS = {
    "relaxed": (lambda gamma: kg.torch.Relax(None, kg.Gini(gamma), hard_eval=True), None),
    "relaxed, gamma lowered": (lambda gamma: kg.torch.Relax(None, kg.Gini(gamma), hard_eval=True), 0.02),
    "straight-through": (
        lambda gamma: kg.torch.Relax(None, kg.Gini(gamma), hard_eval=True, straight_through=True),
        None,
    ),
    "sampled": (lambda gamma: kg.torch.Sample(None, kg.Gini(gamma), hard_eval=True), None),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--gamma", type=float, default=1.0, help="strength of the smoothing, at the start")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--backend", help="of torch.compile; inductor where there is a C++ compiler, else aot_eager")
    parser.add_argument("--output", type=Path, default=Path("results"), help="folder of the picture")
    args = parser.parse_args()
    if args.backend is None:
        args.backend = "inductor" if any(map(shutil.which, ("g++", "clang++", "c++"))) else "aot_eager"
    rows = {}
    for name, (layer, last_gamma) in WAYS.items():
        torch.manual_seed(args.seed)
        begin, model = time.perf_counter(), TokenBudget(layer(args.gamma))
        rows[name] = train(model, torch.compile(model, backend=args.backend, fullgraph=True), args, last_gamma)
        soft, hard = (f"{100 * x:.1f}%" for x in rows[name])
        print(f"{name:24} {soft} as trained   {hard} hard   {time.perf_counter() - begin:.0f} s", flush=True)
    figure = Figure(figsize=(6, 2.6), layout="constrained")
    axis = figure.subplots()
    for shift, (label, values) in enumerate(zip(("as trained", "hard"), zip(*rows.values()))):
        axis.barh([i + 0.35 * shift for i in range(len(rows))], [100 * x for x in values], 0.35, label=label)
    axis.set(yticks=[i + 0.17 for i in range(len(rows))], yticklabels=list(rows), xlabel="accuracy on new images, %")
    axis.set_xlim(left=max(0, 100 * min(min(pair) for pair in rows.values()) - 10))
    axis.invert_yaxis()
    axis.legend()
    args.output.mkdir(parents=True, exist_ok=True)
    figure.savefig(args.output / "token_budget.png", dpi=150)
    print(f"drawn in {args.output / 'token_budget.png'}")


if __name__ == "__main__":
    main()
