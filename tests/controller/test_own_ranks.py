"""Roles on ranks of their own: the numbers of the shared ranks, and failures that name them."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.bridge.hf_io import HFReader
from tests.controller.runs import Run

PPO = "configs/recipes/ppo.yaml"
OWN = (  # ranks of its own for each
    "critic.parallel.ranks=1",
    "critic.threads=1",
    "reference.parallel={ranks: 2, pipeline: 2}",
    "reference.threads=1",
    "reward_model.parallel.ranks=1",
    "reward_model.threads=1",
)
TOGETHER = (  # all but the actor on the critic's ranks
    "critic.parallel={ranks: 2, pipeline: 2}",
    "critic.threads=1",
    "reference.pool=critic",
    "reward_model.pool=critic",
)
# A large eps: AdamW's first step is else the sign of the gradient, which rounding turns where it is nearly 0.
COMMON = ("critic.path=tiny-qwen3-reward", "actor.optimizer.eps=1e-2", "critic.optimizer.eps=1e-2", "data.eval=null")
COMMON += ("observe.progress=false", "actor.threads=1")


Result = tuple[list[dict[str, Any]], list[tuple[str, torch.Tensor]]]


def result(folder: Path, *overrides: str) -> Result:
    """Metrics of the steps, and the weights of both learners after them."""
    with Run(folder, *COMMON, *overrides, config=PPO) as run:
        assert run.finish() == 0, run.err[-3000:]
        readers = [HFReader(run.run_folder / what) for what in ("model", "critic")]
        return run.steps(), [(n, reader.get(n).clone()) for reader in readers for n in reader.names]


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> tuple[Result, Path]:
    """All roles on the same ranks, and what was sampled."""
    folder = tmp_path_factory.mktemp("shared")
    return result(folder, f"rollout.record={folder / 'samples'}"), folder / "samples"


@pytest.mark.slow
@pytest.mark.parametrize("own", [OWN, TOGETHER], ids=["each", "together"])
def test_own_ranks_give_the_numbers_of_shared_ones(
    own: tuple[str, ...], shared: tuple[Result, Path], tmp_path: Path
) -> None:
    """Every metric of both learners, the values and the reference's KL in them, and both models' weights after the steps, to 1e-5."""
    first, samples = shared
    again = result(tmp_path, f"rollout.replay={samples}", *own)
    rows, weights = zip(first, again, strict=True)
    for one, two in zip(*rows, strict=True):
        names = [n for n in one if n.startswith(("actor/", "critic/", "reward", "shaping/", "mismatch/"))]
        assert len(names) > 15
        for name in names:
            assert two[name] == pytest.approx(one[name], rel=1e-5, abs=1e-5), name
    for (name, one), (other, two) in zip(*weights, strict=True):
        assert name == other
        torch.testing.assert_close(two, one, rtol=1e-5, atol=1e-5, msg=name)


@pytest.mark.slow
def test_a_dead_critic_rank(tmp_path: Path) -> None:
    with Run(tmp_path, *COMMON, "run.steps=1000", "critic.parallel.ranks=1", config=PPO) as run:
        run.until(run.steps, 150, "a step")
        mark = b"MEGARL_RANKS=critic\0"
        ranks = [pid for pid in run.alive() if mark in Path(f"/proc/{pid}/environ").read_bytes()]
        assert ranks, run.alive()
        for pid in ranks:
            os.kill(pid, signal.SIGKILL)
        assert run.code(90) == 1, run.err
        run.gone(15)
        assert len(run.said) == 1 and "critic rank 0 died" in run.said[0], run.err
        assert "Traceback" not in run.err + run.out and run.leftovers() == []
