from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from backends import BACKENDS, Backend
from instances import CONSTRAINTS
from oracles import REGULARIZERS

settings.register_profile(
    "knapgrad",
    derandomize=True,
    deadline=None,  # the first call of a kernel compiles it
    max_examples=20,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.load_profile("knapgrad")


@pytest.fixture(params=BACKENDS.values(), ids=BACKENDS.keys())
def backend(request: pytest.FixtureRequest) -> Backend:
    if not request.param.available:
        pytest.skip(f"{request.param.name} is not installed")
    return request.param


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
