"""A short run of the fuzzer; that it finds a mistake; that its oracle is right where selections can be enumerated."""

from __future__ import annotations

import numpy as np
import pytest

import knapgrad as kg
from fuzzing.__main__ import case_of, fuzz, main
from fuzzing.cases import KINDS
from fuzzing.checks import code_of, failures, smallest

BACKENDS = ["numpy", pytest.param("torch", marks=pytest.mark.filterwarnings("ignore"))]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_short_run(backend, torch_threads):
    report = fuzz(1500, 11, [backend], largest_batch=20, few_kernels=True)
    assert report["failures"] == 0, report["failing"][0]["code"]
    assert report["instances"] >= 1500 and report["calls"] > 300
    assert {f"constraint: {kind}" for kind in KINDS} <= report["categories"].keys()


def test_a_planted_mistake_is_found_and_its_code_fails_too(monkeypatch, torch_threads):
    relax = kg.relax

    def wrong(theta, constraint, smoothing):
        y = relax(theta, constraint, smoothing)
        return np.where(y > 0.9, y - 1e-3, y).astype(y.dtype)

    cases = [case for case in (case_of(3, "numpy", i, 60) for i in range(28)) if case.theta.size]
    monkeypatch.setattr(kg, "relax", wrong)
    found = [failure for case in cases for _, failure in failures(case, only="relax") if failure is not None]
    assert found
    failure = smallest(max(found, key=lambda failure: failure.case.theta.size))
    assert failure.case.theta.shape[:2] == (1, 1)
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        exec(code_of(failure), {})
    monkeypatch.undo()
    exec(code_of(failure), {})


def test_an_error_is_a_failure(monkeypatch, torch_threads):
    def broken(theta, constraint):
        raise RuntimeError("planted")

    monkeypatch.setattr(kg, "solve", broken)
    found = [failure for _, failure in failures(case_of(3, "numpy", 0, 60), only="solve")]
    assert str(found[0].found) == "planted"
    with pytest.raises(RuntimeError, match="planted"):
        exec(code_of(smallest(found[0])), {})


def test_the_oracle_is_the_enumeration():
    checked = 0
    for i in range(60):
        case = case_of(5, "numpy", i, 20)
        truth, hard = case.truth(), case.truth(name="hard")
        count = truth.scores.shape[2] ** truth.scores.shape[1]
        if count > 100 or not len(case.theta) or case.regularizer != "shannon" or case.content == "extremes":
            continue
        every, checked = truth.enumerated(), checked + 1
        np.testing.assert_allclose(truth.value.astype(float), every["value"].astype(float), rtol=1e-13, atol=1e-13)
        np.testing.assert_allclose(hard.value.astype(float), hard.enumerated()["best"].astype(float), rtol=1e-13)
        picked = np.broadcast_to(every["picked"], (count, len(case.theta), truth.scores.shape[1]))
        log_prob, _ = truth.log_prob(picked)
        np.testing.assert_allclose(np.exp(log_prob).astype(float), every["p"].astype(float), atol=1e-13)
        chosen = picked[..., None] == np.arange(truth.scores.shape[2])
        mean = (every["p"][..., None, None] * chosen).sum(0)
        np.testing.assert_allclose(truth.marginals.astype(float), mean.astype(float), atol=1e-13)
    assert checked > 3


def test_the_command(tmp_path, capsys, monkeypatch, torch_threads):
    pytest.importorskip("tqdm")
    output = tmp_path / "fuzz.json"
    assert main(["--instances", "100", "--backends", "numpy", "--seed", "2", "--output", str(output)]) == 0
    assert '"commit"' in output.read_text() and "0 of them wrong" in capsys.readouterr().out
    monkeypatch.setattr(kg, "entropy", lambda theta, *_: 0.0 * theta)
    assert main(["--instances", "100", "--backends", "numpy"]) == 1
    assert "The smallest that fails" in capsys.readouterr().out
