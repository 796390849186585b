"""Ten optimizer steps on the same recorded rollouts end in the same weights on every layout: those of transformers and torch's AdamW.

Weight decay, clipping, warm-up and cosine included, with the distributed optimizer and the plain one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from megarl.models.tiny import make_tiny
from tests.distributed import free_port, outcomes
from tests.megatron.harness import Layout
from tests.megatron.layouts import Job
from tests.megatron.ten_steps import Outcome, outcome, reference, run_jobs

GOAL = 1e-4
DENSE = ("qwen2", "qwen3", "llama")
EXPERTS = ("qwen3-moe", "deepseek")
LAYOUTS = {
    "one rank": Layout(micro_batch_tokens=40),
    "dp2": Layout(data=2, micro_batch_tokens=40),
    "dp2 plain optimizer": Layout(data=2, micro_batch_tokens=40, distributed=False),
    "dp2, all samples on one rank": Layout(data=2, micro_batch_tokens=40, lopsided=True),
    "tp2 sp": Layout(tensor=2, sequence=True, micro_batch_tokens=40),
    "pp2": Layout(pipeline=2, micro_batch_tokens=40),
    "pp2 vpp2": Layout(pipeline=2, virtual=2, micro_batch_tokens=40),
    "cp2": Layout(context=2, micro_batch_tokens=40),
    "tp2 sp pp2": Layout(tensor=2, sequence=True, pipeline=2, micro_batch_tokens=40),
    "tp2 sp cp2": Layout(tensor=2, sequence=True, context=2, micro_batch_tokens=40),
    "dp2 tp2 sp": Layout(data=2, tensor=2, sequence=True, micro_batch_tokens=40),
}
# Of dense families: without sequence parallelism.
TP2 = {"tp2": Layout(tensor=2, micro_batch_tokens=40)}
# Of families with experts.
EP = {
    "ep2": Layout(data=2, expert=2, micro_batch_tokens=40),
    "tp2 sp ep2": Layout(tensor=2, sequence=True, expert=2, expert_tensor=1, micro_batch_tokens=40),
    "dp2 tp2 sp ep2": Layout(data=2, tensor=2, sequence=True, expert=2, micro_batch_tokens=40),
    "pp2 ep2": Layout(pipeline=2, data=2, expert=2, micro_batch_tokens=40),
}
CASES = {(f, n): x for f in DENSE for n, x in {**LAYOUTS, **TP2}.items()}
CASES |= {(f, n): x for f in EXPERTS for n, x in {**LAYOUTS, **EP}.items()}
SHORT = {("qwen3", name) for name in ("dp2", "tp2 sp", "pp2 vpp2")}


class Jobs:
    """Runs the jobs of a number of ranks, the short ones or the rest, when the first of them is asked for."""

    def __init__(self, folder: Path):
        self.folder = folder

    @functools.cache
    def files(self, family: str) -> tuple[str, str]:
        """The model and its reference."""
        folder, file = make_tiny(family, self.folder / family), self.folder / f"{family}.pt"
        reference(folder, file)
        return str(folder), str(file)

    @functools.cache
    def of(self, world: int, short: bool) -> dict[tuple[str, str], Outcome]:
        wanted = [case for case, layout in CASES.items() if layout.world == world and (case in SHORT) == short]
        jobs = [Job(CASES[case], *self.files(case[0]), free_port()) for case in wanted]
        return outcomes(world, run_jobs, dict(zip(wanted, jobs, strict=True)), outcome)


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Jobs:
    return Jobs(tmp_path_factory.mktemp("ten_steps"))


@pytest.mark.timeout(900)  # the first one waits for all jobs of as many ranks
@pytest.mark.parametrize(
    ("family", "name"), [pytest.param(*case, marks=() if case in SHORT else pytest.mark.slow) for case in CASES]
)
def test_ten_steps_are_those_of_transformers(
    jobs: Jobs, family: str, name: str, record_invariant: Callable[[str, float, float], None]
) -> None:
    result = jobs.of(CASES[family, name].world, (family, name) in SHORT)[family, name]
    want = torch.load(jobs.files(family)[1], weights_only=False)
    assert result.elements == {n: t.numel() for n, t in want["weights"].items()}
    head = f"{family}, {name}, ten steps:"
    record_invariant(f"{head} loss of every step, relative", result.loss, GOAL)
    record_invariant(f"{head} gradient norm of every step, relative", result.grad_norm, GOAL)
    record_invariant(f"{head} learning rate of every step, relative", result.lr, 1e-9)
    record_invariant(f"{head} worst of all weights, relative", result.weights, GOAL)
    record_invariant(f"{head} worst of all weights, relative to how far they moved", result.moved, GOAL)


def test_ten_steps_are_not_trivial_ones(jobs: Jobs) -> None:
    """Clipping is part of them, the model learns, and every tensor moves."""
    want = torch.load(jobs.files("qwen3")[1], weights_only=False)
    assert max(want["norms"]) > 1.0 and want["losses"][-1] < want["losses"][1]
    assert min(want["moved"].values()) > 1e-3
