"""The code in the README and the example run as they are written."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
DEMO = ROOT / "examples" / "learn_from_decisions.py"
JAX_EXAMPLE = ROOT / "examples" / "jax_feature_selection.py"
NUMPYRO_EXAMPLE = ROOT / "examples" / "numpyro_subsets.py"
PYEPO_EXAMPLE = ROOT / "examples" / "pyepo_knapsack.py"
AUTOENCODER = ROOT / "examples" / "top_k_autoencoder.py"
ALLOCATION = ROOT / "examples" / "bit_allocation.py"
SPENDING = ROOT / "examples" / "spend_at_least.py"
TOKENS = ROOT / "examples" / "token_budget.py"


def blocks(document: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", document.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


@pytest.fixture
def run(monkeypatch, capsys, torch_threads):
    """Runs an example in this process: starting one takes longer than most of them."""

    def run(script: Path, *arguments: str, folder: Path) -> str:
        monkeypatch.chdir(folder)
        monkeypatch.setattr(sys, "argv", [str(script), *arguments])
        monkeypatch.setattr(sys, "path", [str(script.parent), *sys.path])
        try:
            runpy.run_path(str(script), run_name="__main__")
        except SystemExit as error:
            assert not error.code
        return capsys.readouterr().out

    return run


def test_the_readme_has_code():
    assert blocks(README)


def test_the_readme_is_short():
    assert len(README.read_text(encoding="utf-8").splitlines()) <= 130


def test_the_code_of_the_readme_runs_and_prints_what_it_says(capsys):
    pytest.importorskip("torch")
    pytest.importorskip("jax")
    namespace: dict[str, object] = {"__name__": "readme"}
    for number, block in enumerate(blocks(README), start=1):
        exec(compile(block, f"README.md, block {number}", "exec"), namespace)
    line = r"step (\d+): loss ([\d.]+), ([\d.]+)% of the picks agree"
    printed, said = re.findall(line, capsys.readouterr().out), re.findall(line, README.read_text(encoding="utf-8"))
    assert len(printed) == len(said) == 3
    for row, expected in zip(printed, said):
        assert [float(x) for x in row] == pytest.approx([float(x) for x in expected], rel=0.01, abs=0.3)


def test_the_code_of_the_page_on_jax_runs():
    pytest.importorskip("jax")
    namespace: dict[str, object] = {"__name__": "page"}
    for number, block in enumerate(blocks(ROOT / "docs" / "jax.md"), start=1):
        exec(compile(block, f"docs/jax.md, block {number}", "exec"), namespace)


@pytest.mark.parametrize("document", ["README.md", "CONTRIBUTING.md", "experiments/README.md"])
def test_links_point_at_files(document):
    """Those of the pages of the site are checked when it is built."""
    targets = re.findall(r"\]\(([^)#:]+)\)", (ROOT / document).read_text(encoding="utf-8"))
    assert [target for target in targets if not (ROOT / document).parent.joinpath(target).exists()] == []


def test_the_demo_explains_itself(tmp_path, run):
    pytest.importorskip("torch")
    pytest.importorskip("matplotlib")
    text = run(DEMO, "--help", folder=tmp_path)
    assert "usage" in text
    assert "--gamma" in text


def test_the_demo_runs(tmp_path, run):
    pytest.importorskip("torch")
    pytest.importorskip("matplotlib")
    small = ["--items", "6", "--train", "40", "--test", "20", "--epochs", "2", "--batch", "20"]
    text = run(DEMO, *small, "--output", str(tmp_path / "results"), folder=tmp_path)
    assert "Fenchel-Young, Gini" in text
    assert list((tmp_path / "results").glob("*.png"))


def test_the_jax_example_runs(tmp_path, run):
    pytest.importorskip("equinox")
    pytest.importorskip("optax")
    text = run(JAX_EXAMPLE, "--features", "8", "--samples", "40", "--steps", "3", folder=tmp_path)
    assert "useful features kept" in text


def test_the_numpyro_example_recovers_what_shoppers_like(tmp_path, run):
    """Of twelve true values, ten lie in their intervals with 300 samples; twenty are too few to tell as much."""
    pytest.importorskip("numpyro")
    pytest.importorskip("matplotlib")
    assert len(NUMPYRO_EXAMPLE.read_text().splitlines()) < 100
    assert "--seed" in run(NUMPYRO_EXAMPLE, "--help", folder=tmp_path)
    text = run(NUMPYRO_EXAMPLE, "--samples", "20", "--shoppers", "100", folder=tmp_path)
    errors = re.findall(r"^(?:appeal|share) +mean error ([\d.]+) by the posterior, ([\d.]+) by", text, re.MULTILINE)
    assert len(errors) == 2 and all(float(posterior) < 0.5 * float(naive) for posterior, naive in errors)
    assert (tmp_path / "results" / "numpyro_subsets.png").exists()


def test_the_pyepo_example_learns(tmp_path, run):
    pytest.importorskip("pyepo")
    text = run(PYEPO_EXAMPLE, folder=tmp_path)
    regrets = re.findall(r"(\w+) +([\d.]+)% before training +([\d.]+)% after", text)
    assert [name for name, _, _ in regrets] == ["shannon", "gini", "tsallis", "stage"]
    assert all(float(after) < 0.2 * float(before) for _, before, after in regrets)
    assert (tmp_path / "results" / "pyepo_knapsack.png").exists()


def test_the_autoencoder_example_does_not_collapse(tmp_path, run):
    """Without its prior, this seed recovers 31% of the digits, whatever the number of steps, and 49% with it."""
    pytest.importorskip("torch")
    pytest.importorskip("sklearn")
    assert len(AUTOENCODER.read_text().splitlines()) < 100
    text = run(AUTOENCODER, "--steps", "1500", "--seed", "2", folder=tmp_path)
    assert float(re.search(r"(\d+)% of the digits recovered", text)[1]) > 40
    assert (tmp_path / "results" / "top_k_autoencoder.png").exists()


def test_the_spending_example_keeps_both_limits(tmp_path, run):
    assert len(SPENDING.read_text().splitlines()) < 60
    assert "--seed" in run(SPENDING, "--help", folder=tmp_path)
    text = run(SPENDING, "--seed", "3", "--projects", "20", folder=tmp_path)
    free, bound = (float(share) for share in re.findall(r"([\d.]+)% +-?\d", text)[:2])
    assert free < 80 <= bound <= 100


def test_the_allocation_example_agrees_with_highs_and_keeps_the_budget(tmp_path, run):
    """It compares exact allocations with HiGHS and with the frontier by itself."""
    pytest.importorskip("torch")
    pytest.importorskip("sklearn")
    pytest.importorskip("matplotlib")
    assert len(ALLOCATION.read_text().splitlines()) < 150
    assert "--budget" in run(ALLOCATION, "--help", folder=tmp_path)
    text = run(ALLOCATION, "--epochs", "2", "--budget", "12500", folder=tmp_path)
    number = r" +([\d.,]+)"
    rows = re.findall(r"^(same bits|greedy|exact|learned)" + number * 2, text, re.MULTILINE)
    size, predicted = ({row[0]: float(row[i].replace(",", "")) for row in rows} for i in (1, 2))
    assert len(size) == 4 and max(size.values()) <= 12500
    assert predicted["exact"] <= min(predicted.values())
    assert float(re.search("was" + number + " bytes at most", text)[1].replace(",", "")) <= 12500
    assert "exact = HiGHS = frontier" in text
    assert (tmp_path / "results" / "bit_allocation.png").exists()


def test_the_token_example_keeps_budgets_and_compares_four_ways(tmp_path, run):
    """It checks by itself that no image reads more than its budget."""
    pytest.importorskip("torch")
    pytest.importorskip("sklearn")
    pytest.importorskip("matplotlib")
    assert len(TOKENS.read_text().splitlines()) < 150
    text = run(TOKENS, "--epochs", "1", "--batch", "256", "--backend", "aot_eager", folder=tmp_path)
    rows = re.findall(r"^(.+?) +([\d.]+)% as trained +([\d.]+)% hard", text, re.MULTILINE)
    assert [row[0] for row in rows] == ["relaxed", "relaxed, gamma lowered", "straight-through", "sampled"]
    assert (tmp_path / "results" / "token_budget.png").exists()
