"""Two processes with DistributedDataParallel learn as one process does on the whole batch."""

from __future__ import annotations

from pathlib import Path

import pytest

import knapgrad as kg

torch = pytest.importorskip("torch")
from torch import Tensor, nn  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

import knapgrad.torch as kgt  # noqa: E402

WORLD, BATCH, FEATURES, ITEMS = 2, 8, 3, 5

pytestmark = pytest.mark.skipif(
    not torch.distributed.is_available() or not torch.distributed.is_gloo_available(), reason="needs gloo"
)


class Model(nn.Module):
    """Scores, a relaxed selection and a loss, with a learnable gamma and the constraints in buffers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.scores = nn.Linear(FEATURES, ITEMS).double()
        gamma = nn.Parameter(torch.tensor(0.8, dtype=torch.float64))
        self.relax = kgt.Relax(kg.TopK(2), kg.Tsallis(gamma))
        self.loss = kgt.FenchelYoungLoss(kg.Knapsack([2, 1, 3, 0, 2], 5), kg.Gini())

    def forward(self, features: Tensor, target: Tensor) -> Tensor:
        theta = self.scores(features)
        return self.loss(theta, target) + (self.relax(theta) * theta).sum(-1).mean()


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    features = torch.randn(BATCH, FEATURES, generator=generator, dtype=torch.float64)
    wanted = torch.randn(BATCH, ITEMS, generator=generator, dtype=torch.float64)
    return features, kg.solve(wanted, kg.Knapsack([2, 1, 3, 0, 2], 5))


def train(model: nn.Module, features: Tensor, target: Tensor) -> list[dict[str, Tensor]]:
    """The gradients of two steps, and the parameters after them."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    record = []
    for _ in range(2):
        optimizer.zero_grad()
        model(features, target).backward()
        record.append({name.removeprefix("module."): x.grad.clone() for name, x in model.named_parameters()})
        optimizer.step()
    record.append({name.removeprefix("module."): x.detach().clone() for name, x in model.named_parameters()})
    return record


def worker(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    path = Path(folder)
    torch.distributed.init_process_group(
        "gloo", init_method=(path / "rendezvous").as_uri(), rank=rank, world_size=WORLD
    )
    try:
        part = slice(rank * BATCH // WORLD, (rank + 1) * BATCH // WORLD)
        record = train(DistributedDataParallel(Model()), *(x[part] for x in data()))
        torch.save(record, path / f"{rank}.pt")
    finally:
        torch.distributed.destroy_process_group()


def test_two_processes_are_one(tmp_path):
    torch.multiprocessing.spawn(worker, (str(tmp_path),), nprocs=WORLD)
    expected = train(Model(), *data())
    assert set(expected[0]) == {"scores.weight", "scores.bias", "relax.gamma"}
    assert all(gradient.any() for gradient in expected[0].values())
    for rank in range(WORLD):
        record = torch.load(tmp_path / f"{rank}.pt", weights_only=True)
        torch.testing.assert_close(record, expected, rtol=1e-12, atol=1e-14)
