"""The optimizer on a real model of one rank: schedule, clipping, what decays, bad gradients, float32 masters of bfloat16 weights."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.models.tiny import make_tiny
from tests.distributed import run_ranks

UPDATES = 8
WARM_UP = [0.25, 0.5, 0.75]
WSD = {  # the last four updates: 0, 1/4, 1/2, 3/4 of the way down
    "linear": [1, 0.75, 0.5, 0.25],
    "cosine": [1, (1 + math.sqrt(0.5)) / 2, 0.5, (1 - math.sqrt(0.5)) / 2],
    "exponential": [1, 2 * 0.5**0.25 - 1, 2 * 0.5**0.5 - 1, 2 * 0.5**0.75 - 1],
    "minus_sqrt": [1, 0.5, 1 - math.sqrt(0.5), 1 - math.sqrt(0.75)],
}
SCHEDULES: dict[str, tuple[dict[str, Any], list[float]]] = {
    "constant": ({"schedule": "constant"}, [*WARM_UP, 1, 1, 1, 1, 1]),
    "linear": ({"schedule": "linear"}, [*WARM_UP, 1, 0.82, 0.64, 0.46, 0.28]),
    "cosine": (
        {"schedule": "cosine"},
        WARM_UP + [0.1 + 0.9 * (1 + math.cos(math.pi * k / 5)) / 2 for k in range(5)],
    ),
    **{
        f"wsd, {fall}": (
            {"schedule": "wsd", "wsd_decay_steps": 4, "wsd_decay": fall},
            [*WARM_UP, 1, *(0.1 + 0.9 * share for share in shares)],
        )
        for fall, shares in WSD.items()
    },
}


def _scenarios(rank: int, world: int, port: int, folder: str) -> dict[str, Any]:
    """Everything in one process: starting Megatron takes longer than all of it."""
    from megarl.megatron import parallel
    from megarl.megatron.engine import EngineSettings, MegatronEngine
    from megarl.megatron.optimizer_settings import OptimizerSettings

    torch.set_num_threads(1)
    place = parallel.start(rank, world, "127.0.0.1", port, tensor=1, pipeline=1, seed=1, timeout=60)

    def engine(dtype: str = "float32", **settings: Any):
        return MegatronEngine(
            Path(folder),
            place,
            EngineSettings(dtype),
            optimizer=OptimizerSettings(**settings),
            total_updates=UPDATES,
        )

    def weights(built: Any) -> dict[str, torch.Tensor]:
        return {p.name: t.detach().float().clone() for p, t in built.parameters()}

    def zero(built: Any) -> None:
        for chunk in built.chunks:
            chunk.zero_grad_buffer()

    def update(built: Any, gradient: float) -> Any:
        zero(built)
        for _, tensor in built.parameters():
            tensor.main_grad.fill_(gradient)
        return built.optimizer.update()

    found: dict[str, Any] = {}
    for schedule, (settings, _) in SCHEDULES.items():
        built = engine(lr=1e-3, min_lr=1e-4, warmup_steps=3, **settings)
        found[schedule] = [update(built, 0.1).lr for _ in range(UPDATES)]

    for distributed in (True, False):
        built = engine(lr=1e-2, eps=1.0, clip_grad=0.5, distributed=distributed)
        before, result = weights(built), update(built, 0.1)
        count = sum(t.numel() for t in before.values())
        moved = torch.cat([(v - before[n]).flatten() for n, v in weights(built).items()])
        found["clip", distributed] = (count, result.grad_norm, result.applied, float(moved.min()), float(moved.max()))

    built = engine(lr=1e-2, weight_decay=0.5)
    before = weights(built)
    update(built, 0.0)
    found["decay"] = {n: (v.dim(), float((v / before[n] - 1).abs().max())) for n, v in weights(built).items()}

    for bad in (math.nan, math.inf):
        built = engine(lr=1e-2, weight_decay=0.5)
        update(built, 0.1)
        before = weights(built)
        zero(built)
        for index, (_, tensor) in enumerate(built.parameters()):
            tensor.main_grad.fill_(0.1)
            if index == 3:
                tensor.main_grad.view(-1)[5] = bad
        skipped = built.optimizer.update()
        same = all(torch.equal(v, before[n]) for n, v in weights(built).items())
        after = update(built, 0.1)
        moved = max(float((v - before[n]).abs().max()) for n, v in weights(built).items())
        found["bad", bad] = (skipped.applied, same, after.applied, moved)

    for distributed in (True, False):
        built = engine("bfloat16", lr=1e-5, distributed=distributed)
        before = weights(built)
        for _ in range(400):
            update(built, 0.1)
        found["master", distributed] = {n: (before[n], v) for n, v in weights(built).items() if "final_layernorm" in n}
    parallel.stop()
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[Any, Any]:
    folder = make_tiny("qwen2", tmp_path_factory.mktemp("optimizer") / "model", num_hidden_layers=1)
    return run_ranks(1, _scenarios, str(folder))[0]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_learning_rate_of_every_update(found: dict, schedule: str) -> None:
    assert found[schedule] == pytest.approx([1e-3 * share for share in SCHEDULES[schedule][1]], rel=1e-6)


@pytest.mark.parametrize("distributed", [True, False])
def test_the_gradient_is_clipped_to_its_global_norm(found: dict, distributed: bool) -> None:
    count, norm, applied, least, most = found["clip", distributed]
    assert applied and norm == pytest.approx(0.1 * math.sqrt(count), rel=1e-5)  # before clipping
    clipped = 0.5 / math.sqrt(count)
    expected = -1e-2 * clipped / (clipped + 1.0)  # AdamW's first step, with eps 1
    assert least == pytest.approx(expected, rel=1e-2) and most == pytest.approx(expected, rel=1e-2)


def test_norms_and_biases_do_not_decay(found: dict) -> None:
    kinds = {dims for dims, _ in found["decay"].values()}
    assert kinds == {1, 2} and any(name.endswith("bias") for name in found["decay"])
    for name, (dims, change) in found["decay"].items():
        assert change == (0.0 if dims == 1 else pytest.approx(1e-2 * 0.5, rel=1e-3)), name


@pytest.mark.parametrize("bad", [math.nan, math.inf], ids=["nan", "inf"])
def test_a_gradient_that_is_not_finite_changes_nothing(found: dict, bad: float) -> None:
    key = next(key for key in found if key[0] == "bad" and str(key[1]) == str(bad))
    applied, same, applied_after, moved = found[key]
    assert not applied and same
    assert applied_after and 0.0 < moved < 0.03  # the next update is an ordinary one


@pytest.mark.parametrize("distributed", [True, False])
def test_small_updates_of_bfloat16_weights_add_up(found: dict, distributed: bool) -> None:
    """400 updates of 1e-5 are 4e-3, one step of bfloat16 between a half and 1. A single one would be rounded away."""
    (pair,) = found["master", distributed].values()
    before, after = pair
    assert torch.equal((before - 1e-5).bfloat16().float(), before)
    below_one = (before > 0.51) & (before < 1.0)
    assert below_one.sum() > 20
    assert ((after - before)[below_one] == -(2.0**-8)).all()
