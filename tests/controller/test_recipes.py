"""Every recipe in configs/recipes: its settings fit together, and it runs."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from megarl.controller.preflight import preflight_file
from tests.controller.runs import ROOT, Run

RECIPES = sorted((ROOT / "configs/recipes").glob("*.yaml"))


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_is_checked(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    cfg, prepared = preflight_file(path, [])
    assert cfg.run.name == path.stem.replace("_", "-") and prepared.model.dims.layers > 0
    assert path.read_text().startswith("# Machine: ")


@pytest.mark.slow
@pytest.mark.parametrize("path", [path for path in RECIPES if path.stem != "ppo"], ids=lambda path: path.stem)
def test_a_recipe_runs(path: Path, tmp_path: Path) -> None:
    """PPO's run is in test_ppo.py."""
    reward = "reward.name=tests.controller.hooks.share_of_vowels"
    with Run(tmp_path, reward, "actor.optimizer.lr=1e-3", config=str(path.relative_to(ROOT))) as run:
        assert run.finish() == 0, run.err
        rows = run.steps()
    assert len(rows) == 2
    for row in rows:
        assert all(math.isfinite(value) for value in row.values() if isinstance(value, float))
        assert row["actor/applied"] == 1.0 and row["actor/grad_norm"] > 1e-4 and row["actor/ratio_max"] == 1.0
        assert row["actor/entropy"] > 0 and row["reshard/verified"] == row["reshard/tensors"]
    if "shaping/kl" in rows[0]:
        assert rows[0]["shaping/kl"] == pytest.approx(0.0, abs=1e-6) != rows[1]["shaping/kl"]
