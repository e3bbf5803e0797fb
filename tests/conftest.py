from __future__ import annotations

import gc
import importlib.metadata
import importlib.util
import itertools
import os
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings


def _interpret_triton() -> None:
    """Without a GPU its kernels run in Triton's interpreter, which must be asked for before Triton is imported."""
    if importlib.util.find_spec("torch") and importlib.util.find_spec("triton"):
        import torch

        if not torch.cuda.is_available():
            os.environ["TRITON_INTERPRET"] = "1"


if "PYTEST_XDIST_WORKER" in os.environ:  # workers have a core each; threads that wait for one another take much longer
    os.environ.setdefault("OMP_NUM_THREADS", "1")
_interpret_triton()
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # several workers share a GPU
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=4"  # for meshes
_JAXLIB = importlib.metadata.version("jaxlib") if importlib.util.find_spec("jaxlib") else ""
if _JAXLIB.startswith("0.10."):  # others may not know the flag, and would abort
    os.environ["XLA_FLAGS"] += " --xla_cpu_use_fusion_emitters=false"  # compiles in half the time what is run once

import knapgrad as kg  # noqa: E402
from backends import BACKENDS, Backend  # noqa: E402
from instances import CONSTRAINTS  # noqa: E402
from kinds import KINDS, is_compiled  # noqa: E402
from knapgrad.regularizers import REGULARIZERS as CLASSES  # noqa: E402
from oracles import REGULARIZERS  # noqa: E402
from representatives import REPRESENTATIVES  # noqa: E402

gc.set_threshold(200_000, 50, 100)  # a fifth of the time of tests with JAX and torch.compile, which keep much

settings.register_profile(
    "knapgrad",
    derandomize=True,
    deadline=None,  # the first call of a kernel compiles it
    max_examples=10,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.load_profile("knapgrad")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all-cases", action="store_true", help="run all cases of tables that are thinned")
    parser.addoption("--representatives", action="store_true", help="run tests of each file of the package, no others")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--representatives"):
        files = {name.partition("::")[0] for name in REPRESENTATIVES}
        config.args[:] = sorted(str(Path(__file__).parent / name) for name in files)
    for line in (
        "thinned(every): one case in so many, in which as many pairs of parameters meet as can be",
        "thinned_where_compiled(every): one in six times so many where each shape is compiled",
        "few_where_compiled(count, kept): so many cases of each backend that compiles each shape, and those kept",
    ):
        config.addinivalue_line("markers", line)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out dtypes that a backend lacks, or that few kernels are compiled for, and some of the cases of tests that
    are marked: mostly what JAX would compile for minutes, four times as much of its scan, and with x64. At least one
    case of each table is left; with x64, of every third table, and of those that are marked."""
    if config.getoption("--representatives"):
        names = {item: item.nodeid.removeprefix("tests/") for item in items}
        chosen = {start: [item for item in items if names[item].startswith(start)] for start in REPRESENTATIVES}
        files = {name.partition("::")[0] for name in names.values()}  # not those of a framework that is not installed
        if missing := [start for start in chosen if not chosen[start] and start.partition("::")[0] in files]:
            raise pytest.UsageError(f"tests/representatives.py names tests that are not there: {missing}")
        items[:] = [item for item in items if any(item in some for some in chosen.values())]
    gone, tables = set[pytest.Item](), defaultdict[tuple[str, str], list[Any]](list)
    for item in items:
        parameters = item.callspec.params if hasattr(item, "callspec") else {}
        row = parameters.get("backend")
        row = row if isinstance(row, Backend) and row.available else None
        lacks = row is not None and parameters.get("dtype", row.widest) not in row.dtypes
        dtype = "float32" if row is not None and row.wide_dtypes == ("float32",) else ""
        is_not = parameters and "triton" not in item.path.name and not is_compiled(item.callspec.id, dtype)
        if lacks or is_not:
            gone.add(item)
        elif item.get_closest_marker("thinned") or (row is not None and row.is_jax and len(parameters) > 1):
            tables[item.nodeid.split("[")[0], "" if row is None else row.name].append(item)
    for number, ((_, row), cases) in enumerate(tables.items()):
        if not (config.getoption("--all-cases") or config.getoption("--representatives")):
            few = cases[0].get_closest_marker("few_where_compiled")
            kept = few.kwargs.get("kept", ()) if few else ()
            kept = [case for case in cases if any(name in case.nodeid for name in kept)]
            gone |= set(cases) - set(_some(cases, _how_many(cases, row, number))) - set(kept)
    items[:] = sorted((item for item in items if item not in gone), key=_turn)
    config.hook.pytest_deselected(items=list(gone))


def _how_many(cases: list[Any], row: str, number: int) -> int:
    marked = {mark.name: mark.args[0] for mark in cases[0].iter_markers() if mark.args}
    if "few_where_compiled" in marked:
        return min(marked["few_where_compiled"], len(cases))
    every = marked.get("thinned") or 6 * marked.get("thinned_where_compiled", 1) * (1 if row == "jax" else 4)
    if row == "jax-x64" and every >= len(cases) and "thinned_where_compiled" not in marked and number % 3:
        return 0
    return -(-len(cases) // every)


def _some(cases: list[Any], count: int) -> list[Any]:
    """So many cases from all over the table: first one with each value of each parameter, then of each pair of them."""
    order = sorted(range(len(cases)), key=lambda i: 0.618034 * i % 1)
    left, met, chosen = {}, set[Any](), []
    for case in (cases[i] for i in order):
        values = [(name, id(value)) for name, value in case.callspec.params.items()]
        left[case] = set(values), set(itertools.combinations(values, 2))
    while len(chosen) < count:
        best = max(left, key=lambda case: [len(new - met) for new in left[case]])
        values, pairs = left.pop(best)
        chosen.append(best)
        if values | pairs <= met:  # all pairs have met
            return chosen + list(left)[: count - len(chosen)]
        met |= values | pairs
    return chosen


def _turn(item: pytest.Item) -> int:
    """Files that take long come first, so that no process is left with one of them at the end."""
    folders = ["docs", "for_jax", "paper", "kernels", "operations"]
    return folders.index(item.path.parent.name) if item.path.parent.name in folders else len(folders)


@pytest.fixture(autouse=True, scope="session")
def each_worker_compiles_its_share() -> None:
    """What is not on disk yet: otherwise two workers would compile the same kernels at the same time. The process that
    has compiled for float32 has done most of what float64 needs."""
    worker, workers = os.environ.get("PYTEST_XDIST_WORKER", "gw0"), int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 1))
    if workers == 1 or not importlib.util.find_spec("torch"):
        return
    import torch

    BOTH = torch.float32, torch.float64

    def compile_for(constraint: kg.Constraint, *event: int) -> None:
        for dtype in BOTH:
            for name, kind in CLASSES.items():
                if dtype == torch.float64 or name == "gini" or isinstance(constraint, kg.Knapsack):  # is_compiled
                    kg.warmup(torch.zeros(3, *event, dtype=dtype), constraint, kind())  # with the derivatives

    shares = [
        lambda: compile_for(kg.Knapsack([1, 2], 2), 2),
        lambda: compile_for(kg.MultipleChoice([[1, 2]], 2), 1, 2),
        _compile_for_jax,
        lambda: compile_for(kg.MultiKnapsack([[1, 2], [1, 1]], [2, 2]), 2),
        lambda: None,
        lambda: [kg.warmup(torch.zeros(1, 40, dtype=dtype), kg.TopK(2), kg.Shannon()) for dtype in BOTH],
    ]
    for share in shares[int(worker[2:]) :: workers]:
        share()


def _compile_for_jax() -> None:
    """What XLA calls around the kernels, which is the same for every regularizer."""
    if not importlib.util.find_spec("jax"):
        return
    from knapgrad.kernels.numba import from_jax, tasks
    from knapgrad.kernels.numba.kernels import KERNELS, TABLE
    from knapgrad.kernels.numba.variants import BOXES, CHOICES, ITEMS

    for kind in (ITEMS, CHOICES, BOXES):
        from_jax.target(kind)
        for kernel in KERNELS[TABLE]:  # frontiers are float64, and the best items are drawn
            for dtype in ("float32", "float64")[kernel == "frontier" :]:
                if kernel != "solve" or kind == CHOICES:
                    tasks._compiled(kernel, dtype, kind)


@pytest.fixture(autouse=True, scope="session")
def what_was_imported_is_not_looked_through_for_garbage() -> None:
    """It is most of what there is, and stays: a collection would take a second."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="module")
def nothing_is_kept_for_the_next_module() -> Iterator[None]:
    yield
    if jax := sys.modules.get("jax"):
        jax.clear_caches()
    if dynamo := sys.modules.get("torch._dynamo"):
        dynamo.reset()
    if pyplot := sys.modules.get("matplotlib.pyplot"):
        pyplot.close("all")
    gc.collect()


@pytest.fixture(params=BACKENDS.values(), ids=BACKENDS.keys())
def backend(request: pytest.FixtureRequest) -> Iterator[Backend]:
    if not request.param.available:
        pytest.skip(request.param.reason)
    with request.param.active():
        yield request.param


@pytest.fixture(params=REGULARIZERS)
def regularizer(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(params=CONSTRAINTS)
def constraint(request: pytest.FixtureRequest) -> str:
    """A kind of constraint on items with one budget."""
    return request.param


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    """A kind of constraint."""
    return request.param


@pytest.fixture
def torch_threads() -> Iterator[None]:
    """Restores torch's thread count, which the library obeys."""
    torch = pytest.importorskip("torch")
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
