"""The autoencoder experiment: data, hidden layers, model, and trainings that are stopped. All on the CPU."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import json
import subprocess
import sys
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("sklearn")
ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # experiments and measuring are folders of the repository, not of the package

from scipy.optimize import minimize  # noqa: E402

import knapgrad as kg  # noqa: E402
from experiments import sweep  # noqa: E402
from experiments.dvae import data, report, training  # noqa: E402
from experiments.dvae.bottlenecks import BOTTLENECKS, SparseSoftMask, StraightThrough  # noqa: E402
from experiments.dvae.model import Autoencoder  # noqa: E402

TINY = training.Settings(epochs=3, batch=4, train=20, test=12)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# Data.


def test_stacks_are_averages_of_three_different_digits():
    digits, _ = data.small_digits()
    stacks = data.stack(digits, 50, seed=0)
    assert stacks.rows.shape == (50, 3) and (stacks.digits.sum(1) == 3).all()
    for index in range(50):
        shown = digits.labels[stacks.rows[index]]
        assert len(set(shown)) == 3 and set(shown) == set(np.flatnonzero(stacks.digits[index]))
        average = digits.images[stacks.rows[index]].astype(float).mean(0) / 255
        np.testing.assert_allclose(stacks.at(torch.tensor([index]))[0], average, atol=1e-6)
    assert (data.stack(digits, 50, seed=0).rows == stacks.rows).all()
    assert (data.stack(digits, 50, seed=1).rows != stacks.rows).any()


@pytest.fixture
def files(tmp_path, monkeypatch):
    """Four small files in MNIST's format, and their checksums in place of MNIST's."""
    rng, folder = np.random.default_rng(0), tmp_path / "source"
    folder.mkdir()
    checksums = {}
    for name in data.CHECKSUMS:
        shape = (5, 28, 28) if "images" in name else (5,)
        head = bytes([0, 0, 8, len(shape)]) + np.array(shape, ">i4").tobytes()
        content = gzip.compress(head + rng.integers(0, 10, shape, dtype=np.uint8).tobytes())
        (folder / name).write_bytes(content)
        checksums[name] = hashlib.sha256(content).hexdigest()
    monkeypatch.setattr(data, "CHECKSUMS", checksums)
    return folder


def test_mnist_is_read(files):
    digits = data.mnist(files, "train")
    raw = gzip.decompress((files / "train-images-idx3-ubyte.gz").read_bytes())
    assert digits.images.shape == (5, 28, 28) and digits.labels.shape == (5,)
    assert digits.images.tobytes() == raw[16:]


def test_another_file_is_refused(files):
    path = files / "t10k-labels-idx1-ubyte.gz"
    for content in (gzip.compress(gzip.decompress(path.read_bytes()) + b"x"), b"not even compressed"):
        path.write_bytes(content)
        with pytest.raises(ValueError, match="not MNIST's file"):
            data.mnist(files, "t10k")


def test_downloads_are_checked(files, tmp_path):
    here = data.download(tmp_path / "cache", files.as_uri() + "/")
    assert {path.name for path in here.iterdir()} == set(data.CHECKSUMS)
    (files / "train-labels-idx1-ubyte.gz").write_bytes(b"something else")
    with pytest.raises(ValueError, match="nothing was kept"):
        data.download(tmp_path / "other", files.as_uri() + "/")
    assert not (tmp_path / "other" / "train-labels-idx1-ubyte.gz").exists()
    with pytest.raises(FileNotFoundError, match="cannot be fetched"):
        data.download(tmp_path / "third", (tmp_path / "nowhere").as_uri() + "/")


def test_a_missing_folder_says_what_to_do(tmp_path):
    with pytest.raises(FileNotFoundError, match="--download"):
        data.find(tmp_path)


# Hidden layers.


@pytest.mark.parametrize("name", BOTTLENECKS)
def test_selections_add_up_to_k_and_gradients_are_finite(name):
    bottleneck = BOTTLENECKS[name](3)
    theta = (5 * torch.randn(40, 10, generator=generator())).requires_grad_()
    y = bottleneck(theta, generator())
    torch.testing.assert_close(y.sum(-1), torch.full((40,), 3.0), atol=1e-4, rtol=0)
    assert y.min() >= 0 and y.max() <= 1 + 1e-6
    penalty = bottleneck.penalty(theta)
    assert penalty.shape == (40,) and (penalty >= -1e-5).all()
    weight = torch.randn(40, 10, generator=generator(1))
    (gradient,) = torch.autograd.grad((y * weight).sum() + penalty.sum(), theta)
    assert torch.isfinite(gradient).all() and (gradient != 0).any()
    torch.testing.assert_close(bottleneck.penalty(torch.zeros(1, 10)), torch.zeros(1), atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", ["Shannon, sampled (SIMPLE)", "Gini, sampled", "Tsallis, sampled", "Gumbel top-k, ST"])
def test_samples_repeat_with_their_seed(name):
    bottleneck, theta = BOTTLENECKS[name](3), torch.zeros(30, 10)
    first, again, other = (bottleneck(theta, generator(seed)) for seed in (0, 0, 1))
    assert torch.equal(first, again) and not torch.equal(first, other)
    assert set(first.unique().tolist()) == {0.0, 1.0}


def test_the_penalty_of_shannon_is_the_kl_divergence():
    theta = torch.randn(5, dtype=torch.float64, generator=generator())
    scores = torch.stack([theta[list(chosen)].sum() for chosen in combinations(range(5), 3)])
    log_p = scores.log_softmax(0)
    kl = (log_p.exp() * (log_p + np.log(10))).sum()
    for name in ("Shannon", "Shannon, sampled (SIMPLE)"):
        torch.testing.assert_close(BOTTLENECKS[name](3).penalty(theta[None])[0], kl)


@pytest.mark.parametrize("p", [2.0, 4 / 3])
@pytest.mark.parametrize("scale", [0.3, 1.0, 4.0])
def test_the_sparse_soft_mask_is_the_optimum(p, scale):
    """Against a general solver."""
    theta = scale * torch.randn(6, dtype=torch.float64, generator=generator(3))
    y = SparseSoftMask.apply(theta[None], 2, p)[0].numpy()
    assert y.sum() == pytest.approx(2, abs=1e-9)

    def loss(y):
        return np.sum(np.maximum(y, 0) ** p) / p - theta.numpy() @ y

    found = minimize(
        loss,
        np.full(6, 1 / 3),
        bounds=[(0, 1)] * 6,
        constraints={"type": "eq", "fun": lambda y: y.sum() - 2},
        tol=1e-12,
    )
    assert loss(y) <= found.fun + 1e-7
    np.testing.assert_allclose(y, found.x, atol=2e-3)


@pytest.mark.parametrize("p", [2.0, 4 / 3])
def test_the_gradient_of_the_sparse_soft_mask(p):
    theta = 0.7 * torch.randn(8, 10, dtype=torch.float64, generator=generator())
    y = SparseSoftMask.apply(theta, 3, p)
    assert ((y == 0).any() or (y == 1).any()) and ((y > 0) & (y < 1)).any()
    torch.autograd.gradcheck(lambda x: SparseSoftMask.apply(x, 3, p), theta.requires_grad_())


def test_the_sparse_soft_mask_of_ties_and_of_certain_choices():
    tied = torch.zeros(1, 10, requires_grad=True)
    torch.testing.assert_close(SparseSoftMask.apply(tied, 3, 2.0), torch.full((1, 10), 0.3))
    certain = torch.tensor([[100.0, 100.0, 100.0, 0.0, 0.0]], requires_grad=True)
    y = SparseSoftMask.apply(certain, 3, 4 / 3)
    torch.testing.assert_close(y, torch.tensor([[1.0, 1.0, 1.0, 0.0, 0.0]]), atol=1e-6, rtol=0)
    (gradient,) = torch.autograd.grad(y.sum(), certain)
    assert torch.isfinite(gradient).all()


@pytest.mark.parametrize("name", ["hard top-k, ST", "Gumbel top-k, ST"])
def test_straight_through_passes_the_gradient_on(name):
    theta = torch.randn(20, 10, generator=generator(), requires_grad=True)
    weight = torch.randn(20, 10, generator=generator(1))
    y = BOTTLENECKS[name](3)(theta, generator())
    (gradient,) = torch.autograd.grad((y * weight).sum(), theta)
    torch.testing.assert_close(gradient, weight)
    assert set(y.round(decimals=5).unique().tolist()) == {0.0, 1.0}
    if name.startswith("hard"):
        assert (theta[y > 0.5].view(20, 3).min(1).values >= theta[y < 0.5].view(20, 7).max(1).values).all()


def test_gumbel_noise_draws_from_the_softmax_of_scores():
    theta, size = torch.tensor([0.0, 1.0, -0.5, 0.3]), 40_000
    layer = StraightThrough(1, temperature=0.5)
    shares = layer(theta.expand(size, -1), generator()).mean(0)
    torch.testing.assert_close(shares, (theta / 0.5).softmax(-1), rtol=0, atol=4 * 0.5 / size**0.5)


# Model and training.


def tiny_data() -> tuple[data.Stacks, data.Stacks]:
    train, test = data.small_digits()
    return data.stack(train, TINY.train, 0), data.stack(test, TINY.test, 1)


def test_images_are_weighted_averages_and_styles_have_their_divergence():
    torch.manual_seed(0)
    model = Autoencoder(BOTTLENECKS["Gini"](3))
    images = tiny_data()[0].at(torch.arange(4))
    out = model(images, generator())
    average = (out.y[:, :, None, None] * out.parts).sum(1) / 3
    torch.testing.assert_close(out.image, average)
    assert out.parts.shape == (4, 10, 28, 28) and out.parts.min() >= 0 and out.parts.max() <= 1
    mean, log_variance = model.style(model.encoder(images[:, None])).view(4, 10, 2, 32).unbind(2)
    normal = torch.distributions.Normal
    kl = torch.distributions.kl_divergence(normal(mean, (log_variance / 2).exp()), normal(0.0, 1.0)).sum((1, 2))
    torch.testing.assert_close(out.style_divergence, kl)


@pytest.mark.parametrize("reconstruction", ["sum", "mean"])
def test_a_step_follows_the_papers_loss(reconstruction):
    settings = training.Settings(epochs=3, batch=4, reconstruction=reconstruction)
    run = training.Run("Tsallis", 0, tiny_data()[0], settings)
    run.epoch = 2
    run.begin_epoch()
    assert float(run.selection_weight) == pytest.approx(1e-5)  # two thirds of the epochs are over
    state = run.generator.get_state()
    images = run.data.at(run.order[0])
    out = run.model(images, run.generator)
    error = (out.image - images).square().sum((1, 2)) / (1 if reconstruction == "sum" else 784)
    divergence = kg.divergence(out.theta, kg.TopK(3), kg.Tsallis())
    loss = (error + 1e-5 * out.style_divergence + 1e-5 * divergence).mean()
    expected = torch.autograd.grad(loss, list(run.model.parameters()))
    run.generator.set_state(state)
    run.step()
    for parameter, gradient in zip(run.model.parameters(), expected):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-4, atol=1e-7)


def test_the_selection_weight_rises_over_two_thirds():
    run = training.Run("Gini", 0, tiny_data()[0], training.Settings(epochs=30, batch=4))
    found = []
    for run.epoch in (0, 10, 20, 29):
        run.begin_epoch()
        found.append(float(run.selection_weight))
    assert found == pytest.approx([0, 0.5e-5, 1e-5, 1e-5])


def test_a_prior_weights_both_divergences_in_the_first_half():
    run = training.Run("Gini", 0, tiny_data()[0], training.Settings(epochs=30, batch=4, prior=8.0))
    styles, selections = [], []
    for run.epoch in (0, 5, 10, 15, 29):
        run.begin_epoch()
        styles.append(float(run.style_weight))
        selections.append(float(run.selection_weight))
    assert styles == pytest.approx([8 + 1e-5, 16 / 3 + 1e-5, 8 / 3 + 1e-5, 1e-5, 1e-5])
    assert selections == pytest.approx([8, 16 / 3 + 0.25e-5, 8 / 3 + 0.5e-5, 0.75e-5, 1e-5])


def test_an_epoch_sees_every_stack_once():
    run = training.Run("Gini", 0, tiny_data()[0], TINY)
    run.begin_epoch()
    assert sorted(run.order.flatten().tolist()) == list(range(20)) and run.steps == 5


class FakeGraph:
    """Makes its steps anew at each replay, as a CUDA graph does."""

    def __init__(self, run: training.Run, steps: int) -> None:
        self.run, self.steps = run, steps

    def replay(self) -> None:
        for _ in range(self.steps):
            self.run.step()


@pytest.mark.thinned(2)
@pytest.mark.parametrize("steps_per_graph", [1, 2, 3, 100])
def test_graphs_and_what_they_leave_over_make_whole_epochs(steps_per_graph, monkeypatch):
    def capture(run, steps, warm_up=1):
        run.graph = FakeGraph(run, steps)
        run.step()
        return warm_up

    monkeypatch.setattr(training.Run, "capture", capture)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "stream", contextlib.nullcontext)
    train, _ = tiny_data()
    plain, graphs = ([training.Run(name, 0, train, TINY) for name in ("Gini", "Gumbel top-k, ST")] for _ in range(2))
    for run in graphs:
        run.stream = "a stream"
    for _ in range(2):
        training.run_epoch(plain)
        training.run_epoch(graphs, steps_per_graph)
    for expected, found in zip(plain, graphs):
        assert int(found.at) == found.steps and found.epoch == 2
        for a, b in zip(expected.model.parameters(), found.model.parameters()):
            torch.testing.assert_close(a, b, rtol=0, atol=0)


def test_trainings_go_on_as_if_never_stopped(tmp_path):
    train, _ = tiny_data()
    names = ["Shannon, sampled (SIMPLE)", "Gumbel top-k, ST"]
    whole, first, second = ([training.Run(name, 1, train, TINY) for name in names] for _ in range(3))
    for _ in range(3):
        training.run_epoch(whole)
    for _ in range(2):
        training.run_epoch(first)
    training.save(first, tmp_path / "checkpoint.pt")
    training.load(second, tmp_path / "checkpoint.pt")
    training.run_epoch(second)
    for expected, found in zip(whole, second):
        assert found.epoch == 3
        for a, b in zip(expected.model.parameters(), found.model.parameters()):
            torch.testing.assert_close(a, b, rtol=0, atol=0)


def test_the_best_matching_finds_a_permutation():
    digits = torch.zeros(200, 10).scatter(1, torch.rand(200, 10, generator=generator()).argsort(1)[:, :3], 1.0)
    permutation = torch.randperm(10, generator=generator())
    slots = training.best_matching(digits[:, permutation], digits)
    torch.testing.assert_close(digits[:, permutation][:, slots], digits)


def test_evaluation_counts_what_it_says():
    """Measure by measure, on the whole test set at once."""
    train, test = tiny_data()
    run = training.Run("Shannon", 0, train, TINY)
    with torch.no_grad():
        run.model.select.weight.mul_(3000)  # so that some selections are above the threshold and some below
    found = training.evaluate(run, test)
    images = test.at(torch.arange(12))
    with torch.no_grad():
        out = run.model(images, generator(0))
    assert 3 < found["nonzeros"] < 10
    assert found["error"] == pytest.approx(float((out.image - images).square().sum((1, 2)).mean()), rel=1e-5)
    assert found["nonzeros"] == pytest.approx(float((out.y > 1e-6).sum(1).float().mean()))
    assert found["positive"] == pytest.approx(float((out.y > 0).sum(1).float().mean()))
    assert found["positive"] > found["nonzeros"]
    assert found["style_divergence"] == pytest.approx(float(out.style_divergence.mean()), rel=1e-5)
    divergence = kg.divergence(out.theta, kg.TopK(3), kg.Shannon())
    assert found["selection_divergence"] == pytest.approx(float(divergence.mean()), rel=1e-5)
    hits = []
    for theta, digits in zip(out.theta, test.digits):
        chosen = set(theta.topk(3).indices.tolist())
        hits.append(sum(found["slots"][digit] in chosen for digit in digits.nonzero().flatten().tolist()))
    assert found["digits_recovered"] == pytest.approx(sum(hits) / 36)
    assert found["sets_recovered"] == pytest.approx(sum(hit == 3 for hit in hits) / 12)
    assert sorted(found["slots"]) == list(range(10))


def test_a_model_that_is_lost_to_nan_has_no_measures_and_no_picture():
    train, test = tiny_data()
    run = training.Run("hard top-k, ST", 0, train, TINY)
    with torch.no_grad():
        run.model.embeddings.fill_(torch.nan)
    assert set(training.evaluate(run, test).values()) == {None} and training.examples(run, test, 2) is None


def test_what_is_not_finite_has_no_measure():
    train, test = tiny_data()
    run = training.Run("Gini", 0, train, TINY)
    with torch.no_grad():
        run.model.style.bias.view(10, 2, 32)[:, 1] = 90.0  # log-variances: exp(90) is beyond float32, exp(45) is not
    found = training.evaluate(run, test)
    assert found["style_divergence"] is None and found["error"] > 0
    json.dumps(found, allow_nan=False)


def test_evaluation_in_parts_is_the_same():
    train, test = tiny_data()
    run = training.Run("Tsallis", 0, train, TINY)
    whole, parts = training.evaluate(run, test), training.evaluate(run, test, batch=5)
    for measure in ("positive", "nonzeros", "selection_divergence", "sets_recovered", "digits_recovered", "slots"):
        assert parts[measure] == pytest.approx(whole[measure])


def test_a_picture_has_the_slots_with_the_highest_scores():
    train, test = tiny_data()
    run = training.Run("Gini", 0, train, TINY)
    with torch.no_grad():
        run.model.select.weight.mul_(100)  # different slots for different stacks
    found, slots_of_digits = training.examples(run, test, 4), training.evaluate(run, test)["slots"]
    images = test.at(torch.arange(4))
    with torch.no_grad():
        out = run.model(images, generator(0))
    best = [sorted(theta.topk(3).indices.tolist()) for theta in out.theta]
    assert len(set(map(tuple, best))) > 1
    assert found["digits"].tolist() == [[slots_of_digits.index(slot) for slot in slots] for slots in best]
    assert found["truth"].tolist() == test.digits[:4].tolist()
    for key, expected in (
        ("images", images),
        ("reconstructions", out.image),
        ("parts", torch.stack([parts[slots] for parts, slots in zip(out.parts, best)])),
    ):
        np.testing.assert_array_equal(found[key], (255 * expected).byte().numpy())


def test_pictures_are_added_to_those_of_other_layers(tmp_path):
    from experiments.dvae.__main__ import add_examples

    add_examples({"Gini": {"truth": np.zeros(2)}, "hard top-k, ST": None}, tmp_path / "examples.npz")
    add_examples({"Tsallis": {"truth": np.ones(2)}}, tmp_path / "examples.npz")
    found = np.load(tmp_path / "examples.npz")
    assert sorted(found) == ["Gini/truth", "Tsallis/truth"] and found["Tsallis/truth"].sum() == 2


def test_a_checkpoint_keeps_the_models_that_are_not_trained_now(tmp_path):
    train, _ = tiny_data()
    both = [training.Run(name, 0, train, TINY) for name in ("Gini", "Tsallis")]
    training.run_epoch(both)
    training.save(both, tmp_path / "checkpoint.pt")
    training.run_epoch(both[:1])
    training.save(both[:1], tmp_path / "checkpoint.pt")
    again = [training.Run(name, 0, train, TINY) for name in ("Gini", "Tsallis")]
    training.load(again, tmp_path / "checkpoint.pt")
    assert [run.epoch for run in again] == [2, 1]


def row(bottleneck: str, seed: int, epochs: int, epoch: int, error: float | None) -> dict[str, object]:
    key = {
        "bottleneck": bottleneck,
        "seed": seed,
        "reconstruction": "sum",
        "prior": 0.0,
        "epochs": epochs,
        "epoch": epoch,
    }
    return key | dict.fromkeys(training.MEASURES, error)


def test_the_table_is_of_complete_trainings_and_counts_nan():
    rows = [row("Gini", seed, 2, epoch, 10.0 + seed) for seed in range(3) for epoch in (1, 2)]
    rows += [row("hard top-k, ST", seed, 2, 2, [None, 20.0, 22.0][seed]) for seed in range(3)]
    rows += [row("Gumbel top-k, ST", seed, 2, 2, None) for seed in range(3)]
    rows += [row("Tsallis", seed, 2, 2, 30.0 + seed) for seed in range(2)] + [row("Tsallis", 2, 2, 1, 99.0)]
    table = report.final_table(rows, training.Settings(epochs=2))
    lines = {line.split(" | ")[0].strip("| "): line for line in table.splitlines()}
    assert "2 epochs, 3 seeds" in table and "99" not in table
    assert "11.00 ± 2.48" in lines["Gini"] and "NaN" not in lines["Gini"]
    assert "21.00 ± 12.71 (1 NaN)" in lines["hard top-k, ST"]
    assert "– (3 NaN)" in lines["Gumbel top-k, ST"]
    assert "30.50 ± 6.35" in lines["Tsallis, 2 seeds"]


# The whole.


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "experiments.dvae", *arguments]


@pytest.fixture
def run_command(monkeypatch, capsys, torch_threads):
    """The command in this process: starting one takes longer than most of what it does."""
    from experiments.dvae import __main__ as dvae

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        monkeypatch.setattr(sys, "argv", ["dvae", *arguments])
        code: str | int | None = 0
        try:
            dvae.main()
        except SystemExit as error:
            code = error.code
        printed = capsys.readouterr()
        errors = f"{printed.err}{code}" if isinstance(code, str) else printed.err
        return subprocess.CompletedProcess(arguments, 1 if isinstance(code, str) else code or 0, printed.out, errors)

    return run


def test_a_quick_run_stops_in_time_goes_on_and_reports(tmp_path, run_command):
    chosen = ["--quick", "--output", str(tmp_path), "--device", "cpu", "--bottlenecks", "Gini", "hard top-k, ST"]
    stopped = run_command("train", "--minutes", "0", *chosen)
    assert stopped.returncode == 0 and "the time is up" in stopped.stdout, stopped.stderr
    assert {row["epoch"] for row in sweep.read(tmp_path / "dvae.jsonl")} == {1}
    done = run_command(*chosen)
    assert done.returncode == 0, done.stderr
    rows = [(row["bottleneck"], row["seed"], row["epoch"]) for row in sweep.read(tmp_path / "dvae.jsonl")]
    assert sorted(rows) == sorted((name, 0, epoch) for name in ("Gini", "hard top-k, ST") for epoch in (1, 2))
    times = json.loads((tmp_path / "dvae_time.json").read_text())["rows"]
    assert [row["bottleneck"] for row in times] == ["Gini", "hard top-k, ST"]
    for figure in ("dvae_sum-2_error.png", "dvae_sum-2_style_divergence.png", "dvae_examples_sum-2.png"):
        assert (tmp_path / figure).stat().st_size > 10_000
    assert "hard top-k, ST" in done.stdout and "share" in done.stdout
    for checkpoint in (tmp_path / "checkpoints").iterdir():
        checkpoint.unlink()
    path = tmp_path / "dvae.jsonl"
    whole = path.read_text()
    again = run_command("train", *chosen)
    assert again.returncode == 0 and path.read_text() == whole, again.stderr  # complete trainings are not run again
    path.write_text("".join(line for line in whole.splitlines(keepends=True) if '"epoch": 2' not in line))
    lost = run_command("train", *chosen)
    assert lost.returncode == 1 and "choose another --output" in lost.stderr


def test_a_run_that_is_killed_between_checkpoint_and_rows_goes_on(tmp_path, monkeypatch, torch_threads):
    from experiments.dvae import __main__ as dvae

    def killed(*_):
        raise KeyboardInterrupt

    chosen = ["train", "--quick", "--device", "cpu", "--bottlenecks", "hard top-k, ST", "--output", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["dvae", *chosen])
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(dvae, "evaluate", killed)
        dvae.main()
    assert sweep.read(tmp_path / "dvae.jsonl") == []
    dvae.main()
    assert [row["epoch"] for row in sweep.read(tmp_path / "dvae.jsonl")] == [1, 2]


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["trian"], "no such part: trian"),
        (["--bottlenecks", "softmax"], "no such bottleneck: softmax"),
        (["--seeds", "0"], "at least 1"),
        (["--prior", "-1"], "--prior must be"),
        (["--prior", "nan"], "--prior must be"),
        (["--device", "cuda"], "no GPU"),
        (["train", "--data", "nowhere"], "MNIST is not in nowhere"),
        (["--quick", "--data", "somewhere"], "leave out --data"),
        (["report"], "run the part train first"),
    ],
)
def test_bad_arguments(arguments, message, tmp_path, monkeypatch, capsys):
    from experiments.dvae.__main__ import main

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["dvae", *arguments, "--output", str(tmp_path)])
    with pytest.raises(SystemExit) as stopped:
        main()
    assert message in capsys.readouterr().err + str(stopped.value.code)
