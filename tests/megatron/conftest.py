"""Fixtures that several files of the head's tests share."""

from __future__ import annotations

import pytest


@pytest.fixture(params=[None, 8], ids=["whole weight", "8 rows of the weight"])
def weight_rows(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int | None:
    """So many rows of the output layer are worked on at a time in the head's backward pass; None: all of a tiny model's."""
    if request.param is not None:
        monkeypatch.setattr("megarl.megatron.head._WEIGHT_ROWS", request.param)
    return request.param
