"""Ranks take seconds to start: those of a layout serve all tests of this folder, and hold the checkpoint's weights between them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from megarl.models.tiny import make_tiny
from tests.reshard.ranks import FAMILY, FUSED, LAYOUTS, Ranks


@pytest.fixture(scope="package")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    root = tmp_path_factory.mktemp("models")
    return functools.cache(lambda layout: make_tiny(FAMILY[layout], root / FAMILY[layout]))


@pytest.fixture(scope="package")
def ranks(folder: Callable[[str], Path]) -> Iterator[Callable[[str], Ranks]]:
    started: dict[str, Ranks] = {}

    def of(layout: str) -> Ranks:
        if layout not in started:
            started[layout] = Ranks(folder(layout), **(LAYOUTS | FUSED)[layout])
        return started[layout]

    yield of
    for group in started.values():
        group.close()
