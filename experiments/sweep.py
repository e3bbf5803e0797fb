"""Runs a function on many tasks, on several processes or a Ray cluster, and keeps a row for each, once.

Results are lines of JSON. Only the main process adds them to the file, as they come in. A run that was stopped
continues where it stopped; if a worker is killed, its tasks are run again.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import joblib
from tqdm import tqdm

Task = dict[str, Any]
Row = dict[str, Any]
RETRIES = 3


def run(function: Callable[..., Row], tasks: list[Task], path: Path, jobs: int = 1, ray: bool = False) -> list[Row]:
    """The rows ``task | function(**task)`` of all tasks, in their order; those in the file are not run again.

    Tasks have the same fields, which tell them apart. An exception of the function ends the run; the rows that had come
    in are kept.
    """
    if len({tuple(sorted(task)) for task in tasks}) > 1:
        raise ValueError("tasks must have the same fields")
    tasks = list({_key(task, task): task for task in tasks}.values())
    path.parent.mkdir(parents=True, exist_ok=True)
    with alone(path), _backend(ray), tqdm(total=len(tasks), desc=path.stem, unit="run", smoothing=0) as bar:
        mend(path)
        losses = 0
        while True:
            done = {_key(row, tasks[0]): row for row in read(path)} if tasks else {}
            missing = [task for task in tasks if _key(task, task) not in done]
            bar.update(len(tasks) - len(missing) - bar.n)
            if not missing:
                return [done[_key(task, task)] for task in tasks]
            try:
                for row in _rows(function, missing, jobs, ray):
                    append(path, row)
                    bar.update()
            except _lost_worker(ray):
                losses += 1
                if losses > RETRIES:
                    raise
                bar.write(f"a worker was lost; its runs are tried again ({losses} of {RETRIES} times)")


def _rows(function: Callable[..., Row], tasks: list[Task], jobs: int, ray: bool) -> Iterator[Row]:
    """As they come in; Ray's backend has them in groups only."""
    calls = [joblib.delayed(_call)(function, task) for task in tasks]
    if not ray:
        yield from joblib.Parallel(n_jobs=jobs, return_as="generator_unordered")(calls)
        return
    with joblib.Parallel(n_jobs=jobs) as parallel:
        for start in range(0, len(calls), 4 * jobs):
            yield from parallel(calls[start : start + 4 * jobs])


def _call(function: Callable[..., Row], task: Task) -> Row:
    return task | function(**task)


def _key(row: Row, task: Task) -> str:
    """What tells tasks apart: the fields that they have."""
    return json.dumps({name: row.get(name) for name in task}, sort_keys=True)


def read(path: Path) -> list[Row]:
    """The rows of a file, without a last line that was cut off."""
    text = path.read_bytes() if path.exists() else b""
    return [json.loads(line) for line in text[: text.rfind(b"\n") + 1].splitlines()]


def mend(path: Path) -> list[Row]:
    """The same, and a last line that was cut off is removed."""
    if path.exists():
        os.truncate(path, path.read_bytes().rfind(b"\n") + 1)
    return read(path)


def append(path: Path, row: Row) -> None:
    with path.open("a") as file:
        file.write(json.dumps(row) + "\n")
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def alone(path: Path) -> Iterator[None]:
    """Only one run may write a file at a time."""
    with path.with_suffix(".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise SystemExit(f"another run is writing {path}; wait for it, or choose another --output") from None
        yield


@contextmanager
def _backend(ray: bool) -> Iterator[None]:
    if not ray:
        yield
        return
    try:
        import ray as _  # noqa: F401
        from ray.util.joblib import register_ray
    except ImportError:
        raise SystemExit("--ray needs Ray: pip install ray") from None
    register_ray()
    with joblib.parallel_config(backend="ray"):
        yield


def _lost_worker(ray: bool) -> tuple[type[BaseException], ...]:
    from joblib.externals.loky.process_executor import TerminatedWorkerError

    if not ray:
        return (TerminatedWorkerError,)
    from ray.exceptions import RayError

    return (TerminatedWorkerError, RayError)
