"""Batch against plain lists of samples: whatever is done to the arrays, the samples say what it must mean."""

from __future__ import annotations

import math
import pickle
from typing import Any

import numpy as np
import pytest
import torch

from megarl.batch import Batch, Field, Level, Sample

SEEDS = range(10)


def random_samples(seed: int, count: int | None = None) -> list[Sample]:
    """Unequal lengths, empty prompts and responses among them."""
    generator = np.random.default_rng(seed)
    count = int(generator.integers(1, 25)) if count is None else count
    samples = []
    for i in range(count):
        prompt, response = int(generator.integers(0, 6)), int(generator.integers(0, 8))
        samples.append(
            Sample(
                uid=f"train-{i}",
                group=f"train-{i // 3}@7",
                prompt_ids=generator.integers(0, 50000, prompt).tolist(),
                response_ids=generator.integers(0, 50000, response).tolist(),
                loss_mask=generator.integers(0, 2, response).tolist(),
                rollout_log_probs=[-float(x) for x in generator.integers(0, 64, response) / 8],
                stop_reason=("stop", "length", "abort")[int(generator.integers(0, 3))],
                weight_version=i % 9,
                token_versions=[i % 9 + (at > i % 4) for at in range(response)] if response > i % 4 + 1 else [],
                reward=None if generator.random() < 0.3 else float(generator.integers(0, 5)) / 4,
                payload={"answer": i, "choices": ["a", "b"], "nested": {"x": [1, 2]}},
            )
        )
    return samples


def random_batch(seed: int) -> Batch:
    """With fields of other kinds besides: two-dimensional, bfloat16, bool."""
    batch = Batch.from_samples(random_samples(seed), {"step": seed, "note": ["plain", 1.5]})
    generator = torch.Generator().manual_seed(seed)
    tokens, responses = int(batch.total_lengths.sum()), int(batch.response_lengths.sum())
    batch = batch.set("positions", torch.randint(0, 99, (tokens, 3), generator=generator), Level.SEQUENCE)
    batch = batch.set("values", torch.randn(responses, generator=generator).bfloat16(), "response")
    return batch.set("flags", torch.rand(len(batch), 2, generator=generator) < 0.5, Level.SAMPLE)


def assert_same(left: Batch, right: Batch) -> None:
    assert left.names == right.names and left.meta == right.meta
    assert torch.equal(left.prompt_lengths, right.prompt_lengths)
    assert torch.equal(left.response_lengths, right.response_lengths)
    for name in left.names:
        assert left.level(name) == right.level(name), name
        if isinstance(left[name], np.ndarray):
            assert left[name].tolist() == right[name].tolist(), name
        else:
            assert left[name].dtype == right[name].dtype, name
            torch.testing.assert_close(left[name], right[name], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("seed", SEEDS)
def test_samples_and_back(seed: int) -> None:
    samples = random_samples(seed)
    batch = Batch.from_samples(samples)
    assert batch.to_samples() == samples
    kinds = {
        name: (batch.level(name).value, getattr(batch[name].dtype, "name", str(batch[name].dtype)))
        for name in batch.names
    }
    assert kinds == {
        "tokens": ("sequence", "torch.int64"),
        "loss_mask": ("response", "torch.float32"),
        "rollout_log_probs": ("response", "torch.float32"),
        "token_versions": ("response", "torch.int64"),
        "weight_version": ("sample", "torch.int64"),
        "reward": ("sample", "torch.float32"),
        **dict.fromkeys(("uid", "group", "stop_reason", "payload"), ("sample", "object")),
    }


@pytest.mark.parametrize("seed", SEEDS)
def test_rows_mean_the_same_as_for_a_list(seed: int) -> None:
    samples, batch = random_samples(seed), random_batch(seed)
    generator = np.random.default_rng(seed)
    picked = generator.integers(0, len(samples), 13).tolist()
    assert batch.take(picked).to_samples() == [samples[i] for i in picked]
    assert batch.take(torch.tensor(picked, dtype=torch.int32)).to_samples() == [samples[i] for i in picked]
    assert batch.repeat_interleave(3).to_samples() == [sample for sample in samples for _ in range(3)]
    assert len(batch.take([])) == len(batch.repeat_interleave(0)) == 0
    for k in (1, 2, 5, len(samples) + 3):
        parts = batch.split(k)
        sizes = [len(part) for part in parts]
        assert len(parts) == k and sizes == sorted(sizes, reverse=True) and sizes[0] - sizes[-1] <= 1
        assert sum((part.to_samples() for part in parts), []) == samples
        assert_same(Batch.concat(parts), batch)
        for rank in range(k):
            assert_same(batch.shard(rank, k), parts[rank])
    order = generator.permutation(len(samples))
    assert_same(batch.take(order.tolist()).take(np.argsort(order).tolist()), batch)
    assert_same(batch.rows(2, 9), batch.take(range(len(samples))[2:9]))


@pytest.mark.parametrize("seed", SEEDS)
def test_padded_and_back(seed: int) -> None:
    batch = random_batch(seed)
    rows = [(len(s.prompt_ids), len(s.response_ids)) for s in batch.to_samples()]
    for name in ("rollout_log_probs", "values", "tokens", "positions"):
        level = batch.level(name)
        lengths = [r if level == Level.RESPONSE else p + r for p, r in rows]
        padded = batch.padded(name, fill=-7)
        width = max(1, *lengths)
        assert padded.shape == (len(batch), width, *batch[name].shape[1:]) and padded.dtype == batch[name].dtype
        start = 0
        for row, length in enumerate(lengths):
            assert torch.equal(padded[row, :length], batch[name][start : start + length])
            assert (padded[row, length:] == -7).all()
            start += length
        assert torch.equal(batch.unpad(padded, level), batch[name])
        wider = torch.cat([padded, torch.full_like(padded, math.nan) if padded.is_floating_point() else padded], 1)
        assert torch.equal(batch.unpad(wider, level), batch[name])
    mask = batch.response_mask
    assert mask.dtype == torch.bool and mask.sum(-1).tolist() == [r for _, r in rows]
    assert torch.equal(mask, batch.set("ones", torch.ones(int(mask.sum())), "response").padded("ones") > 0)


@pytest.mark.parametrize("seed", SEEDS)
def test_where_sequences_and_responses_lie(seed: int) -> None:
    samples, batch = random_samples(seed), random_batch(seed)
    assert batch.cu_seqlens.dtype == torch.int32
    assert batch.cu_seqlens.diff().tolist() == batch.total_lengths.tolist() and int(batch.cu_seqlens[0]) == 0
    responses = [token for sample in samples for token in sample.response_ids]
    assert batch["tokens"][batch.response_positions].tolist() == responses


def test_padding_passes_gradients() -> None:
    batch = random_batch(0)
    flat = torch.randn(int(batch.response_lengths.sum()), requires_grad=True)
    padded = batch.set("logits", flat, "response").padded("logits", fill=math.nan)
    batch.unpad(padded).square().sum().backward()
    assert flat.grad is not None and torch.allclose(flat.grad, 2 * flat.detach())


@pytest.mark.parametrize("seed", SEEDS)
def test_the_wire_keeps_everything(seed: int) -> None:
    batch = random_batch(seed)
    assert_same(pickle.loads(pickle.dumps(batch)), batch)
    for part in (batch.shard(1, 3), batch.take([0, 0]), Batch.from_samples([])):
        assert_same(pickle.loads(pickle.dumps(part, protocol=5)), part)


def test_the_wire_is_zero_copy_and_a_shard_carries_only_itself() -> None:
    samples = random_samples(1, 400)
    batch = Batch.from_samples(samples).set(
        "values", torch.randn(sum(len(s.response_ids) for s in samples), 64), "response"
    )
    buffers: list[pickle.PickleBuffer] = []
    head = pickle.dumps(batch.select(["values", "tokens"]), protocol=5, buffer_callback=buffers.append)
    assert len(head) < 2000
    shared = [bytearray(buffer.raw()) for buffer in buffers]
    back = pickle.loads(head, buffers=[memoryview(buffer).toreadonly() for buffer in shared])
    assert torch.equal(back["values"], batch["values"])
    places = [(np.frombuffer(buffer, np.uint8).ctypes.data, len(buffer)) for buffer in shared]
    assert any(start <= back["values"].data_ptr() < start + size for start, size in places)
    whole, part = len(pickle.dumps(batch)), len(pickle.dumps(batch.shard(3, 8)))
    assert part < whole / 6


def test_split_is_a_view() -> None:
    batch = random_batch(2)
    whole = batch["tokens"].untyped_storage().data_ptr()
    assert all(part["tokens"].untyped_storage().data_ptr() == whole for part in batch.split(3))


def test_batches_are_not_changed_in_place() -> None:
    batch = random_batch(3)
    before = pickle.dumps(batch)
    batch.set("reward", torch.zeros(len(batch)), "sample")
    batch.pop(["uid"])
    batch.union(Batch(batch.prompt_lengths, batch.response_lengths, {}, {"more": 1}))
    batch.padded("rollout_log_probs").fill_(9)
    batch.fields.clear()
    assert pickle.dumps(batch) == before


def test_select_pop_and_names() -> None:
    batch = random_batch(4)
    assert batch.select(["reward", "uid"]).names == ("reward", "uid")
    assert batch.pop("payload").names == tuple(name for name in batch.names if name != "payload")
    assert "reward" in batch and "reward" not in batch.pop(["reward"])
    assert "reward (sample)" in repr(batch)


def test_union() -> None:
    batch = random_batch(5)
    blank = batch.set("reward", torch.full((len(batch),), math.nan), "sample")
    rewards = batch.select(["uid"]).set("reward", torch.ones(len(batch)), "sample")
    assert blank.union(rewards)["reward"].tolist() == [1.0] * len(batch)
    assert rewards.union(blank)["reward"].tolist() == [1.0] * len(batch)
    assert_same(batch.union(batch, batch.select(["payload", "values"])), batch)
    assert_same(batch.select(batch.names[:3]).union(batch.select(batch.names[3:])), batch)
    zeros = rewards.set("reward", torch.zeros(len(batch)), "sample")
    with pytest.raises(ValueError, match="field 'reward' is in both batches with different values"):
        rewards.union(zeros)
    with pytest.raises(ValueError, match="meta 'step' differs"):
        batch.union(Batch(batch.prompt_lengths, batch.response_lengths, {}, {"step": -1}))
    with pytest.raises(ValueError, match="prompt_lengths differ"):
        batch.union(batch.take(range(len(batch) - 1)))


def lengths(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


@pytest.mark.parametrize(
    ("field", "message"),
    [
        (Field(torch.zeros(3), Level.SAMPLE), "field 'x': 3 values, but the batch has 2 samples"),
        (Field(torch.zeros(3), Level.RESPONSE), "field 'x': 3 values, but the batch has 5 response tokens"),
        (Field(torch.zeros(3), Level.SEQUENCE), "field 'x': 3 values, but the batch has 8 tokens"),
        (Field(torch.zeros(2, 4), Level.RESPONSE), "goes through unpad"),
        (Field(torch.zeros(()), Level.SAMPLE), "field 'x': a scalar"),
        (Field(np.array(["a"] * 5, dtype=object), Level.RESPONSE), "field 'x': objects are allowed at sample level"),
    ],
)
def test_a_field_that_does_not_fit_is_named(field: Field, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Batch(lengths(1, 2), lengths(4, 1), {"x": field})


def test_other_errors_name_what_is_wrong() -> None:
    batch = random_batch(6)
    cases: list[tuple[Any, type[Exception], str]] = [
        (lambda: batch["rewards"], KeyError, "no field 'rewards'; there are: tokens"),
        (lambda: batch.pop(["rewards"]), KeyError, "no field 'rewards'"),
        (lambda: batch.padded("reward"), ValueError, "field 'reward' has one value a sample"),
        (lambda: batch.padded("uid"), ValueError, "field 'uid' has one value a sample"),
        (lambda: batch.unpad(torch.zeros(len(batch), 1)), ValueError, "unpad: expected"),
        (lambda: batch.unpad(torch.zeros(len(batch) + 1, 99)), ValueError, "unpad: expected"),
        (lambda: batch.take([len(batch)]), IndexError, "outside 0"),
        (lambda: batch.take([-1]), IndexError, "outside 0"),
        (
            lambda: batch.take(torch.ones(len(batch), dtype=torch.bool)),
            ValueError,
            "expected a 1-D sequence of integers",
        ),
        (lambda: batch.split(0), ValueError, "into 0 parts"),
        (lambda: batch.shard(2, 2), ValueError, "rank 2 is not in 0..1"),
        (lambda: batch.repeat_interleave(-1), ValueError, "k is -1"),
        (lambda: Batch.concat([]), ValueError, "no batches"),
        (lambda: Batch.concat([batch, batch.pop(["uid"])]), ValueError, "field 'uid' is in one batch"),
        (
            lambda: Batch.concat([batch, batch.set("values", batch["values"].float(), "response")]),
            ValueError,
            "field 'values' differs in level, type or shape",
        ),
        (lambda: Batch(lengths(1), lengths(1, 2)), ValueError, "1 samples, response_lengths 2"),
        (lambda: Batch(lengths(-1), lengths(1)), ValueError, "prompt_lengths: a length is negative"),
        (lambda: Batch(torch.ones(2), lengths(1, 2)), ValueError, "prompt_lengths: expected a 1-D int64"),
    ]
    for action, error, message in cases:
        with pytest.raises(error, match=message):
            action()


def test_a_sample_that_does_not_fit_is_named() -> None:
    sample = random_samples(7)[0]
    sample.loss_mask = [1] * (len(sample.response_ids) + 1)
    with pytest.raises(ValueError, match="sample 'train-0': loss_mask has"):
        Batch.from_samples([sample])


def test_an_empty_batch() -> None:
    empty = Batch.from_samples([])
    assert empty.to_samples() == [] and len(empty) == 0
    assert empty.padded("tokens").shape == empty.response_mask.shape == (0, 1)
    assert empty.unpad(torch.zeros(0, 1)).shape == (0,)
    assert empty.cu_seqlens.tolist() == [0]
    batch = Batch.from_samples(random_samples(8))
    assert Batch.concat([empty, batch, empty]).to_samples() == batch.to_samples()


def test_moving_keeps_everything() -> None:
    batch = random_batch(9)
    assert_same(batch.to("cpu"), batch)
    assert_same(batch.to(torch.device("cpu")).take([1, 0]), batch.take([1, 0]))
