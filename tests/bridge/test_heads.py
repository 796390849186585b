"""Checkpoints with a score head: which head is found, what is read under which name, and back to transformers, bit by bit."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from megarl.bridge.head_io import HeadReader, critic_head, open_checkpoint, reward_head, save_head_hf, stored_head
from megarl.bridge.heads import BIAS, WEIGHT, Head
from megarl.bridge.hf_io import HFReader, export_tensors, load_parameter
from megarl.bridge.layout import Cut
from megarl.bridge.model_map import ModelMap
from megarl.errors import UserError
from megarl.models.heads import make_tiny_reward, make_tiny_trl
from megarl.models.tiny import make_tiny, tiny_config

FAMILIES = ("llama", "qwen2", "qwen3")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("heads")


def exported(folder: Path, head: Head, size: int) -> dict[str, torch.Tensor]:
    """Loaded into the ranks of a tensor parallelism and out of them again."""
    model, reader = ModelMap.from_hf(folder, head), open_checkpoint(folder, head)
    reader.check(model)
    sizes = Cut(tensor_size=size)
    ranks: dict[tuple[str, int], torch.Tensor] = {}

    def fetch(parameter, where):
        key = parameter.name, where.tensor
        if key not in ranks:
            ranks[key] = torch.full(parameter.local_shape(where), torch.nan)
            load_parameter(reader, parameter, where, ranks[key])
        return ranks[key]

    return dict(export_tensors(model, fetch, sizes))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("labels", "bias"), [(1, False), (3, False), (1, True)])
def test_a_classifier_goes_through_any_layout_and_back(folders: Path, family: str, labels: int, bias: bool) -> None:
    import transformers

    kind = transformers.AutoModelForTokenClassification if bias else transformers.AutoModelForSequenceClassification
    folder = make_tiny_reward(family, folders / f"{family}-{labels}-{bias}", labels=labels, bias=bias)
    model = kind.from_pretrained(folder, dtype=torch.float32)
    assert model.config.num_labels == labels
    wanted = dict(model.state_dict())
    head = stored_head(folder)
    assert head == Head(labels=labels, bias=bias)
    for size in (1, 2):
        got = exported(folder, head, size)
        assert got.keys() == wanted.keys() and all(torch.equal(got[name], wanted[name]) for name in wanted)
    again = save_head_hf(folders / f"{family}-{labels}-{bias}-again", got.items(), folder, head, dtype=torch.float32)
    state = kind.from_pretrained(again, dtype=torch.float32).state_dict()
    assert all(torch.equal(state[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize("prefix", ["", "pretrained_model."])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_value_head_of_trl_is_read_and_written_as_a_token_classifier(folders: Path, family: str, prefix: str) -> None:
    import transformers

    folder = make_tiny_trl(family, folders / f"{family}-trl-{len(prefix)}", prefix=prefix)
    head = critic_head(folder)
    assert head == Head(labels=1, bias=True)
    got = exported(folder, head, 2)
    stored = HFReader(folder)
    for name, tensor in got.items():
        theirs = {WEIGHT: "v_head.summary.weight", BIAS: "v_head.summary.bias"}.get(name, prefix + name)
        assert torch.equal(tensor, stored.get(theirs)), name
    assert "lm_head.weight" not in got
    again = save_head_hf(folders / f"{folder.name}-again", got.items(), folder, head, dtype=torch.float32)
    model = transformers.AutoModelForTokenClassification.from_pretrained(again, dtype=torch.float32)
    assert torch.equal(model.score.bias, stored.get("v_head.summary.bias"))
    assert torch.equal(model.score.weight, stored.get("v_head.summary.weight"))


def test_a_critic_takes_a_single_score_and_else_makes_one(folders: Path) -> None:
    policy = make_tiny("qwen3", folders / "policy")
    one = make_tiny_reward("qwen3", folders / "one")
    many = make_tiny_reward("qwen3", folders / "many", labels=4)
    assert critic_head(one) == Head(labels=1)
    for folder in (policy, many):
        head = critic_head(folder, std=0.5, seed=3)
        assert head == Head(labels=1, fresh=True, std=0.5, seed=3)
        reader = HeadReader(folder, head)
        reader.check(ModelMap.from_hf(folder, head))
        drawn = reader.get(WEIGHT)
        assert drawn.shape == (1, 80) and 0.3 < float(drawn.std()) < 0.7
        assert torch.equal(drawn, HeadReader(folder, head).get(WEIGHT))  # every rank draws the same
        assert not torch.equal(drawn, HeadReader(folder, replace(head, seed=4)).get(WEIGHT))
        assert torch.equal(reader.get_slice(WEIGHT, (slice(0, 1), slice(5, 9))), drawn[:, 5:9])
    assert not HeadReader(policy, critic_head(policy)).get(WEIGHT).any()  # by default all values begin at 0


def test_what_holds_no_head_is_no_reward_model(folders: Path) -> None:
    folder = make_tiny("llama", folders / "no-head")
    with pytest.raises(UserError, match=r"holds no score head \(score.weight\)"):
        reward_head(folder)


THREE = {"0": "a", "1": "b", "2": "c"}


@pytest.mark.parametrize(
    ("labels", "says", "changes"),
    [
        (3, {"id2label": THREE}, {}),
        (3, {"id2label": THREE, "num_labels": 2}, {"num_labels": 3}),  # the names fit
        (3, {"id2label": THREE, "label2id": {"x": 7}}, {"label2id": {"a": 0, "b": 1, "c": 2}}),
        (1, {"num_labels": True}, {"num_labels": 1}),
        (3, {"id2label": {"x": "a", "y": "b", "z": "c"}}, None),
        (3, {"id2label": {"0": "a", "00": "b", "1": "c"}}, None),
        (3, {"id2label": {"0": "a", "1": None, "2": "c"}}, None),
        (3, {"id2label": ["a", "b", "c"]}, None),
        (3, {"num_labels": "3"}, None),
    ],
)
def test_what_is_said_of_labels_fits_the_head(
    labels: int, says: dict[str, Any], changes: dict[str, Any] | None
) -> None:
    config = {**tiny_config("qwen3"), "architectures": ["Qwen3ForSequenceClassification"], **says}
    found = Head(labels=labels).exported(config)
    assert found.pop("architectures") == ["Qwen3ForSequenceClassification"]
    if changes is None:  # none of it can stay
        changes = {key: labels for key in says if key == "num_labels"}
        changes |= {"id2label": {str(n): f"LABEL_{n}" for n in range(labels)}}
        changes |= {"label2id": {f"LABEL_{n}": n for n in range(labels)}}
    assert found == changes and all(type(found[key]) is type(changes[key]) for key in found)


@pytest.mark.parametrize("name", ["score.weight", "v_head.summary.weight"])
@pytest.mark.parametrize("shape", [(), (80,), (0, 80), (2, 3, 80)])
def test_a_head_of_no_scores_is_refused(tmp_path: Path, name: str, shape: tuple[int, ...]) -> None:
    save_file({name: torch.zeros(shape)}, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=rf"has a score head \({name}\) of shape .* must be \(labels, hidden size\)"):
        stored_head(tmp_path)


def test_a_classifier_is_no_policy(folders: Path) -> None:
    folder = make_tiny_reward("llama", folders / "classifier")
    with pytest.raises(UserError, match="LlamaForSequenceClassification"):
        ModelMap.from_hf(folder)


def test_a_body_that_lacks_a_tensor_is_refused_by_name(folders: Path) -> None:
    folder = make_tiny_reward("llama", folders / "short")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 5}))
    with pytest.raises(UserError, match=r"lacks model.layers.4"):
        HeadReader(folder, Head()).check(ModelMap.from_hf(folder, Head()))


@pytest.mark.parametrize("family", ["qwen3-moe", "deepseek"])
def test_experts_stand_under_a_head_too(folders: Path, family: str) -> None:
    folder = make_tiny_reward(family, folders / family, labels=2)
    head, stored = stored_head(folder), HFReader(folder)
    got = exported(folder, head, 2)
    assert set(got) == set(stored.names)
    assert all(torch.equal(tensor, stored.get(name)) for name, tensor in got.items())
