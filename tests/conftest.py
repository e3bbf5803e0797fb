from __future__ import annotations

import importlib.util
import os
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

from backends import BACKENDS, Backend  # noqa: E402
from instances import CONSTRAINTS  # noqa: E402
from oracles import REGULARIZERS  # noqa: E402

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
        pytest.skip(request.param.reason)
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
