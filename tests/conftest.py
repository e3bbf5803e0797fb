from __future__ import annotations

import gc
import importlib.metadata
import importlib.util
import os
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
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
from knapgrad.regularizers import REGULARIZERS as CLASSES  # noqa: E402
from oracles import REGULARIZERS  # noqa: E402

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


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "thinned(every): one in so many, of every value of the first parameter")
    config.addinivalue_line(
        "markers", "thinned_where_compiled(every): one in four times so many where each shape is compiled"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out dtypes that a backend lacks, and some of the cases of tests that are marked: mostly what JAX would
    compile for minutes, four times as much of its scan, and with x64. At least one case of each table is left; with
    x64, of every third table, and of those that are marked."""
    gone, seen, tables = set[pytest.Item](), Counter[tuple[str, ...]](), defaultdict[tuple[str, ...], list[Any]](list)
    for item in items:
        parameters = item.callspec.params if hasattr(item, "callspec") else {}
        row = parameters.get("backend")
        is_row = isinstance(row, Backend) and row.available
        if is_row and parameters.get("dtype", row.widest) not in row.dtypes:
            gone.add(item)
            continue
        every = 1
        if marker := item.get_closest_marker("thinned"):
            every = marker.args[0]
        elif is_row and row.is_jax and len(parameters) > 1:
            marker = item.get_closest_marker("thinned_where_compiled")
            every = (4 * marker.args[0] if marker else 4) * (1 if row.name == "jax" else 4)
        elif is_row and row.name == "torch" and len(parameters) > 1:
            every = 2  # on the CPU it runs the kernels of NumPy
        if every > 1 and not config.getoption("--all-cases"):
            # count the cases of each value of the first parameter from another start
            table = item.nodeid.split("[")[0], row.name if is_row else ""
            first = (*table, str(next(value for name, value in parameters.items() if name != "backend")))
            seen[table] += first not in seen
            seen[first] += 1
            tables[table].append(item)
            if (seen[first] + seen[table]) % every:
                gone.add(item)
    for number, ((_, name), cases) in enumerate(tables.items()):
        is_marked = cases[0].get_closest_marker("thinned_where_compiled") is not None
        if gone.issuperset(cases) and (name != "jax-x64" or is_marked or number % 3 == 0):
            gone.remove(cases[0])
    items[:] = sorted((item for item in items if item not in gone), key=_turn)
    config.hook.pytest_deselected(items=list(gone))


def _turn(item: pytest.Item) -> int:
    """Files that take long come first, so that no process is left with one of them at the end."""
    folders = ["docs", "for_jax", "paper", "kernels", "operations"]
    return folders.index(item.path.parent.name) if item.path.parent.name in folders else len(folders)


@pytest.fixture(autouse=True, scope="session")
def each_worker_compiles_its_share() -> None:
    """What is not on disk yet: otherwise two workers would compile the same kernels at the same time. float32 goes
    first: with it comes what is computed in float64 for both."""
    worker, workers = os.environ.get("PYTEST_XDIST_WORKER", "gw0"), int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 1))
    if workers == 1 or not importlib.util.find_spec("torch"):
        return
    import torch

    items, choices, boxes = (
        kg.Knapsack([1, 2], 2),
        kg.MultipleChoice([[1, 2]], 2),
        kg.MultiKnapsack([[1, 2], [1, 1]], [2, 2]),
    )
    single, double = torch.float32, torch.float64
    shares = [
        [(items, single)], [(choices, single)], [(boxes, single)], [(choices, double)], [(boxes, double)],
        [(items, double), None],
    ]  # fmt: skip
    for share in shares[int(worker[2:]) :: workers]:
        for kernels in share:
            if kernels is None:
                _compile_for_jax()
                continue
            constraint, dtype = kernels
            event = constraint.weights.shape if constraint is choices else (2,)
            for kind in CLASSES.values():
                kg.warmup(torch.zeros(3, *event, dtype=dtype), constraint, kind())  # with the derivatives


def _compile_for_jax() -> None:
    """What XLA calls around the kernels, which is the same for every regularizer."""
    if not importlib.util.find_spec("jax"):
        return
    from knapgrad.kernels.numba import from_jax
    from knapgrad.kernels.numba.variants import BOXES, CHOICES, ITEMS

    for kind in (ITEMS, CHOICES, BOXES):
        from_jax.target(kind)
        for operation in ("operator", "value", "vjp", "entropy", "entropy_grad", "sample", "mode", "log_prob"):
            for dtype in ("float32", "float64"):
                from_jax.task(operation, "gini", dtype, kind)
        for operation in ("frontier", "frontier_vjp"):
            from_jax.task(operation, "gini", "float64", kind)
    for dtype in ("float32", "float64"):
        from_jax.task("solve", "gini", dtype, CHOICES)


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
    return request.param


@pytest.fixture
def torch_threads() -> Iterator[None]:
    """Restores torch's thread count, which the library obeys."""
    torch = pytest.importorskip("torch")
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
