"""The table: family × layout × cut → loss and every gradient, those of transformers on one rank; each aggregation of the policy loss.

All of it is slow; its short form are those of test_layouts.py and test_experts.py, which have other layouts and cuts besides.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megarl.models.tiny import make_tiny
from tests.distributed import free_port, outcomes
from tests.megatron.harness import Layout
from tests.megatron.layouts import OTHERS, Job, Outcome, outcome, run_jobs, transformers_reference

GOAL = 1e-5
DENSE = ("qwen2", "qwen3", "llama")
EXPERTS = ("qwen3-moe", "deepseek")
# Megatron cuts experts over tensor-parallel ranks only with sequence parallelism: for those families "tp2" has it.
LAYOUTS = {
    "one rank": Layout(),
    "dp2": Layout(data=2),
    "dp2 of unequal token counts": Layout(data=2, uneven=True),
    "tp2": Layout(tensor=2),
    "tp2 sp": Layout(tensor=2, sequence=True),
    "pp2": Layout(pipeline=2),
    "pp2 vpp2": Layout(pipeline=2, virtual=2),
    "cp2": Layout(context=2),
    "tp2 pp2": Layout(tensor=2, pipeline=2),
    "tp2 cp2": Layout(tensor=2, context=2),
}
EP = {
    "ep2": Layout(data=2, expert=2),
    "tp2 ep2": Layout(tensor=2, sequence=True, expert=2, expert_tensor=1),
    "pp2 ep2": Layout(pipeline=2, data=2, expert=2),
}
CUTS = {
    "micro-batch 1": {"samples": 1},
    "micro-batch 3": {"samples": 3},
    "token budget": {"micro_batch_tokens": 30},
    "padding": {"padding": 16, "micro_batch_tokens": 50},
}
Case = tuple[str, str, str]


def cases() -> dict[Case, Layout]:
    found = {}
    for family in DENSE + EXPERTS:
        for name, layout in (LAYOUTS | EP if family in EXPERTS else LAYOUTS).items():
            if family in EXPERTS and layout.tensor > 1:
                if name == "tp2 sp":
                    continue
                layout = replace(layout, sequence=True)
            found |= {(family, name, cut): replace(layout, **fields) for cut, fields in CUTS.items()}
    return found


CASES = cases()


class Jobs:
    """Runs the jobs of a family on a number of ranks when the first of them is asked for."""

    def __init__(self, folder: Path):
        self.folder = folder

    @functools.cache
    def files(self, family: str) -> tuple[str, str]:
        """The model and its reference."""
        folder, file = make_tiny(family, self.folder / family), self.folder / f"{family}.pt"
        transformers_reference(folder, file)
        return str(folder), str(file)

    @functools.cache
    def of(self, world: int, family: str) -> dict[Case, Outcome]:
        wanted = [case for case, layout in CASES.items() if layout.world == world and case[0] == family]
        jobs = [
            Job(
                CASES[case], *self.files(family), free_port(), others=tuple(OTHERS) if case[2] == "token budget" else ()
            )
            for case in wanted
        ]
        return outcomes(world, run_jobs, dict(zip(wanted, jobs, strict=True)), outcome)


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Jobs:
    return Jobs(tmp_path_factory.mktemp("table"))


@pytest.mark.slow
@pytest.mark.timeout(900)  # the first one waits for all jobs of its family on as many ranks
@pytest.mark.parametrize(("family", "name", "cut"), list(CASES))
def test_loss_and_gradients_are_those_of_transformers(
    jobs: Jobs, family: str, name: str, cut: str, record_invariant: Callable[[str, float, float], None]
) -> None:
    result = jobs.of(CASES[family, name, cut].world, family)[family, name, cut]
    shapes = {n: t.numel() for n, t in torch.load(jobs.files(family)[1], weights_only=False)["gradients"].items()}
    assert result.elements == shapes and sorted(result.samples) == list(range(12))
    head = f"{family}, {name}, {cut}:"
    record_invariant(f"{head} loss, relative", result.loss, GOAL)
    record_invariant(f"{head} worst of all gradients, relative", result.worst_gradient, GOAL)
    for other, (loss, gradient) in result.others.items():
        record_invariant(f"{head} {other}: loss, relative", loss, GOAL)
        record_invariant(f"{head} {other}: worst of all gradients, relative", gradient, GOAL)
