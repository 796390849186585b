"""What the ranks of an engine report together, and which part of a checkpoint's tensor a padded parameter is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from megarl.errors import RunError
from megarl.reshard.bucket import BucketSpec
from megarl.reshard.fingerprint import fingerprint, partial
from megarl.rollout import loader
from megarl.rollout.exposing import Memory
from megarl.rollout.loader import read_reports
from megarl.rollout.shards import Shard


def reports(folder: Path, *parts: list[tuple[str, list[int], int]]) -> Path:
    for rank, found in enumerate(parts):
        report = {"parts": found, "expected": [name for name, _, _ in found], "seconds": {"load": rank, "prove": 0}}
        (folder / f"request.report-{rank}").write_text(json.dumps(report))
    return folder / "request.json"


def test_parts_add_up_and_copies_count_once(tmp_path: Path) -> None:
    whole, norm = torch.randn(6, 5), torch.randn(7)
    parts = [("cut", [3 * rank, 0], partial(whole[3 * rank : 3 * rank + 3], (3 * rank, 0))) for rank in (0, 1)]
    alike = ("norm", [0], fingerprint(norm))
    found = read_reports(reports(tmp_path, [parts[0], alike], [parts[1], alike]), 2)
    assert found["fingerprints"] == {"cut": fingerprint(whole), "norm": fingerprint(norm)}
    assert found["expected"] == {"cut", "norm"} and found["seconds"]["load"] == 1


def test_copies_that_differ_are_named(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="norm in the engine's rank 1 differs from another rank's copy of it"):
        read_reports(reports(tmp_path, [("norm", [0], 5)], [("norm", [0], 6)]), 2)


def test_a_rank_that_reports_nothing_or_an_error_is_told(tmp_path: Path) -> None:
    request = reports(tmp_path, [("norm", [0], 5)])
    with pytest.raises(RunError, match="no report came back"):
        read_reports(request, 2)
    (tmp_path / "request.report-1").write_text(json.dumps({"error": "it does not fit"}))
    with pytest.raises(RunError, match="it does not fit"):
        read_reports(request, 2)


def test_padding_is_no_part_of_the_checkpoint() -> None:
    """A tensor of 6 rows over two ranks that have 4 each, and a third that has nothing of it."""
    whole = torch.randn(6, 3)
    padded = torch.cat([whole, torch.zeros(6, 3)])
    shards = [Shard(padded[4 * rank : 4 * rank + 4], 0, 4 * rank).real("w", (6, 3)) for rank in range(3)]
    assert [len(shard.view) for shard in shards] == [4, 2, 0]
    assert sum(partial(s.view, s.origin) for s in shards) % 2**64 == fingerprint(whole)
    with pytest.raises(RunError, match="weights where it should have zeros"):
        Shard(torch.ones(4, 3), 0, 4).real("w", (6, 3))
    with pytest.raises(RunError, match=r"w came as \(6, 5\), the engine's model has it as \(4, 3\)"):
        Shard(padded[:4], 0, 0).real("w", (6, 5))


def test_weights_that_moved_after_they_were_exposed_are_refused():
    model = torch.nn.Linear(5, 3)
    before = model.weight.detach().clone()
    memory = Memory(model)
    exposure = memory.expose(model, [("weight", (3, 5)), ("bias", (3,))])
    assert torch.equal(model.weight, before)
    exposure.views()["weight"][1, 2] = 7
    assert model.weight[1, 2] == 7
    memory.check()
    model.bias.data = model.bias.data.clone()
    with pytest.raises(RunError, match="the engine's model has moved its weights"):
        memory.check()


def test_places_are_found_anew_where_a_model_has_moved_its_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is known of the last update serves the next one, unless it is of other weights or other buckets."""
    monkeypatch.setattr(loader, "_known", None)
    model = torch.nn.Linear(5, 3)
    tensors = [("weight", torch.float32, (3, 5)), ("bias", torch.float32, (3,))]
    buckets = [BucketSpec.plan("", tensors)]
    first = loader._places(model, buckets)
    assert loader._places(model, [BucketSpec.plan("", tensors)]) is first
    model.weight.data = model.weight.data.clone()
    moved = loader._places(model, buckets)
    assert moved.parts["weight"].view.data_ptr() == model.weight.data_ptr() != first.parts["weight"].view.data_ptr()
    with pytest.raises(RunError, match="bias came as"):
        loader._places(model, [BucketSpec.plan("", [("weight", torch.float32, (3, 5)), ("bias", torch.float32, (4,))])])
