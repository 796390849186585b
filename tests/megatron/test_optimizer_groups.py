"""Frozen parameters and learning rates by name and by depth, on one rank, over data-parallel and over pipeline ranks."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.bridge.model_map import ModelMap
from megarl.models.tiny import make_tiny
from tests.distributed import free_port, run_ranks
from tests.megatron.learners import gradients, learner, train, weights

LAYERS = 4
FROZEN = ["model.embed_tokens.*", "decoder.layers.0.*", "model.layers.1.self_attn.?_proj.*"]
MULTIPLIERS = {"*.mlp.*": 0.25, "model.layers.2.*": 3.0}
DECAY = 0.5


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("qwen2", tmp_path_factory.mktemp("groups") / "model", num_hidden_layers=LAYERS)


@pytest.fixture(scope="module")
def model_map(folder: Path) -> ModelMap:
    return ModelMap.from_hf(folder)


def _update(engine: Any, gradient: float = 0.1) -> Any:
    """As if every trainable parameter had this gradient everywhere."""
    for _, tensor in engine.parameters():
        if tensor.requires_grad:
            tensor.main_grad.fill_(gradient)
    return engine.optimizer.update()


def _elements(engine: Any) -> tuple[int, int]:
    """Elements of all gradient buffers, and of all optimizer states of one kind, on this rank."""
    buffers = [b for chunk in engine.chunks for b in chunk.buffers]
    states = [s for part in engine.optimizer.inner.chained_optimizers for s in part.optimizer.state.values()]
    return sum(p.numel() for b in buffers for p in b.params), sum(s["exp_avg"].numel() for s in states)


def _alone(port: int, folder: str) -> dict[Any, Any]:
    from megarl.megatron import parallel

    place = parallel.start(0, 1, "127.0.0.1", port, tensor=1, pipeline=1, seed=1, timeout=60)
    found: dict[Any, Any] = {}
    for dtype in ("float32", "bfloat16"):
        engine = learner(folder, place, dtype=dtype, lr=0.1, eps=1.0, weight_decay=0.1, clip_grad=0.0, frozen=FROZEN)
        before = weights(engine)
        norm, *_ = (_update(engine).grad_norm for _ in range(3))
        trainable = {p.name: t.numel() for p, t in engine.parameters() if hasattr(t, "main_grad")}
        found["frozen", dtype] = (before, weights(engine), trainable, norm, _elements(engine))

    engine = learner(
        folder, place, lr=1e-2, eps=1.0, clip_grad=0.0, warmup_steps=3, lr_multipliers=MULTIPLIERS, layer_lr_decay=DECAY
    )
    moved = []
    for _ in range(4):
        before = weights(engine)
        result = _update(engine)
        moved.append({n: float((v - before[n]).mean()) for n, v in weights(engine).items()})
    found["scales"] = (moved, result.lr)

    for frozen in ((), FROZEN):
        for recompute in ("none", "selective", "full"):
            engine = learner(folder, place, recompute=recompute, lr=1e-2, clip_grad=0.0, frozen=frozen)
            train(engine)
            found["recompute", bool(frozen), recompute] = gradients(engine)
    parallel.stop()
    return found


def _ranks(rank: int, world: int, port: int, folder: str, other: int, third: int) -> dict[Any, Any]:
    """Everything in one pair of processes: starting Megatron takes longer than all of it."""
    from megarl.megatron import parallel

    torch.set_num_threads(1)
    place = parallel.start(rank, world, "127.0.0.1", port, tensor=1, pipeline=1, seed=1, timeout=60)
    found: dict[Any, Any] = {}
    engine = learner(folder, place, lr=1e-2, eps=1.0, clip_grad=0.0, frozen=FROZEN, layer_lr_decay=DECAY)
    before = weights(engine)
    _update(engine)
    found["data"] = (before, weights(engine), _elements(engine))
    parallel.stop()

    place = parallel.start(rank, world, "127.0.0.1", other, tensor=1, pipeline=2, seed=1, timeout=60)
    first_stage = ["model.embed_tokens.*", "model.layers.0.*", "model.layers.1.*"]
    for frozen in ([], first_stage):
        engine = learner(folder, place, lr=1e-2, clip_grad=0.0, frozen=frozen)
        before = weights(engine)
        metrics = train(engine)
        found["pipeline", bool(frozen)] = (before, weights(engine), gradients(engine), metrics)
    parallel.stop()
    return found | (_alone(third, folder) if rank == 0 else {})


@pytest.fixture(scope="module")
def both(folder: Path) -> list[dict[Any, Any]]:
    return run_ranks(2, _ranks, str(folder), free_port(), free_port())


@pytest.fixture(scope="module")
def found(both: list[dict[Any, Any]]) -> dict[Any, Any]:
    return both[0]


def is_frozen(name: str) -> bool:
    """What FROZEN means, said in another way. The tied output layer lies in the embedding's tensor."""
    attention = ("decoder.layers.1.self_attention.linear_qkv.", "decoder.layers.1.self_attention.linear_proj.")
    return name.startswith(("embedding.", "output_layer.", "decoder.layers.0.", *attention))


def scale(name: str) -> float:
    """What MULTIPLIERS and DECAY mean."""
    if name.startswith("decoder.layers."):
        layer = int(name.split(".")[2])
        return DECAY ** (LAYERS - layer) * (0.25 if ".mlp." in name else 1) * (3 if layer == 2 else 1)
    return DECAY ** (LAYERS + 1) if name.startswith("embedding.") else 1.0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_frozen_parameters_stay_bit_by_bit_and_take_no_memory(found: dict, dtype: str) -> None:
    before, after, trainable, norm, (buffered, states) = found["frozen", dtype]
    assert {n for n in before if is_frozen(n)} == set(before) - set(trainable)
    assert 0 < len(trainable) < len(before)
    for name, value in after.items():
        assert torch.equal(value, before[name]) == is_frozen(name), name
    total = sum(trainable.values())
    assert (buffered, states) == (total, total)
    assert norm == pytest.approx(0.1 * math.sqrt(total), rel=1e-5)  # frozen ones have no part in it


def test_every_parameter_has_its_own_learning_rate_from_the_first_update_on(found: dict) -> None:
    moved, lr = found["scales"]
    assert lr == pytest.approx(1e-2)
    for update, share in zip(moved, (0.25, 0.5, 0.75, 1.0), strict=True):
        base = update["decoder.final_layernorm.weight"]
        assert base < 0.0
        for name, mean in update.items():
            assert mean == pytest.approx(base * scale(name), rel=2e-2), (name, share)
    totals = [update["decoder.final_layernorm.weight"] for update in moved]
    assert totals[3] / totals[0] == pytest.approx(4.0, rel=0.05)


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_recomputation_changes_no_bit_of_any_gradient(found: dict, recompute: str, frozen: bool) -> None:
    plain, again = found["recompute", frozen, "none"], found["recompute", frozen, recompute]
    assert plain.keys() == again.keys() and any(name.endswith("linear_fc2.weight") for name in plain)
    for name, gradient in plain.items():
        assert gradient.any(), name
        assert torch.equal(gradient, again[name]), name


def test_freezing_leaves_the_other_gradients_alone(found: dict) -> None:
    everything, rest = found["recompute", False, "none"], found["recompute", True, "none"]
    assert {n for n in everything if not is_frozen(n)} == set(rest)
    for name, gradient in rest.items():
        torch.testing.assert_close(gradient, everything[name], rtol=1e-6, atol=1e-7)


def test_frozen_parameters_and_depth_over_data_parallel_ranks(both: list[dict]) -> None:
    states = 0
    for found in both:
        before, after, (_, held) = found["data"]
        states += held
        for name, value in after.items():
            assert torch.equal(value, before[name]) == is_frozen(name), name
            if not is_frozen(name):
                depth = LAYERS - int(name.split(".")[2]) if ".layers." in name else 0
                step = -1e-2 * DECAY**depth * 0.1 / 1.1
                assert (value - before[name]).mean() == pytest.approx(step, rel=1e-2), name
    first, second = (found["data"][1] for found in both)
    assert all(torch.equal(value, second[name]) for name, value in first.items())
    assert states == sum(v.numel() for n, v in first.items() if not is_frozen(n))  # each state on one of the ranks


def test_a_pipeline_stage_that_is_frozen_whole(both: list[dict]) -> None:
    """Its gradients are not computed, those of the stage behind it are the same as ever; tied copies stay equal."""
    norms = [found["pipeline", True][3]["grad_norm"] for found in both]
    assert norms[0] == norms[1] > 0.0
    before, after, found, _ = both[0]["pipeline", True]
    assert found == {} and all(torch.equal(value, before[name]) for name, value in after.items())
    before, after, found, _ = both[1]["pipeline", True]
    assert found and all(
        torch.equal(value, before[name]) == name.startswith("output_layer") for name, value in after.items()
    )
    for name, gradient in found.items():
        assert torch.equal(gradient, both[1]["pipeline", False][2][name]), name


def test_names_of_both_worlds(model_map: ModelMap) -> None:
    from megarl.megatron.parameter_groups import frozen, problems

    assert not problems(model_map, FROZEN, MULTIPLIERS)
    names = {parameter.name for parameter in model_map.parameters}
    assert frozen(model_map, FROZEN) == {name for name in names if is_frozen(name)}
    assert frozen(model_map, ["model.norm.weight"]) == {"decoder.final_layernorm.weight"}
    assert frozen(model_map, ["output_layer.weight"]) == {"output_layer.weight", "embedding.word_embeddings.weight"}


def test_patterns_that_cannot_be_meant(model_map: ModelMap) -> None:
    from megarl.megatron.parameter_groups import problems

    (typo,) = problems(model_map, ["model.layer.0.mlp.up_proj.weight"], {})
    assert "'model.layer.0.mlp.up_proj.weight', which matches no parameter" in typo
    assert "nearest name is 'model.layers.0.mlp.up_proj.weight'" in typo
    (torn,) = problems(model_map, ["*.q_proj.*"], {})
    assert "one tensor in Megatron" in torn and "model.layers.0.self_attn.k_proj.weight (False)" in torn
    (torn,) = problems(model_map, [], {"*.gate_proj.*": 0.1})
    assert torn.startswith("actor.optimizer.lr_multipliers: ") and "up_proj.weight (1.0)" in torn
    (all_of_it,) = problems(model_map, ["*"], {})
    assert "nothing to train" in all_of_it
