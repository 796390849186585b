"""Whole runs with a KL over distributions in the loss."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from tests.controller.runs import LEARNABLE, Run

OVERRIDES = {
    "full": ("actor.parallel={ranks: 2, tensor: 2, sequence: true}",),
    # Ranks of its own, and samples over two data-parallel ranks of the actor.
    "top_k": ("algorithm.kl_top_k=9", "actor.parallel.ranks=2", "reference.parallel.ranks=1"),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", OVERRIDES)
def test_a_run(kind: str, tmp_path: Path) -> None:
    common = ("run.steps=2", "algorithm.mini_batches=2", "algorithm.kl_coefficient=0.1", "actor.optimizer.lr=1e-3")
    common += ("observe.progress=false", "data.eval=null", *LEARNABLE)
    with Run(tmp_path, *common, f"algorithm.kl_estimator={kind}", *OVERRIDES[kind]) as run:
        assert run.finish() == 0, run.err[-3000:]
        first, second = run.steps()
    for row in (first, second):
        assert all(math.isfinite(value) for value in row.values() if isinstance(value, float))
        assert row["actor/applied"] == 1.0
        assert row["actor/kl_loss"] == pytest.approx(row["actor/kl"], rel=1e-5)
    # In the first step the second update alone is of an actor that has moved.
    assert second["actor/kl"] > first["actor/kl"] > 0
