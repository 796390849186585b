"""Activations are estimated as autograd keeps them: counts of real training steps over shapes, layouts and recomputation; and
what is told when an allocation really fails."""

from __future__ import annotations

import math
from itertools import product
from pathlib import Path

import pytest
import torch

from megarl import models
from megarl.bridge.activations import Estimate, Layout, MicroBatch
from megarl.bridge.hf_config import read_config
from megarl.bridge.model_map import ModelMap
from megarl.config import Config
from megarl.controller.preflight import memory
from megarl.models.tiny import make_tiny
from tests.distributed import run_ranks
from tests.megatron.memory_jobs import Case, compared, head_peak, starved, without_states

BOUND = 0.15
MODELS = ("llama", "qwen2", "qwen3", "qwen3-moe", "mixtral", "deepseek", "deepseek-v2")
MODELS += ("mistral", "glm4", "gemma2", "gemma3", "glm4-moe", "gpt-oss")
WAYS = [("float32", "none"), ("bfloat16", "none"), ("bfloat16", "full"), ("float32", "selective")]
TWO_RANKS = {
    "tensor": ("llama", Layout(tensor=2)),
    "sequence": ("qwen3", Layout(tensor=2, sequence=True)),
    "pipeline": ("llama", Layout(pipeline=2)),
    "uneven pipeline": ("qwen3", Layout(pipeline=2, stage_layers=(1, 3))),
    "interleaved": ("llama", Layout(pipeline=2, virtual=2)),
    "context": ("llama", Layout(context=2)),
    "latent pipeline": ("deepseek", Layout(pipeline=2)),
}


def check(world: int, cases: list[Case]) -> None:
    wrong = [
        f"{case}, rank {rank}: {measured} bytes, estimated {estimated / measured:.3f} of it"
        for rank, found in enumerate(run_ranks(world, compared, cases))
        for case, (measured, estimated) in zip(cases, found, strict=True)
        if abs(estimated / measured - 1) > BOUND
    ]
    assert not wrong, "\n".join(wrong)


def test_one_rank() -> None:
    check(1, [Case("tiny-llama"), Case("tiny-qwen3", dtype="bfloat16", recompute="full")])


@pytest.mark.parametrize("exact_kl", [None, "full", "top_k"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_head(dtype: str, exact_kl: str | None) -> None:
    """A vocabulary of more than one block, with logits that are worked on in several."""
    config = read_config(models.resolve("tiny-llama")) | {"vocab_size": 20_011, "hidden_size": 120}
    model = ModelMap.from_hf(config)
    for responses, chunk in ((300, 96), (900, 200)):
        measured = head_peak(model, getattr(torch, dtype), responses, chunk, exact_kl)
        estimate = Estimate(model, Layout(), dtype=dtype, chunk=chunk, exact_kl=exact_kl)
        estimated = estimate(MicroBatch.of([responses], responses)).head
        assert abs(estimated / measured - 1) <= BOUND, (responses, measured, estimated / measured)


@pytest.mark.slow
def test_every_family() -> None:
    every = product(MODELS, ("float32", "bfloat16"), ("none", "selective", "full"))
    check(1, [Case(f"tiny-{model}", dtype=dtype, recompute=recompute) for model, dtype, recompute in every])


@pytest.mark.slow
@pytest.mark.parametrize("name", TWO_RANKS)
def test_two_ranks(name: str) -> None:
    model, layout = TWO_RANKS[name]
    check(2, [Case(f"tiny-{model}", layout, dtype, recompute) for dtype, recompute in WAYS])


@pytest.mark.slow
def test_a_failed_allocation_names_a_setting_that_fits() -> None:
    ((told, loss),) = run_ranks(1, starved, 150, "none", 300)
    assert told and told[0].startswith("out of memory in an update: a micro-batch of "), told
    assert "layout: no cut; recompute=none" in told[0] and "set micro_batch_tokens=" in told[0]
    assert math.isfinite(loss) and loss != 0.0, told  # a heap in pieces may take a second try


@pytest.mark.slow
def test_nothing_fits() -> None:
    ((told, _),) = run_ranks(1, starved, 20, "none", 2000)
    assert "not even its longest sequence" in told[-1], told


@pytest.mark.slow
def test_states_of_the_optimizer_that_do_not_fit(tmp_path: Path) -> None:
    """A vocabulary whose weight's two states are 200 MB, where 8 MB may still be taken."""
    make_tiny("qwen2", tmp_path / "wide", vocab_size=500_009)
    ((told, changed),) = run_ranks(1, without_states, str(tmp_path / "wide"))
    assert told.startswith("out of memory in the optimizer: its states do not fit beside the model"), told
    assert changed == 0.0


def estimate(**options) -> Estimate:
    model = ModelMap.from_hf(models.resolve("tiny-llama"))
    return Estimate(model, options.pop("layout", Layout()), dtype="bfloat16", **options)


def test_the_largest_that_fits_is_the_largest() -> None:
    one, micro = estimate(), MicroBatch.of([93] * 40)
    room = one(micro.scaled(1000)).total
    assert one.largest(micro, room, longest=93) in range(1000, 1003)
    assert one.largest(micro, one(micro).total, longest=93) == micro.tokens
    assert one.largest(micro, one(micro.scaled(93)).total - 1, longest=93) is None


def test_more_recomputing_and_more_ranks_take_less() -> None:
    micro = MicroBatch.of([400] * 10)
    held = [estimate(recompute=way)(micro).held for way in ("none", "selective", "full")]
    assert held == sorted(held, reverse=True) and len(set(held)) == 3
    for layout in (Layout(tensor=2), Layout(context=2), Layout(pipeline=2)):
        assert estimate(layout=layout)(micro).held < held[0]
    assert estimate(layout=Layout(pipeline=2))(micro, micro_batches=2, rank=0).held > held[0] * 0.9
    assert estimate(learns=False)(micro).held == 0


def test_a_budget_that_no_gpu_of_this_size_can_hold_is_told_before_the_start() -> None:
    cfg = Config()
    cfg.actor.micro_batch_tokens = 1 << 20
    model = ModelMap.from_hf(models.resolve("tiny-llama"))
    assert list(memory(cfg, model, None)) == []  # no GPU, nothing to tell
    assert list(memory(cfg, model, 80 << 30)) == []
    (said,) = memory(cfg, model, 1 << 30)
    assert said.startswith("actor.micro_batch_tokens=1048576 needs about") and "actor.recompute=full" in said
    cfg.actor.micro_batch_tokens = int(said.split("set it to ")[1].split()[0])
    assert list(memory(cfg, model, 1 << 30)) == []
