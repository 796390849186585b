"""An engine that gives its memory back: it falls by what it held, and with new weights every number is what it was, to the bit."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file

from megarl.batch.sample import Prompt
from megarl.errors import RunError
from megarl.models.tiny import make_tiny
from megarl.reshard.bucket import BucketSpec
from megarl.reshard.fingerprint import fingerprint
from megarl.rollout import session
from megarl.rollout.engine import Engine
from megarl.rollout.sampling import Sampling
from tests.rollout.test_engine import expose, fill

CACHE = 150_000  # tokens
MIB = 1 << 20
PROMPTS = [Prompt("a", [5, 6, 7, 8]), Prompt("b", [10] * 20), Prompt("c", list(range(100, 140)))]


@pytest.fixture(scope="module", params=["qwen3", "qwen3-moe"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Some 60 MB of weights."""
    wide = {"moe_intermediate_size": 1400} if request.param == "qwen3-moe" else {"intermediate_size": 14_000}
    return make_tiny(request.param, tmp_path_factory.mktemp("models") / "model", **wide)


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[Engine]:
    running = Engine(str(folder), dtype="float32", seed=3, max_total_tokens=CACHE)
    yield running
    running.shutdown()


def resident(engine: Engine) -> int:
    """Bytes of all processes of an engine."""
    pids = session.processes(engine.ready()["pid"])
    page = os.sysconf("SC_PAGE_SIZE")
    return sum(int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in pids) * page


def give(engine: Engine, folder: Path, bucket: Path, version: int) -> None:
    tensors = load_file(folder / "model.safetensors")
    spec = BucketSpec.plan(str(bucket), [(n, t.dtype, tuple(t.shape)) for n, t in tensors.items()], prove=tensors)
    spec.create()
    for name, view in spec.views().items():
        view.copy_(tensors[name])
    engine.begin_update(version)
    engine.load_buckets([spec])
    assert engine.end_update() == {name: fingerprint(tensor) for name, tensor in tensors.items()}
    bucket.unlink()


def answers(engine: Engine) -> list[object]:
    """One at a time: which requests SGLang computes together is a matter of time, and the last bits are one of that."""
    samples = [engine.generate([prompt], Sampling(max_new_tokens=24))[0] for prompt in PROMPTS]
    return [[(s.response_ids, s.rollout_log_probs) for s in samples], engine.score([list(range(5, 90))])]


@pytest.mark.slow
def test_memory_falls_by_cache_and_weights_and_comes_back_in_order(
    engine: Engine, folder: Path, tmp_path: Path
) -> None:
    weights = sum(tensor.nbytes for tensor in load_file(folder / "model.safetensors").values())
    cache = CACHE * 4 * 2 * 2 * 24 * 4  # layers, keys and values, heads, their size, bytes
    assert weights > 40 * MIB and cache > 100 * MIB
    give(engine, folder, tmp_path / "bucket", 1)
    before, held = answers(engine), resident(engine)

    engine.release_memory(["cache", "weights"])
    assert held - resident(engine) == pytest.approx(weights + cache, rel=0.1)
    for refused in (lambda: answers(engine), lambda: engine.begin_update(2)):
        with pytest.raises(RunError, match="memory of its (cache and )?weights is released"):
            refused()
    engine.resume_memory(["weights"])
    give(engine, folder, tmp_path / "bucket", 2)
    assert held - resident(engine) > 0.8 * cache  # weights are there, and the cache is not
    with pytest.raises(RunError, match="memory of its cache is released"):
        answers(engine)
    engine.resume_memory(["cache"])
    assert answers(engine) == before

    engine.release_memory(["cache"])
    assert held - resident(engine) > 0.8 * cache
    engine.resume_memory(["cache"])
    assert answers(engine) == before  # the weights were never gone


@pytest.mark.slow
def test_released_weights_are_gone_until_new_ones_are_proved(engine: Engine, folder: Path, tmp_path: Path) -> None:
    give(engine, folder, tmp_path / "bucket", 3)
    engine.release_memory(["weights", "cache"])
    engine.resume_memory(["cache", "weights"])
    with pytest.raises(RunError, match="not to be trusted: their memory was released and nothing was loaded since"):
        answers(engine)
    give(engine, folder, tmp_path / "bucket", 4)
    answers(engine)


@pytest.mark.slow
def test_memory_is_given_back_right_after_the_last_answer(engine: Engine, folder: Path, tmp_path: Path) -> None:
    """SGLang ends a scheduler that is told to while it is not idle."""
    give(engine, folder, tmp_path / "bucket", 5)
    expected = answers(engine)
    for _ in range(10):
        engine.release_memory(["cache"])
        engine.resume_memory(["cache"])
        assert answers(engine) == expected


@pytest.mark.slow
def test_weights_that_ranks_write_in_place_are_given_back_too(engine: Engine, folder: Path, tmp_path: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    weights = sum(tensor.nbytes for tensor in tensors.values())
    give(engine, folder, tmp_path / "bucket", 6)
    before, alone = answers(engine), resident(engine)
    exposures = expose(engine, tensors, tmp_path)
    assert answers(engine) == before
    held = resident(engine)
    assert held < alone + 0.5 * weights  # they moved, and are not there twice
    engine.release_memory(["weights"])
    assert held - resident(engine) == pytest.approx(weights, rel=0.1)
    engine.resume_memory(["weights"])
    assert fill(engine, exposures, tensors) == {name: fingerprint(tensor) for name, tensor in tensors.items()}
    assert answers(engine) == before
