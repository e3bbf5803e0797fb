"""The experiments: short runs of each, and that no row of a sweep is lost or doubled, whatever is killed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("joblib")
HERE = Path(__file__).resolve().parent  # sweep_tasks.py is here too
ROOT = HERE.parents[1]
sys.path.insert(0, str(ROOT))  # experiments and measuring are folders of the repository, not of the package

from joblib.externals.loky.process_executor import TerminatedWorkerError  # noqa: E402

from experiments import sweep  # noqa: E402
from sweep_tasks import fails, killed_once, square  # noqa: E402

TASKS = [{"number": i} for i in range(6)]


def numbers(path: Path) -> Counter[int]:
    return Counter(row["number"] for row in sweep.read(path))


@pytest.mark.parametrize("jobs", [1, 2])
def test_rows_come_once_and_in_order(jobs, tmp_path):
    path = tmp_path / "rows.jsonl"
    first = sweep.run(square, TASKS[:4], path, jobs)
    assert first == [{"number": i, "square": i * i} for i in range(4)]
    again = sweep.run(square, TASKS[::-1], path, jobs)
    assert [row["number"] for row in again] == [5, 4, 3, 2, 1, 0]
    assert numbers(path) == Counter(range(6))


def test_what_is_in_the_file_is_not_run_again(tmp_path):
    path = tmp_path / "rows.jsonl"
    sweep.run(square, TASKS, path)
    assert sweep.run(fails, TASKS, path)[3]["square"] == 9


def test_a_line_that_was_cut_off_is_run_again(tmp_path):
    path = tmp_path / "rows.jsonl"
    sweep.run(square, TASKS, path)
    whole = path.read_text()
    path.write_text(whole[:-5])
    sweep.run(square, TASKS, path)
    assert numbers(path) == Counter(range(6)) and len(path.read_text()) == len(whole)


def test_reading_changes_nothing(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"number": 1}\n{"number"')
    assert numbers(path) == Counter([1]) and path.read_text().endswith('{"number"')


def test_tasks_that_are_the_same_run_once_and_others_have_the_same_fields(tmp_path):
    path = tmp_path / "rows.jsonl"
    assert len(sweep.run(square, TASKS[:2] * 2, path)) == 2 and numbers(path) == Counter([0, 1])
    with pytest.raises(ValueError, match="the same fields"):
        sweep.run(square, [{"number": 1}, {"number": 2, "other": 1}], path)


def test_an_error_keeps_the_rows_that_are_finished(tmp_path):
    path = tmp_path / "rows.jsonl"
    with pytest.raises(ArithmeticError, match="no such number"):
        sweep.run(fails, TASKS, path)
    assert numbers(path) == Counter([0, 1, 2])


def test_one_run_a_file(tmp_path):
    path = tmp_path / "rows.jsonl"
    with sweep.alone(path), pytest.raises(SystemExit, match="another run"):
        sweep.run(square, TASKS, path)


def test_killed_workers_lose_no_row(tmp_path):
    path = tmp_path / "rows.jsonl"
    tasks = [task | {"folder": str(tmp_path)} for task in TASKS]
    rows = sweep.run(killed_once, tasks, path, jobs=2)
    assert [row["square"] for row in rows] == [i * i for i in range(6)]
    assert numbers(path) == Counter(range(6))


@pytest.mark.parametrize("retries", [0, 1])
def test_workers_that_die_too_often_end_the_run(retries, tmp_path, monkeypatch):
    """One at a time, since all that were at work when a worker is lost are lost with it."""
    monkeypatch.setattr(sweep, "RETRIES", retries)
    path, tasks = (
        tmp_path / "rows.jsonl",
        [{"number": 3, "folder": str(tmp_path)}, {"number": 4, "folder": str(tmp_path)}],
    )
    if retries:
        assert [row["square"] for row in sweep.run(killed_once, tasks, path, jobs=2)] == [9, 16]
    else:
        with pytest.raises(TerminatedWorkerError):
            sweep.run(killed_once, tasks, path, jobs=2)
        assert 3 not in numbers(path)


def test_killed_workers_of_a_ray_cluster_lose_no_row(tmp_path):
    """In a process of its own, which can be ended with all that Ray has started."""
    pytest.importorskip("ray")
    script = f"""
import sys
sys.path[:0] = [{str(ROOT)!r}, {str(HERE)!r}]
import ray
from pathlib import Path
from experiments import sweep
import sweep_tasks as functions
ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False,
         runtime_env={{"env_vars": {{"PYTHONPATH": {(str(ROOT) + os.pathsep + str(HERE))!r}}}}})
tasks = [{{"number": i, "folder": {str(tmp_path)!r}}} for i in range(6)]
rows = sweep.run(functions.killed_once, tasks, Path({str(tmp_path / "rows.jsonl")!r}), jobs=2, ray=True)
assert [row["square"] for row in rows] == [i * i for i in range(6)], rows
print("all rows are there")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300)
    assert "all rows are there" in done.stdout, done.stdout + done.stderr
    assert numbers(tmp_path / "rows.jsonl") == Counter(range(6))


# The benchmark of PyEPO


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "experiments.pyepo", *arguments]


def test_a_quick_run_draws_its_figure(tmp_path):
    pytest.importorskip("pyepo")
    done = subprocess.run(
        command("--quick", "--output", str(tmp_path)), cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    rows = sweep.read(tmp_path / "pyepo_knapsack.jsonl")
    methods = {row["method"] for row in rows}
    assert len(rows) == len(methods) == 12 and {"DP Shannon", "SPO+", "PFY, 10 samples"} <= methods
    assert all(0 <= row["test_regret"] < 1 for row in rows)
    assert {row["sees"] for row in rows if row["method"] in ("MSE", "SPO+")} == {"values"}
    times = json.loads((tmp_path / "pyepo_knapsack_time.json").read_text())["rows"]
    assert {row["method"] for row in times} == methods | {"PFY, 10 samples, without PyEPO"}
    for part in ("time", "regret", "regret_decisions"):
        assert (tmp_path / f"pyepo_knapsack_{part}.png").stat().st_size > 10_000
    assert "DP Shannon" in done.stdout


def test_a_run_that_is_killed_goes_on(tmp_path):
    pytest.importorskip("pyepo")
    path = tmp_path / "pyepo_knapsack.jsonl"
    arguments = ["train", "--quick", "--methods", "MSE", "NID", "--seeds", "3", "--output", str(tmp_path)]
    process = subprocess.Popen(command(*arguments), cwd=ROOT, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while (not path.exists() or not path.read_text()) and time.monotonic() < deadline:
        time.sleep(0.02)
    process.kill()
    process.wait()
    kept = path.read_text()
    assert kept, "nothing was written in two minutes"
    subprocess.run(command(*arguments), cwd=ROOT, check=True, stderr=subprocess.DEVNULL, timeout=300)
    assert path.read_text().startswith(kept[: kept.rfind("\n") + 1])
    rows = Counter((row["method"], row["seed"]) for row in sweep.read(path))
    assert rows == Counter((method, seed) for method in ("MSE", "NID") for seed in range(3))


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["trian"], "no such part: trian"),
        (["--methods", "SPO"], "no such method: SPO"),
        (["--jobs", "0"], "at least 1"),
    ],
)
def test_bad_arguments(arguments, message, monkeypatch, capsys):
    pytest.importorskip("pyepo")
    from experiments.pyepo.__main__ import main

    monkeypatch.setattr(sys, "argv", ["pyepo", *arguments])
    with pytest.raises(SystemExit, match="2"):
        main()
    assert message in capsys.readouterr().err


def test_the_data_is_that_of_the_paper():
    pytest.importorskip("pyepo")
    import numpy as np

    from experiments.pyepo import data

    benchmark = data.generate(25, seed=1, scale=0.02)
    assert set(benchmark.weights) <= set(range(3, 9)) and benchmark.capacity == benchmark.weights.sum() // 2
    train = benchmark.parts["train"]
    assert train.features.shape == (200, 5) and train.values.shape == (200, 25)
    values = train.values.numpy()
    assert (values == np.ceil(values)).all() and values.min() >= 1
    assert ((train.decisions.numpy() * benchmark.weights).sum(-1) <= benchmark.capacity).all()
    other = data.generate(25, seed=2, scale=0.02)
    assert not np.array_equal(other.parts["train"].features, train.features)


@pytest.mark.parametrize("method", ["DP Gini", "NCE", "PFY, 1 sample"])
def test_a_training_repeats(method, torch_threads):
    pytest.importorskip("pyepo")
    from experiments.pyepo.training import train

    first, second = (train(method, 10, 0, epochs=1, scale=0.02) for _ in range(2))
    assert first["curve"] == second["curve"]
