"""Stacked MNIST: averages of images of three different digits.

MNIST is read from a folder with its four files, as they are distributed; :func:`download` fetches them, checked. Where
there is no network, scikit-learn's small digits stand in for a look.
"""

from __future__ import annotations

import gzip
import hashlib
import http.client
import os
import urllib.request
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

CLASSES, STACKED, SIDE = 10, 3, 28
SOURCE = "https://ossci-datasets.s3.amazonaws.com/mnist/"
CHECKSUMS = {  # SHA-256
    "train-images-idx3-ubyte.gz": "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
    "train-labels-idx1-ubyte.gz": "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
    "t10k-images-idx3-ubyte.gz": "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
    "t10k-labels-idx1-ubyte.gz": "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
}
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "knapgrad" / "mnist"
USUAL_PLACES = (Path("data/mnist"), Path("data/MNIST/raw"), CACHE)


class Digits(NamedTuple):
    """Images (size, 28, 28), bytes, and the digits (size,) that they show."""

    images: np.ndarray
    labels: np.ndarray


class Stacks(NamedTuple):
    """Rows (size, 3) of images (_, 28, 28) that are averaged, and the digits (size, 10) in them, zeros and ones."""

    images: Tensor
    rows: Tensor
    digits: Tensor

    def at(self, index: Tensor) -> Tensor:
        """The averages (batch, 28, 28), between 0 and 1."""
        return self.images[self.rows[index]].float().mean(1) / 255

    def to(self, device: torch.device) -> Stacks:
        return Stacks(*(x.to(device) for x in self))


def stack(digits: Digits, size: int, seed: int) -> Stacks:
    """Three different digits each, and a random image of each."""
    rng = np.random.default_rng(seed)
    chosen = rng.permuted(np.tile(np.arange(CLASSES), (size, 1)), axis=1)[:, :STACKED]
    rows = np.empty_like(chosen)
    for digit in range(CLASSES):
        of_digit = np.flatnonzero(digits.labels == digit)
        rows[chosen == digit] = rng.choice(of_digit, (chosen == digit).sum())
    shown = np.zeros((size, CLASSES), np.float32)
    np.put_along_axis(shown, chosen, 1.0, axis=1)
    return Stacks(torch.from_numpy(digits.images), torch.from_numpy(rows), torch.from_numpy(shown))


def find(folder: Path | None) -> Path:
    """The folder with MNIST's files: the given one, or one of the usual places."""
    places = [folder] if folder else USUAL_PLACES
    for place in places:
        if all((place / name).exists() for name in CHECKSUMS):
            return place
    raise FileNotFoundError(
        f"MNIST is not in {', '.join(map(str, places))}: name the folder with its four files ({', '.join(CHECKSUMS)}) "
        f"by --data, or fetch them by --download, which puts them into {CACHE}"
    )


def download(folder: Path = CACHE, source: str = SOURCE) -> Path:
    """Fetches what is missing; a file that is not the right one is not kept."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, checksum in tqdm(CHECKSUMS.items(), desc="MNIST", unit="file"):
        if (folder / name).exists():
            continue
        try:
            with urllib.request.urlopen(source + name, timeout=60) as response:
                content = response.read()
        except (OSError, http.client.HTTPException) as error:
            raise FileNotFoundError(
                f"{source}{name} cannot be fetched ({error}); put MNIST's files into {folder}"
            ) from error
        if hashlib.sha256(content).hexdigest() != checksum:
            raise ValueError(f"{source}{name} is not MNIST's file: its SHA-256 is not {checksum}; nothing was kept")
        unfinished = folder / f"{name}.unfinished"
        unfinished.write_bytes(content)
        unfinished.replace(folder / name)
    return folder


def mnist(folder: Path, part: str) -> Digits:
    """``part`` is "train" or "t10k"."""
    return Digits(_idx(folder / f"{part}-images-idx3-ubyte.gz"), _idx(folder / f"{part}-labels-idx1-ubyte.gz"))


def _idx(path: Path) -> np.ndarray:
    compressed = path.read_bytes()
    if hashlib.sha256(compressed).hexdigest() != CHECKSUMS[path.name]:
        raise ValueError(f"{path} is not MNIST's file: its SHA-256 differs; remove it and use --download")
    content = gzip.decompress(compressed)
    dimensions = content[3]
    shape = np.frombuffer(content, ">i4", dimensions, offset=4)
    return np.frombuffer(content, np.uint8, offset=4 + 4 * dimensions).reshape(shape).copy()


def small_digits() -> tuple[Digits, Digits]:
    """Scikit-learn's 1,797 digits of 8 x 8, enlarged, with a margin: two thirds to train, the rest to test."""
    from sklearn.datasets import load_digits

    bunch = load_digits()
    images = np.pad(np.kron(bunch.images, np.ones((1, 3, 3))), ((0, 0), (2, 2), (2, 2)))
    images, labels = (images * 255 / 16).astype(np.uint8), bunch.target
    return Digits(images[:1200], labels[:1200]), Digits(images[1200:], labels[1200:])
