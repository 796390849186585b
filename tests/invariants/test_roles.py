"""Values, value loss, reward scores, every gradient and the weights after a step: those of transformers' classifiers, on every
layout, to rounding.

A critic is a classifier with one label, a reward model has any number. The jobs of as many ranks share one set of processes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from megarl.models.heads import make_tiny_reward
from tests.distributed import free_port, outcomes
from tests.megatron.harness import Layout
from tests.megatron.valued_jobs import Job, Outcome, outcome, run_jobs, transformers_reference

GOAL = 1e-5
# What a job is of: the kind of its loss, and the labels of its head.
ROLES = {"critic": ("critic", 1), "reward model": ("reward", 1), "reward model of 3 labels": ("reward", 3)}
DENSE = ("qwen2", "qwen3", "llama")
EXPERTS = ("qwen3-moe", "deepseek")
LAYOUTS = {
    "one rank": Layout(),
    "a sample a micro-batch": Layout(micro_batch_tokens=1, share_prompts=False),
    "three samples a micro-batch": Layout(samples=3),
    "padded": Layout(padding=16, micro_batch_tokens=40),
    "recomputed": Layout(recompute="full", micro_batch_tokens=40),
    "tp2 sp": Layout(tensor=2, sequence=True, micro_batch_tokens=40),
    "pp2": Layout(pipeline=2, micro_batch_tokens=40),
    "pp2 vpp2": Layout(pipeline=2, virtual=2, micro_batch_tokens=40),
    "cp2": Layout(context=2, micro_batch_tokens=40),
    "dp2": Layout(data=2, micro_batch_tokens=40),
    "dp2, all samples on one rank": Layout(data=2, lopsided=True, micro_batch_tokens=40),
    "dp2 plain optimizer": Layout(data=2, distributed=False),
    "tp2 sp pp2": Layout(tensor=2, sequence=True, pipeline=2, micro_batch_tokens=30),
    "tp2 sp cp2": Layout(tensor=2, sequence=True, context=2, micro_batch_tokens=30),
    "dp2 tp2 sp": Layout(data=2, tensor=2, sequence=True, micro_batch_tokens=30),
}
# Of dense families: without sequence parallelism.
TP = {
    "tp2": Layout(tensor=2, micro_batch_tokens=40),
    "tp2 cp2": Layout(tensor=2, context=2, micro_batch_tokens=30),
    "dp2 tp2": Layout(data=2, tensor=2, micro_batch_tokens=30),
}
# Of families with experts.
EP = {
    "ep2": Layout(data=2, expert=2, micro_batch_tokens=40),
    "ep2, a rank without samples": Layout(data=2, expert=2, lopsided=True, micro_batch_tokens=40),
    "tp2 sp ep2": Layout(tensor=2, sequence=True, expert=2, expert_tensor=1, micro_batch_tokens=40),
    "dp2 tp2 sp ep2": Layout(data=2, tensor=2, sequence=True, expert=2, micro_batch_tokens=30),
    "pp2 ep2": Layout(pipeline=2, data=2, expert=2, micro_batch_tokens=30),
}
CASES = {(f, role, n): x for f in DENSE for role in ROLES for n, x in {**LAYOUTS, **TP}.items()}
CASES |= {(f, role, n): x for f in EXPERTS for role in ROLES for n, x in {**LAYOUTS, **EP}.items()}
# In the short form: of one dense family what differs most, of one with experts the splits of experts.
SHORT = {
    ("qwen3", role, layout)
    for role in ROLES
    for layout in ("one rank", "tp2 sp", "pp2", "cp2", "dp2")
    if role != "reward model" or layout == "one rank"
} | {("deepseek", "critic", "ep2"), ("qwen3-moe", "reward model of 3 labels", "tp2 sp ep2")}


class Jobs:
    """Runs all jobs of a number of ranks when the first of them is asked for: the short ones, or the others."""

    def __init__(self, folder: Path):
        self.folder = folder

    @functools.cache
    def model(self, family: str, labels: int) -> Path:
        return make_tiny_reward(family, self.folder / f"{family}-{labels}", labels=labels)

    @functools.cache
    def reference(self, family: str, role: str) -> Path:
        kind, labels = ROLES[role]
        file = self.folder / f"{family}-{role}.pt"
        transformers_reference(kind, self.model(family, labels), file)
        return file

    @functools.cache
    def of(self, world: int, short: bool) -> dict[tuple[str, str, str], Outcome]:
        wanted = [case for case, layout in CASES.items() if layout.world == world and (case in SHORT) == short]
        jobs = [
            Job(ROLES[r][0], CASES[f, r, n], str(self.model(f, ROLES[r][1])), str(self.reference(f, r)), free_port())
            for f, r, n in wanted
        ]
        return outcomes(world, run_jobs, dict(zip(wanted, jobs, strict=True)), outcome)


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Jobs:
    return Jobs(tmp_path_factory.mktemp("roles"))


@pytest.mark.timeout(900)  # the first one waits for all jobs of as many ranks
@pytest.mark.parametrize(
    ("family", "role", "name"), [pytest.param(*case, marks=() if case in SHORT else pytest.mark.slow) for case in CASES]
)
def test_a_training_step_is_that_of_transformers(
    jobs: Jobs, family: str, role: str, name: str, record_invariant: Callable[[str, float, float], None]
) -> None:
    result = jobs.of(CASES[family, role, name].world, (family, role, name) in SHORT)[family, role, name]
    want = torch.load(jobs.reference(family, role), weights_only=False)
    assert result.elements == {n: t.numel() for n, t in want["gradients"].items()}  # all was compared, each once
    assert result.samples == list(range(12))
    assert result.padding == 0.0
    head, outputs = f"{family}, {role}, {name}:", "values" if role == "critic" else "scores"
    record_invariant(f"{head} {outputs}, largest difference", result.outputs, GOAL)
    record_invariant(f"{head} loss, relative", result.loss, GOAL)
    record_invariant(f"{head} gradient norm, relative", result.grad_norm, GOAL)
    record_invariant(f"{head} worst of all gradients, relative", result.worst_gradient, GOAL)
    record_invariant(f"{head} worst of all weights after a step, relative", result.worst_weight, GOAL)


@pytest.mark.parametrize("role", ROLES)
def test_the_step_is_not_a_trivial_one(jobs: Jobs, role: str) -> None:
    """Every branch of the loss has tokens, clipping is part of the step, and every tensor learns."""
    want = torch.load(jobs.reference("qwen3", role), weights_only=False)
    assert 0.1 < want.get("clipped", 0.5) < 0.9
    assert want["grad_norm"] > 0.5
    outputs = want["values"] if role == "critic" else want["scores"]
    assert outputs.std() > 0.3
    for name, gradient in want["gradients"].items():
        assert gradient.abs().max() > 1e-4, name
