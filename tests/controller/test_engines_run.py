"""The real command with two engines, and one of them killed: the run goes on, and every step is whole."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from tests.controller.runs import LEARNABLE, Run

TWO = (*LEARNABLE, "rollout.engines=2", "data.eval=null", "rollout.max_new_tokens=48", "rollout.max_total_tokens=8192")


@pytest.mark.slow
def test_a_run_outlives_its_engines(tmp_path: Path) -> None:
    partial = ("rollout.oversample=2", "rollout.unfinished=keep", "run.steps=12")
    with Run(tmp_path, *TWO, *partial) as run:
        run.until(lambda: len(run.steps()) >= 2, 200, "two steps")
        run.kill_one("sglang::scheduler")
        run.until(lambda: len(run.steps()) >= 6, 200, "six steps")
        run.kill_one("ray::Engine")
        assert run.finish(300) == 0, run.err
        assert run.leftovers() == [] and run.said == []
    assert run.out.count("is started anew (1 of 3 in this step)") == 2
    rows = run.steps()
    assert [row["step"] for row in rows] == list(range(1, 13))
    assert all(row["reshard/verified"] == row["reshard/tensors"] for row in rows)
    # responses of a random model hold characters at which str.splitlines() splits, and JSON lines do not
    lines = (run.run_folder / "samples.jsonl").read_text().split("\n")[:-1]
    assert Counter(json.loads(line)["step"] for line in lines) == dict.fromkeys(range(1, 13), 16)
