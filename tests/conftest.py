from __future__ import annotations

import importlib.util
import os
from collections import Counter
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings


def _interpret_triton() -> None:
    """Without a GPU its kernels run in Triton's interpreter, which must be asked for before Triton is imported."""
    if importlib.util.find_spec("torch") and importlib.util.find_spec("triton"):
        import torch

        if not torch.cuda.is_available():
            os.environ["TRITON_INTERPRET"] = "1"


_interpret_triton()
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # several workers share a GPU

from backends import BACKENDS, Backend  # noqa: E402
from instances import CONSTRAINTS  # noqa: E402
from oracles import REGULARIZERS  # noqa: E402

settings.register_profile(
    "knapgrad",
    derandomize=True,
    deadline=None,  # the first call of a kernel compiles it
    max_examples=15,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.load_profile("knapgrad")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "thinned(every): one in so many, of every value of the first parameter")
    config.addinivalue_line(
        "markers", "thinned_where_compiled(every): one in twice so many where each shape is compiled"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out dtypes that a backend lacks, and some of the cases of tests that are marked: mostly what JAX would
    compile for minutes, three times as much with x64."""
    gone, seen = set[pytest.Item](), Counter[tuple[str, ...]]()
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
        elif is_row and row.is_jax and (marker := item.get_closest_marker("thinned_where_compiled")):
            every = 2 * marker.args[0] * (3 if row.name == "jax-x64" else 1)
        if every > 1:
            # count the cases of each value of the first parameter from another start
            table = item.nodeid.split("[")[0], row.name if is_row else ""
            first = (*table, str(next(value for name, value in parameters.items() if name != "backend")))
            seen[table] += first not in seen
            seen[first] += 1
            if (seen[first] + seen[table]) % every:
                gone.add(item)
    items[:] = [item for item in items if item not in gone]
    config.hook.pytest_deselected(items=list(gone))


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
