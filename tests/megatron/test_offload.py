"""What a role holds, moved away and back: every storage freed, every bit restored, training none the wiser.

Here from CPU memory to CPU memory, by the code that moves it between a GPU and CPU memory.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

from megarl.models.tiny import make_tiny
from tests.distributed import run_ranks
from tests.megatron.learners import learner, train, weights

CASES = [(dtype, distributed) for dtype in ("float32", "bfloat16") for distributed in (True, False)]


def _memory(engine: Any) -> Any:
    from megarl.megatron.offload import Memory

    return Memory(engine.chunks, engine.optimizer, even_on_cpu=True)


def _case(folder: str, place: Any, dtype: str, distributed: bool) -> dict[str, Any]:
    def fresh() -> Any:
        return learner(folder, place, dtype=dtype, lr=1e-2, distributed=distributed)

    untouched = fresh()
    for step in range(3):
        train(untouched, seed=step, groups=1)

    engine = fresh()
    memory = _memory(engine)
    empty = memory.held()
    train(engine, seed=0, groups=1)
    held, before = memory.held(), weights(engine)
    views = [(t, t.main_grad) for _, t in engine.parameters()]
    out = memory.offload()
    gone = memory.held()
    released = all(t.untyped_storage().nbytes() == 0 and g.untyped_storage().nbytes() == 0 for t, g in views)
    again = memory.offload()
    refusals = []
    for kinds in ((), ("parameters",)):
        try:
            memory.need(*kinds)
        except RuntimeError as error:
            refusals.append(str(error))
    partly = memory.restore("parameters")
    away, same = memory.away, all(torch.equal(v, before[n]) for n, v in weights(engine).items())
    back = memory.restore()
    memory.need()
    zero = not any(grad.any() for _, grad in views)
    train(engine, seed=1, groups=1)
    memory.offload("optimizer", "gradients")
    memory.restore("gradients")
    memory.restore("optimizer")
    train(engine, seed=2, groups=1)
    want = weights(untouched)
    return {
        "elements": sum(t.numel() for _, t in engine.parameters()),
        "empty": empty, "held": held, "out": out, "gone": gone, "released": released, "again": again.total,
        "refusals": refusals, "partly": partly, "away": away, "same": same, "back": back, "zero": zero,
        "text": str(out),
        "trained": all(torch.equal(v, want[n]) for n, v in weights(engine).items()),
        "moved": not all(torch.equal(v, before[n]) for n, v in want.items()),
    }  # fmt: skip


def _ranks(rank: int, world: int, port: int, folder: str) -> dict[Any, Any]:
    from megarl.megatron import parallel
    from megarl.megatron.offload import Memory

    torch.set_num_threads(1)
    place = parallel.start(rank, world, "127.0.0.1", port, tensor=1, pipeline=1, seed=1, timeout=60)
    found: dict[Any, Any] = {case: _case(folder, place, *case) for case in CASES}
    engine = learner(folder, place, lr=1e-2)
    memory = Memory(engine.chunks, engine.optimizer)
    found["here"] = (memory.held(), memory.offload(), memory.away, memory.restore())
    train(engine, groups=1)
    parallel.stop()
    return found


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[Any, Any]]:
    folder: Path = make_tiny("qwen2", tmp_path_factory.mktemp("offload") / "model", num_hidden_layers=1)
    return run_ranks(2, _ranks, str(folder))


@pytest.mark.parametrize("case", CASES)
def test_everything_is_freed_and_comes_back_bit_by_bit(ranks: list[dict], case: tuple[str, bool]) -> None:
    for rank in ranks:
        found = rank[case]
        assert found["released"] and set(found["gone"].values()) == {0}
        assert (
            found["out"].bytes
            == found["held"]
            == found["back"].bytes | {"parameters": found["partly"].bytes["parameters"]}
        )
        assert found["away"] == ("gradients", "optimizer") and found["same"] and found["zero"]
        assert found["again"] == 0 and found["back"].bytes["parameters"] == 0


@pytest.mark.parametrize("case", CASES)
def test_training_goes_on_as_if_nothing_had_been_moved(ranks: list[dict], case: tuple[str, bool]) -> None:
    for rank in ranks:
        assert rank[case]["trained"] and rank[case]["moved"]


@pytest.mark.parametrize("case", CASES)
def test_the_bytes_are_those_of_what_is_held(ranks: list[dict], case: tuple[str, bool]) -> None:
    """Weights; float32 gradients; two float32 moments, and with bfloat16 weights a float32 master. Sharded: half a rank each."""
    dtype, distributed = case
    per_element = 8 if dtype == "float32" else 12
    held = [rank[case]["held"] for rank in ranks]
    elements = ranks[0][case]["elements"]
    for own in held:
        assert own["parameters"] == pytest.approx(elements * (4 if dtype == "float32" else 2), rel=0.05)
        assert own["gradients"] == pytest.approx(elements * 4, rel=0.05)
    states = sum(own["optimizer"] for own in held) / (1 if distributed else 2)
    assert states == pytest.approx(elements * per_element, rel=0.02)


@pytest.mark.parametrize("case", CASES)
def test_what_is_away_is_refused_in_one_sentence(ranks: list[dict], case: tuple[str, bool]) -> None:
    found = ranks[0][case]
    assert found["refusals"] == [
        "parameters and gradients and optimizer of this model are offloaded; restore them before they are used",
        "parameters of this model are offloaded; restore them before they are used",
    ]
    assert "parameters 0." in found["text"] and "MiB in" in found["text"]


def test_without_a_gpu_nothing_moves_and_says_so(ranks: list[dict]) -> None:
    held, out, away, back = ranks[0]["here"]
    if not torch.cuda.is_available():
        assert set(held.values()) == {0} and out.total == back.total == 0 and away == ()
        assert str(out) == str(back) == "nothing moved: all of it is in CPU memory, where it stays"


def test_wrapped_tensors_move_by_what_is_in_them() -> None:
    from megarl.megatron.offload import Memory

    model = torch.nn.Linear(3, 2)
    inner = [torch.arange(6.0).view(2, 3), torch.arange(6.0, 12.0).view(2, 3)]
    model.weight = torch.nn.Parameter(TwoTensor(*inner))
    memory = Memory([model], even_on_cpu=True)
    assert memory.offload().bytes == {"parameters": 24 + 24 + 8, "gradients": 0, "optimizer": 0}
    assert [t.untyped_storage().nbytes() for t in inner] == [0, 0]
    memory.restore()
    assert inner[0].flatten().tolist() == list(range(6)) and inner[1].flatten().tolist() == list(range(6, 12))


def test_kinds_that_are_not() -> None:
    from megarl.megatron.offload import Memory

    with pytest.raises(ValueError, match="'weights' is nothing that can be offloaded; it must be one of parameters"):
        Memory([torch.nn.Linear(2, 2)]).offload("weights")
