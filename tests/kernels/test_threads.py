"""Many threads at once, forked children, and samples that do not depend on the number of threads."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import textwrap
import threading
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import knapgrad as kg
from knapgrad.kernels.numba import threads
from knapgrad.regularizers import REGULARIZERS as CLASSES
from oracles import REGULARIZERS

SMOOTHINGS = {name: make(0.8) for name, make in CLASSES.items()}


def jobs() -> list[Callable[[], np.ndarray]]:
    """Calls of all kinds and sizes, some large enough to be split over threads."""
    rng = np.random.default_rng(0)
    made: list[Callable[[], np.ndarray]] = []
    for batch, n, dtype in (
        (1, 5, "float64"),
        (3, 40, "float32"),
        (64, 30, "float32"),
        (3000, 20, "float32"),
        (1000, 40, "float64"),
    ):
        theta = rng.standard_normal((batch, n)).astype(dtype)
        shared, own = rng.integers(0, 6, n), rng.integers(0, 6, (batch, n))
        band = kg.Knapsack(own, n, at_least=n // 5)
        for constraint in (kg.Knapsack(shared, 2 * n), kg.Knapsack(own, n), kg.TopK(n // 3), band):
            for name in REGULARIZERS:
                smoothing = SMOOTHINGS[name]
                made.append(lambda t=theta, c=constraint, s=smoothing: kg.relax(t, c, s))
                made.append(lambda t=theta, c=constraint, s=smoothing: kg.entropy(t, c, s))
                made.append(lambda t=theta, c=constraint, s=smoothing: kg.sample(t, c, s, num_samples=2, rng=5))
            made.append(lambda t=theta, c=constraint: kg.solve(t, c))
    return made


def test_many_threads_give_the_serial_answers():
    calls = jobs()
    serial = [call() for call in calls]
    order = np.random.default_rng(1).permutation(np.tile(np.arange(len(calls)), 3))
    with ThreadPoolExecutor(8) as executor:
        together = list(executor.map(lambda i: calls[i](), order, timeout=120))
    for i, result in zip(order, together):
        np.testing.assert_array_equal(result, serial[i])


def large_calls() -> list[np.ndarray]:
    rng = np.random.default_rng(2)
    theta = rng.standard_normal((6000, 30)).astype(np.float32)
    budget = kg.Knapsack(rng.integers(1, 8, 30), 60)
    return [kg.relax(theta, budget, smoothing) for smoothing in SMOOTHINGS.values()] + [
        kg.sample(theta, budget, kg.Gini(), num_samples=2, rng=3)
    ]


def helpers() -> bool:
    """Whether the library has threads of its own running."""
    return any(thread.name.startswith("knapgrad") for thread in threading.enumerate())


def _child(connection: Any) -> None:
    connection.send((large_calls(), helpers()))
    connection.close()


@pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="this system cannot fork")
@pytest.mark.parametrize("busy", [False, True], ids=["idle", "busy"])
def test_a_forked_child_works_after_use(busy):
    expected = large_calls()
    context = multiprocessing.get_context("fork")
    stop = threading.Event()

    def keep_busy() -> None:
        while not stop.is_set():
            large_calls()

    background = threading.Thread(target=keep_busy)
    if busy:
        background.start()
    try:
        for _ in range(3):
            ours, theirs = context.Pipe()
            child = context.Process(target=_child, args=(theirs,))
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # forking with threads around is the point
                child.start()
            theirs.close()
            try:
                assert ours.poll(60), "the child hangs"
                results, has_helpers = ours.recv()
                child.join(10)
            finally:
                child.kill()
            assert child.exitcode == 0
            assert has_helpers == (threads.num_threads() > 1)
            for result, serial in zip(results, expected):
                np.testing.assert_array_equal(result, serial)
    finally:
        stop.set()
        if busy:
            background.join()
    for result, serial in zip(large_calls(), expected):
        np.testing.assert_array_equal(result, serial)


def test_torch_data_loader_workers():
    torch = pytest.importorskip("torch")
    budget = kg.Knapsack(np.arange(1, 9), 12)

    class Selections(torch.utils.data.Dataset):
        def __len__(self) -> int:
            return 12

        def __getitem__(self, index: int) -> Any:
            theta = torch.linspace(-1, 1, 8 * 200).reshape(200, 8) * (index + 1)
            return kg.relax(theta, budget, kg.Gini(0.5))

    data = Selections()
    expected = torch.stack([data[i] for i in range(len(data))])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        loader = torch.utils.data.DataLoader(data, batch_size=4, num_workers=2, timeout=60)
        found = torch.cat(list(loader))
    assert torch.equal(found, expected)


@pytest.mark.parametrize("name", REGULARIZERS)
def test_results_do_not_depend_on_the_number_of_threads(name, torch_threads):
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(4)
    smoothing = SMOOTHINGS[name]
    own = rng.integers(0, 6, (4096, 24))
    for dtype in (torch.float32, torch.float64):
        theta = torch.from_numpy(rng.standard_normal((4096, 24))).to(dtype)
        shared = rng.integers(1, 8, 24)
        for constraint in (
            kg.Knapsack(shared, 48),
            kg.Knapsack(own, 30),
            kg.TopK(6),
            kg.Knapsack(shared, 48, at_least=rng.integers(0, 40, 4096)),
        ):
            results = []
            for count in (1, 2, 5):
                torch.set_num_threads(count)
                results.append(
                    (
                        kg.sample(theta, constraint, smoothing, num_samples=3, rng=torch.Generator().manual_seed(9)),
                        kg.relax(theta, constraint, smoothing),
                        kg.value(theta, constraint, smoothing),
                        kg.solve(theta, constraint),
                    )
                )
            for other in results[1:]:
                for result, single in zip(other, results[0]):
                    assert torch.equal(result, single)


def test_the_pool_is_used(torch_threads, monkeypatch):
    """Without this the tests above could pass on one thread."""
    torch = pytest.importorskip("torch")
    torch.set_num_threads(2)
    submitted = []
    submit = ThreadPoolExecutor.submit

    def watched(self: ThreadPoolExecutor, *arguments: Any) -> Any:
        submitted.append(arguments)
        return submit(self, *arguments)

    monkeypatch.setattr(ThreadPoolExecutor, "submit", watched)
    assert threads.num_threads() == 2
    large_calls()
    assert submitted
    torch.set_num_threads(1)
    submitted.clear()
    large_calls()
    assert not submitted


def test_a_thread_that_outlives_the_main_one_can_still_call():
    code = """
        import threading, time
        import numpy as np, knapgrad as kg
        theta, budget = np.zeros((4096, 40), np.float32), kg.Knapsack(np.full(40, 3), 60)
        kg.relax(theta[:1], budget, kg.Gini())
        def late():
            time.sleep(0.5)
            print(kg.relax(theta, budget, kg.Gini()).shape)
        threading.Thread(target=late).start()
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "(4096, 40)", done.stderr


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
def test_a_child_that_is_forked_while_another_thread_compiles():
    """It would wait for Numba's lock for ever."""
    code = """
        import os, signal, threading, time, warnings
        import numba, knapgrad.kernels.numba
        from numba.extending import overload

        compiling = threading.Event()

        def slow(x): ...

        @overload(slow)
        def choose(x):
            compiling.set()
            time.sleep(1)
            return lambda x: x

        threading.Thread(target=numba.njit(lambda x: slow(x)), args=(1,)).start()
        compiling.wait()
        warnings.simplefilter("ignore")
        if child := os.fork():
            print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        else:
            signal.alarm(30)
            assert numba.njit(lambda x: x + 1)(1) == 2
            os._exit(0)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "0", done.stderr


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
@pytest.mark.thinned(2)
@pytest.mark.parametrize("who", ["main", "importing"])
@pytest.mark.parametrize(
    "module, use",
    [
        ("numpy.backend", "kg.solve(numpy.ones(3), kg.TopK(2))"),
        ("torch.backend", "kg.solve(torch.ones(3), kg.TopK(2))"),
        ("torch.modules", "kg.torch.Relax"),
        ("jax.backend", "kg.backends.load('jax').solve"),
    ],
)
def test_a_child_that_is_forked_while_another_thread_imports(module, use, who):
    """What a call imports when it is first made: the child would wait for ever for the end of that import. The thread
    that imports may fork too."""
    framework = module.split(".")[0]
    pytest.importorskip(framework)
    code = f"""
        import os, signal, sys, threading, time, warnings
        import knapgrad as kg
        import {framework}

        importing, codes = threading.Event(), []

        def fork(child_does):
            warnings.simplefilter("ignore")
            if child := os.fork():
                codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
            else:
                signal.alarm(60)
                child_does()
                os._exit(0)

        class Slow:
            def find_spec(name, *_):
                if name == "knapgrad.{module}" and not importing.is_set():
                    importing.set()
                    if "{who}" == "main":
                        time.sleep(1)
                    else:
                        fork(lambda: None)

        sys.meta_path.insert(0, Slow)
        thread = threading.Thread(target=lambda: {use})
        thread.start()
        importing.wait()
        if "{who}" == "main":
            fork(lambda: {use})
        thread.join()
        print(codes)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=200)
    assert done.stdout.strip() == "[0]", done.stderr


CALLS = {
    "a sweep": ("kg.relax(theta, budget, kg.Gini())", [1, 2]),
    "random numbers": ("kg.sample(theta[:9], budget, kg.Gini(), num_samples=10**6, rng=0)", [1]),
}


@pytest.mark.skipif(sys.platform == "win32", reason="there are no such signals")
@pytest.mark.parametrize(("call", "count"), [(call, count) for call, counts in CALLS.values() for count in counts])
def test_an_interrupt_stops_all_threads(call, count):
    """The call would take seconds. On busy cores the interrupt took up to 0.1 s, and the exit from 0.3 to 0.9 s."""
    code = f"""
        import os, signal, threading, time
        import numba, numpy as np, knapgrad as kg

        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
        numba.config.NUMBA_NUM_THREADS = {count}
        theta, budget = np.zeros((60000, 200), np.float32), kg.Knapsack(np.full(200, 10), 1000)
        kg.relax(theta[:1], budget, kg.Gini())

        def interrupt():
            time.sleep(0.3)
            print(time.time(), flush=True)
            os.kill(os.getpid(), signal.SIGINT)

        threading.Thread(target=interrupt).start()
        try:
            {call}
        except KeyboardInterrupt:
            print(time.time())
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=120)
    end = time.time()
    sent, came = map(float, done.stdout.split())
    print(f"KeyboardInterrupt after {came - sent:.3f} s, exit after {end - sent:.3f} s")
    assert came - sent < 0.5 and end - sent < 1.5


def test_an_error_stops_all_threads(monkeypatch):
    monkeypatch.setattr(threads, "num_threads", lambda: 2)
    called = []

    def work(begin: int, end: int) -> None:
        called.append(begin)
        time.sleep(0.01)
        if begin == 0:
            raise MemoryError

    with pytest.raises(MemoryError):
        threads.run(work, 1000, 1e9)
    count = len(called)
    time.sleep(0.1)
    assert len(called) == count < 5


def test_slices_are_short(monkeypatch):
    for count in (1, 2):
        monkeypatch.setattr(threads, "num_threads", lambda n=count: n)
        slices: list[tuple[int, int]] = []
        threads.run(lambda begin, end: slices.append((begin, end)), 1000, 1e9)
        assert sorted(x for begin, end in slices for x in range(begin, end)) == list(range(1000))
        assert max(end - begin for begin, end in slices) <= 20
        slices.clear()
        threads.run(lambda begin, end: slices.append((begin, end)), 1000, 1e5)  # too little to look up from
        assert slices == [(0, 1000)]
        threads.run(lambda begin, end: slices.append((begin, end)), 0, 1e9)
        assert len(slices) == 1
