"""A training step of a mixture of experts, with and without latent attention: that of transformers, under every split of experts.

Families × layouts as in test_layouts.py; here experts are shared out and cut as well. In the batch some expert gets no token, and
in a layout some rank no sample.
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
from tests.megatron.layouts import Job, Outcome, outcome, run_jobs, transformers_reference

FAMILIES = ("qwen3-moe", "deepseek", "mixtral", "deepseek-v2", "glm4-moe", "gpt-oss")
SHORT = ("qwen3-moe", "deepseek")  # the families of the short form
ONCE = {"glm4-moe": "ep2", "gpt-oss": "tp2 sp ep2"}  # and those of which one layout is in it
LAYOUTS = {
    "one rank": Layout(),
    "small micro-batches": Layout(micro_batch_tokens=20, chunk=7),
    "prompts not shared": Layout(share_prompts=False),
    "recomputed": Layout(recompute="full", micro_batch_tokens=40),
    "tp2 sp": Layout(tensor=2, sequence=True, micro_batch_tokens=40),
    "tp2 sp, experts whole": Layout(tensor=2, sequence=True, expert_tensor=1, micro_batch_tokens=40),
    "pp2": Layout(pipeline=2, stage_layers=(1, 3), micro_batch_tokens=40),
    "dp2": Layout(data=2, micro_batch_tokens=40),
    "dp2, experts cut": Layout(data=2, expert_tensor=2, micro_batch_tokens=40),
    "ep2": Layout(data=2, expert=2, micro_batch_tokens=40),
    "ep2, a rank without samples": Layout(data=2, expert=2, micro_batch_tokens=40, lopsided=True),
    "ep2, shuffled, plain optimizer": Layout(data=2, expert=2, distributed=False, shuffled=True, micro_batch_tokens=30),
    "tp2 sp ep2": Layout(tensor=2, sequence=True, expert=2, expert_tensor=1, micro_batch_tokens=40),
    "dp2 tp2 sp ep2": Layout(data=2, tensor=2, sequence=True, expert=2, micro_batch_tokens=30),
    "dp2 tp2 sp ep2, experts whole": Layout(
        data=2, tensor=2, sequence=True, expert=2, expert_tensor=1, micro_batch_tokens=30
    ),
    "pp2 vpp2": Layout(pipeline=2, virtual=2, micro_batch_tokens=40),
    "cp2 ep2": Layout(context=2, expert=2, micro_batch_tokens=40),
    "pp2 ep2": Layout(pipeline=2, data=2, expert=2, micro_batch_tokens=30),
    "dp4 ep2": Layout(data=4, expert=2, micro_batch_tokens=30),
}
IN_SHORT = ("one rank", "small micro-batches", "tp2 sp", "pp2", "ep2", "ep2, a rank without samples", "tp2 sp ep2")
# A dense MLP that is neither the first nor the last, so that the pattern of layers shows.
OVERRIDES = {"qwen3-moe": {"mlp_only_layers": [1]}}
GOAL = 1e-5


class Jobs:
    """Runs the jobs of a number of ranks, and of the short form or the rest, when the first of them is asked for."""

    def __init__(self, folder: Path):
        self.folder = folder

    @functools.cache
    def model(self, family: str) -> Path:
        return make_tiny(family, self.folder / family, **OVERRIDES.get(family, {}))

    @functools.cache
    def reference(self, family: str) -> Path:
        file = self.folder / f"{family}.pt"
        transformers_reference(self.model(family), file)
        return file

    @functools.cache
    def of(self, world: int, short: bool) -> dict[tuple[str, str], Outcome]:
        wanted = [
            (f, n)
            for f in FAMILIES
            for n, layout in LAYOUTS.items()
            if layout.world == world and is_short(f, n) == short and fits(f, n)
        ]
        jobs = [Job(LAYOUTS[n], str(self.model(f)), str(self.reference(f)), free_port()) for f, n in wanted]
        return outcomes(world, run_jobs, dict(zip(wanted, jobs, strict=True)), outcome)


def fits(family: str, name: str) -> bool:
    """gpt-oss's experts have biases, which Megatron cannot cut."""
    layout = LAYOUTS[name]
    return family != "gpt-oss" or (layout.expert_tensor or layout.tensor) == 1


def is_short(family: str, name: str) -> bool:
    return (family in SHORT and name in IN_SHORT) or ONCE.get(family) == name


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Jobs:
    return Jobs(tmp_path_factory.mktemp("experts"))


@pytest.mark.parametrize(
    ("family", "name"),
    [
        pytest.param(f, n, marks=[] if is_short(f, n) else [pytest.mark.slow])
        for n in LAYOUTS
        for f in FAMILIES
        if fits(f, n)
    ],
)
def test_a_training_step_is_that_of_transformers(
    jobs: Jobs, name: str, family: str, record_invariant: Callable[[str, float, float], None]
) -> None:
    result = jobs.of(LAYOUTS[name].world, is_short(family, name))[family, name]
    shapes = {n: t.numel() for n, t in torch.load(jobs.reference(family), weights_only=False)["gradients"].items()}
    assert result.elements == shapes  # every element of every tensor was compared, and each once
    assert sorted(result.samples) == list(range(12))
    assert result.padding == 0.0
    head = f"{family}, {name}:"
    record_invariant(f"{head} log-probs, largest difference", result.log_probs, GOAL)
    record_invariant(f"{head} entropy, largest difference", result.entropy, GOAL)
    record_invariant(f"{head} loss, relative", result.loss, GOAL)
    record_invariant(f"{head} gradient norm, relative", result.grad_norm, GOAL)
    record_invariant(f"{head} worst of all gradients, relative", result.worst_gradient, GOAL)
    record_invariant(f"{head} worst of all weights after a step, relative", result.worst_weight, GOAL)


@pytest.mark.parametrize("family", (*SHORT, *ONCE))
def test_the_step_is_not_a_trivial_one(jobs: Jobs, family: str) -> None:
    """Every branch of the loss has tokens; every tensor learns, but for the experts that no token went to: few, and in DeepSeek's
    model some."""
    reference = torch.load(jobs.reference(family), weights_only=False)
    assert 0.1 < reference["clipped"] < 0.9
    assert reference["grad_norm"] > 0.5  # so that clipping is part of the step
    idle = {name for name, gradient in reference["gradients"].items() if gradient.abs().max() < 1e-6}
    assert all(".mlp.experts." in name for name in idle)
    assert 3 <= len(idle) <= 12 or family != "deepseek", idle
