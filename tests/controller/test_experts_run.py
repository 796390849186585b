"""`megarl train` with a mixture of experts, its experts on two ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.controller.runs import LEARNABLE, Run


@pytest.mark.slow
def test_experts_on_two_ranks_learn_and_are_sampled(tmp_path: Path) -> None:
    layout = ("actor.parallel.tensor=1", "actor.parallel.sequence=false", "actor.parallel.expert=2")
    with Run(tmp_path, *LEARNABLE, "model.path=tiny-qwen3-moe", "actor.optimizer.lr=1e-3", *layout) as run:
        assert run.finish() == 0, run.err
        rows = run.steps()
    assert len(rows) == 2
    for row in rows:  # the probe compares the engine's log-probs with the trainer's, to 1e-5, after every sync
        assert row["actor/applied"] == 1.0 and row["actor/grad_norm"] > 1e-4 and row["actor/ratio_max"] == 1.0
        assert row["reshard/verified"] == row["reshard/tensors"] > 4 * 10 * 3
        assert row["mismatch/abs_max"] < 1e-5
