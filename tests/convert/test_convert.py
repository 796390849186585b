"""Conversion in both directions on disk: every bit, every companion, any size of files, any dtype."""

from __future__ import annotations

import io
import json
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megarl import cli, models
from megarl.bridge import raw_io
from megarl.bridge.dist_keys import extra_states, found, written
from megarl.bridge.hf_io import HFReader
from megarl.bridge.layout import Cut
from megarl.bridge.model_map import ModelMap
from megarl.bridge.quantised import method
from megarl.bridge.torch_dist import DistReader
from megarl.bridge.torch_dist_write import ChunkFile, write_common, write_metadata
from megarl.convert.hf_to_megatron import hf_to_megatron
from megarl.convert.logits import compare_logits
from megarl.convert.megatron_to_hf import megatron_to_hf
from megarl.convert.progress import ByteProgress
from megarl.convert.source import open_source
from megarl.convert.verify import verify
from megarl.convert.work import Options
from megarl.errors import UserError
from megarl.models.heads import make_tiny_reward, make_tiny_trl
from megarl.models.tiny import make_tiny, tiny_config
from tests.bridge.cases import CONFIGS
from tests.bridge.full_size import MTP_NAMES
from tests.bridge.test_hf_io import bits, random_bits
from tests.bridge.test_quantised import by_transformers, deepseek, gpt_oss

ROOT = Path(__file__).parents[2]
ANYTHING = Options(allow_nonfinite=True)


def written_folder(
    config: dict[str, Any], folder: Path, dtype: torch.dtype = torch.bfloat16, names: Sequence[str] = ()
) -> Path:
    """Weights of any bits at all."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(random_bits(ModelMap.from_hf(config, names=names), dtype), folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("name", CONFIGS)
def test_every_bit_comes_back(name: str, tmp_path: Path) -> None:
    source = written_folder(CONFIGS[name], tmp_path / "hf")
    checkpoint = hf_to_megatron(source, tmp_path / "megatron", ANYTHING, show=False)
    back = megatron_to_hf(checkpoint, tmp_path / "back", ANYTHING, show=False)
    one, other = load_file(source / "model.safetensors"), load_file(back / "model.safetensors")
    assert one.keys() == other.keys()
    assert all(torch.equal(bits(one[key]), bits(other[key])) for key in one)
    assert verify(source, checkpoint, show=False).differences == []


def test_companions_travel_and_nothing_else(hf: Path, tmp_path: Path) -> None:
    source = shutil.copytree(hf, tmp_path / "source")
    (source / "chat_template.jinja").write_text("{{ messages }}")
    (source / "additional_chat_templates").mkdir()
    (source / "additional_chat_templates" / "tool.jinja").write_text("x")
    (source / "optimizer.pt").write_bytes(b"pickle")
    checkpoint = hf_to_megatron(source, tmp_path / "megatron", show=False)
    back = megatron_to_hf(checkpoint, tmp_path / "back", show=False)

    def files(folder: Path) -> dict[str, bytes]:
        return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}

    assert files(back) == {name: content for name, content in files(source).items() if name != "optimizer.pt"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["back", "megatron", "source"]  # no leftovers


@pytest.mark.parametrize("shard_bytes", [1, 300_000])
def test_files_have_the_size_that_is_asked_for(shard_bytes: int, hf: Path, tmp_path: Path) -> None:
    options = Options(shard_bytes=shard_bytes)
    checkpoint = hf_to_megatron(hf, tmp_path / "megatron", options, show=False)
    back = megatron_to_hf(checkpoint, tmp_path / "back", options, show=False)
    assert verify(hf, back, show=False).differences == []
    names = len(ModelMap.from_hf(hf).hf_shapes)
    assert len(list(back.glob("*.safetensors"))) == {1: names, 300_000: 4}[shard_bytes]
    assert len(list(checkpoint.glob("*.distcp"))) == {1: 35, 300_000: 6}[shard_bytes]
    assert all(p.stat().st_size < 310_000 for p in back.glob("*.safetensors"))


def test_more_files_than_a_process_may_have_open_are_no_matter(
    hf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each tensor in a file of its own, and fourteen more that may be open."""
    monkeypatch.setattr(raw_io, "MOST_OPEN", 3)
    options, limits = Options(shard_bytes=1), resource.getrlimit(resource.RLIMIT_NOFILE)
    checkpoint = hf_to_megatron(hf, tmp_path / "megatron", options, show=False)
    assert len(list(checkpoint.glob("*.distcp"))) > 16
    taken = set(map(int, os.listdir("/proc/self/fd")))
    free = [number for number in range(len(taken) + 14) if number not in taken]
    resource.setrlimit(resource.RLIMIT_NOFILE, (free[13] + 1, limits[1]))
    try:
        back = megatron_to_hf(checkpoint, tmp_path / "back", options, show=False)
        hf_to_megatron(back, tmp_path / "again", options, show=False)
        assert verify(back, tmp_path / "again", show=False).differences == []
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert verify(hf, back, show=False).differences == []


def test_a_dtype_is_changed_as_torch_changes_it(hf: Path, tmp_path: Path) -> None:
    source = shutil.copytree(hf, tmp_path / "source")
    said = json.loads((hf / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(said | {"dtype": "float32", "torch_dtype": "float32"}))
    checkpoint = hf_to_megatron(source, tmp_path / "megatron", Options(dtype=torch.bfloat16), show=False)
    back = megatron_to_hf(checkpoint, tmp_path / "back", Options(dtype=torch.float16), show=False)
    want = load_file(hf / "model.safetensors")
    half = load_file(back / "model.safetensors")
    assert all(torch.equal(half[name], want[name].bfloat16().half()) for name in want)
    for folder, name in ((checkpoint, "bfloat16"), (back, "float16")):
        written = json.loads((folder / "config.json").read_text())
        assert (written["dtype"], written["torch_dtype"]) == (name, name)
    result = verify(hf, checkpoint, show=False)
    assert result.differences == [f"all {len(want)} tensors are stored as float32 and as bfloat16"]


def test_a_dtype_that_cannot_hold_a_value_is_told(hf: Path, tmp_path: Path) -> None:
    source = shutil.copytree(hf, tmp_path / "source")
    weights = load_file(source / "model.safetensors")
    weights["model.norm.weight"][5] = 1e6
    save_file(weights, source / "model.safetensors")
    with pytest.raises(UserError, match=r"model.norm.weight, as float16, holds 1 elements that are NaN or infinite"):
        hf_to_megatron(source, tmp_path / "megatron", Options(dtype=torch.float16), show=False)


def test_what_stays_float32_does(tmp_path: Path) -> None:
    source = written_folder(tiny_config("deepseek"), tmp_path / "hf", torch.float32)
    options = Options(dtype=torch.bfloat16, allow_nonfinite=True)
    checkpoint = hf_to_megatron(source, tmp_path / "megatron", options, show=False)
    kept = {key for key, stored in DistReader(checkpoint).tensors.items() if stored.dtype == torch.float32}
    assert kept and all(key.endswith("router.expert_bias") for key in kept)


AHEAD = {
    "with copies": ("deepseek", {}),
    "tied, with copies": ("deepseek", {"tie_word_embeddings": True}),
    "without copies": ("glm4-moe", {}),
}


@pytest.mark.parametrize("what", AHEAD)
def test_layers_for_multi_token_prediction_travel(what: str, tmp_path: Path) -> None:
    family, more = AHEAD[what]
    names = MTP_NAMES if "with copies" in what else MTP_NAMES[:1]
    config = tiny_config(family, num_nextn_predict_layers=1, **more)
    source = written_folder(config, tmp_path / "hf", names=names)
    checkpoint = hf_to_megatron(source, tmp_path / "megatron", ANYTHING, show=False)
    keys = set(DistReader(checkpoint).tensors)
    assert "mtp.layers.0.transformer_layer.mlp.experts.experts.linear_fc1.weight" in keys
    assert ("mtp.layers.0.embed_tokens.weight" in keys) == (what != "without copies")
    back = megatron_to_hf(checkpoint, tmp_path / "back", ANYTHING, show=False)
    one, other = load_file(source / "model.safetensors"), load_file(back / "model.safetensors")
    assert one.keys() == other.keys()
    assert all(torch.equal(bits(one[key]), bits(other[key])) for key in one)
    assert json.loads((back / "config.json").read_text())["num_nextn_predict_layers"] == 1
    assert verify(source, checkpoint, show=False).differences == []


def test_layers_that_config_json_tells_of_and_nobody_has_are_noted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As transformers saves such a model, and as megarl's training does."""
    source = written_folder(tiny_config("deepseek", num_nextn_predict_layers=1), tmp_path / "hf")
    checkpoint = hf_to_megatron(source, tmp_path / "megatron", ANYTHING)
    said = f"{source} has none of the layers for multi-token prediction that its config.json tells of"
    assert f"note: {said}\n" in capsys.readouterr().err
    assert verify(source, checkpoint, show=False).notes[:2] == [
        said,
        f"{checkpoint}{said.removeprefix(str(source))}; --config with the folder that was trained brings them",
    ]
    back = megatron_to_hf(checkpoint, tmp_path / "back", ANYTHING, show=False)
    one, other = load_file(source / "model.safetensors"), load_file(back / "model.safetensors")
    assert one.keys() == other.keys()
    assert all(torch.equal(bits(one[key]), bits(other[key])) for key in one)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_layers_that_training_left_out_come_from_the_folder_that_was_trained(
    dtype: torch.dtype, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What an export of the training does: other weights of the model, the layers as they were, in the dtype of the rest."""
    config = tiny_config("deepseek", num_nextn_predict_layers=1)
    trained = written_folder(config, tmp_path / "trained", torch.bfloat16, names=MTP_NAMES)
    plain = written_folder(config, tmp_path / "plain", dtype)
    learned, before = (load_file(folder / "model.safetensors") for folder in (plain, trained))
    checkpoint = hf_to_megatron(plain, tmp_path / "megatron", ANYTHING, show=False)
    back = megatron_to_hf(checkpoint, tmp_path / "back", ANYTHING, config=trained)
    said = f"the layers for multi-token prediction are those of {trained}: {checkpoint} has none"
    assert f"note: {said}\n" in capsys.readouterr().err
    after = load_file(back / "model.safetensors")
    assert after.keys() == before.keys() > learned.keys()
    kept = ModelMap.from_hf(config, names=MTP_NAMES).float32
    for name, tensor in after.items():
        want = learned[name] if name in learned else before[name].to(torch.float32 if name in kept else dtype)
        assert torch.equal(bits(tensor), bits(want)), name
    result = verify(back, checkpoint, trained, show=False)
    assert (result.differences, result.notes[0], result.tensors) == ([], said, len(before))
    # Without it, and with a folder that has no weights, it is told what would help.
    (tmp_path / "texts").mkdir()
    shutil.copy(trained / "config.json", tmp_path / "texts")
    for folder in (None, tmp_path / "texts"):
        source = open_source(checkpoint, folder)
        assert source.notes[0].endswith("--config with the folder that was trained brings them")
        assert source.model.hf_shapes.keys() == learned.keys()


@pytest.mark.parametrize("make", [gpt_oss, deepseek])
def test_quantised_weights_become_bfloat16(make: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = make(tmp_path / "hf")
    checkpoint = hf_to_megatron(source, tmp_path / "megatron")
    said = f"the weights of {source} are quantised ({method(json.loads((source / 'config.json').read_text()))})"
    assert f"note: {said} and are taken as bfloat16\n" in capsys.readouterr().err
    back = megatron_to_hf(checkpoint, tmp_path / "back", show=False)
    want, got = by_transformers(source), load_file(back / "model.safetensors")
    assert want.keys() == got.keys()
    assert all(torch.equal(bits(want[name]), bits(got[name])) for name in want)
    written_config = json.loads((back / "config.json").read_text())
    assert "quantization_config" not in written_config
    assert written_config["dtype"] == "bfloat16"
    assert HFReader(back).check(ModelMap.from_hf(written_config, names=got)) is None
    for other in (checkpoint, back):
        result = verify(source, other, show=False)
        assert result.differences == []
        assert result.notes[0].startswith(said)
    got["model.norm.weight"][3] += 1.0
    save_file(got, back / "model.safetensors")
    assert verify(source, back, show=False).differences == ["model.norm.weight differs in 1 of 96 elements"]


@pytest.mark.slow
def test_transformers_reads_a_quantised_folder_as_we_do(tmp_path: Path) -> None:
    """Whole, with what it makes of names and of experts."""
    from transformers import AutoModelForCausalLM, Mxfp4Config

    source = gpt_oss(tmp_path / "hf")
    back = megatron_to_hf(hf_to_megatron(source, tmp_path / "megatron", show=False), tmp_path / "back", show=False)
    with pytest.raises(UserError, match="convert it to Megatron and back,"):
        compare_logits(open_source(source), open_source(back))
    load = partial(AutoModelForCausalLM.from_pretrained, dtype=torch.bfloat16)
    ours, theirs = load(back), load(source, quantization_config=Mxfp4Config(dequantize=True))
    state = theirs.state_dict()
    assert state.keys() == ours.state_dict().keys()
    assert all(torch.equal(tensor, state[name]) for name, tensor in ours.state_dict().items())


CONFIGURED = {
    "another base of positions": ({"rope_theta": 77.0}, ["config.json: rope_theta is 10000.0 and 77.0"]),
    "another epsilon": ({"rms_norm_eps": 1e-5}, ["config.json: rms_norm_eps is 1e-06 and 1e-05"]),
    "untied": (
        {"tie_word_embeddings": False},
        ["config.json: tie_word_embeddings is True and False", "{first} has no lm_head.weight"],
    ),
    "another end": ({"eos_token_id": 7}, []),
    "other words": ({"rope_theta": None, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}, []),
}


@pytest.mark.parametrize("what", CONFIGURED)
@pytest.mark.parametrize("kind", ["hf", "megatron"])
def test_a_config_json_that_says_otherwise_is_told(what: str, kind: str, hf: Path, tmp_path: Path) -> None:
    changes, differences = CONFIGURED[what]
    other = shutil.copytree(hf, tmp_path / "other")
    if what == "untied":
        weights = load_file(other / "model.safetensors")
        save_file(
            {**weights, "lm_head.weight": weights["model.embed_tokens.weight"].clone()}, other / "model.safetensors"
        )
    (other / "config.json").write_text(json.dumps(json.loads((hf / "config.json").read_text()) | changes))
    if kind == "megatron":
        other = hf_to_megatron(other, tmp_path / "checkpoint", show=False)
    result = verify(hf, other, show=False)
    assert result.differences == [words.format(first=hf) for words in differences]
    noted = f"config.json: {', '.join(sorted(changes))} differ, which changes nothing of what the model computes"
    assert result.notes == ([] if differences else [noted])


@pytest.mark.parametrize("make", [make_tiny_reward, make_tiny_trl])
def test_score_heads_travel(make: Any, tmp_path: Path) -> None:
    source = make("qwen3", tmp_path / "hf")
    checkpoint = hf_to_megatron(source, tmp_path / "megatron", show=False)
    back = megatron_to_hf(checkpoint, tmp_path / "back", show=False)
    assert verify(source, checkpoint, show=False).differences == []
    assert verify(source, back, show=False).differences == []
    kind = {make_tiny_reward: "Sequence", make_tiny_trl: "Token"}[make]
    assert json.loads((back / "config.json").read_text())["architectures"] == [f"Qwen3For{kind}Classification"]


NAMED = {"id2label": {"0": "bad", "1": "good"}, "label2id": {"bad": 0, "good": 1}}
LABELS: dict[str, tuple[int, dict[str, Any]]] = {  # scores, and what config.json says of them
    "names": (2, NAMED),
    "a number": (3, {"num_labels": 3}),
    "nothing, which is two": (2, {}),
    "names and a number": (2, {**NAMED, "num_labels": 2}),
    "what kind of problem": (2, {**NAMED, "problem_type": "single_label_classification"}),
}


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("what", LABELS)
def test_what_config_json_says_of_labels_comes_back(what: str, bias: bool, tmp_path: Path) -> None:
    labels, says = LABELS[what]
    source = make_tiny_reward("qwen2", tmp_path / "hf", labels=labels, bias=bias)
    config = json.loads((source / "config.json").read_text())
    config = {key: value for key, value in config.items() if key not in NAMED} | says
    (source / "config.json").write_text(json.dumps(config))
    back = megatron_to_hf(hf_to_megatron(source, tmp_path / "m", show=False), tmp_path / "back", show=False)
    assert json.loads((back / "config.json").read_text()) == config
    result = verify(source, back, show=False)
    assert (result.differences, result.notes) == ([], [])


def test_labels_that_do_not_fit_the_head_are_counted_anew(tmp_path: Path) -> None:
    from transformers import AutoModelForSequenceClassification

    source = make_tiny_reward("qwen2", tmp_path / "hf", labels=3)
    config = json.loads((source / "config.json").read_text()) | NAMED | {"num_labels": 2}
    (source / "config.json").write_text(json.dumps(config))
    back = megatron_to_hf(hf_to_megatron(source, tmp_path / "m", show=False), tmp_path / "back", show=False)
    found = json.loads((back / "config.json").read_text())
    assert found["num_labels"] == len(found["id2label"]) == len(found["label2id"]) == 3
    assert AutoModelForSequenceClassification.from_pretrained(back).score.out_features == 3


@pytest.mark.parametrize("name", ["qwen3", "qwen3-moe-mixed", "deepseek"])
@pytest.mark.parametrize("convention", ["by layer", "by expert", "halves", "local names", "prefixed axes"])
def test_whatever_keys_a_checkpoint_has_they_are_found(name: str, convention: str, tmp_path: Path) -> None:
    """As Megatron writes them for other settings of its own: the same weights under other keys."""
    from megarl.bridge import dist_keys

    model = ModelMap.from_hf(CONFIGS[name])
    weights = random_bits(model, torch.bfloat16)
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    choice = {
        "by layer": {"by_layer": True, "by_expert": False, "halves": False},
        "by expert": {"by_layer": True, "by_expert": True, "halves": False},
        "halves": {"by_layer": True, "by_expert": True, "halves": True},
        "local names": {"by_layer": True, "by_expert": False, "halves": False},
        "prefixed axes": {"by_layer": False, "by_expert": False, "halves": False},
    }[convention]
    with ChunkFile(folder / "__0_0.distcp") as file:
        for parameter in (p for p in model.parameters if p.exported):
            whole = torch.empty(parameter.local_shape(Cut()), dtype=torch.bfloat16)
            for copy in parameter.copies(Cut()):
                whole[copy.local] = weights[copy.hf_name][copy.hf]
            key = parameter.name if convention == "local names" else parameter.te_name
            halves = choice["halves"] and parameter.name.endswith("linear_fc1.weight")
            for slot in dist_keys._slots(model, parameter, key, **{**choice, "halves": halves}):
                # Cut into rectangles in both directions, as ranks would.
                rows = whole[slot.rows]
                cuts = [(0, 1), (1, len(rows))] if len(rows) > 1 else [(0, len(rows))]
                for start, stop in cuts:
                    part = rows[start:stop].contiguous()
                    offsets = (*slot.index, start, *(0 for _ in slot.shape[1:]))
                    file.write(slot.key, part.view(*(1 for _ in slot.index), *part.shape), offsets, slot.global_shape)
    write_metadata(folder, file.records)
    write_common(folder, {})
    (folder / "config.json").write_text(json.dumps(CONFIGS[name]))
    back = megatron_to_hf(folder, tmp_path / "back", ANYTHING, show=False)
    got = load_file(back / "model.safetensors")
    assert all(torch.equal(bits(got[key]), bits(weights[key])) for key in weights)


def test_a_checkpoint_has_what_megatron_looks_for(megatron: Path) -> None:
    reader = DistReader(megatron)
    model = ModelMap.from_hf(megatron)
    assert set(reader.objects) == set(extra_states(model))
    assert "decoder.layers.self_attention.linear_qkv._extra_state/shard_3_4" in reader.objects
    assert "decoder.final_layernorm._extra_state/shard_0_1" in reader.objects
    assert all(reader.read_object(key) == [None] for key in reader.objects)
    assert reader.read_common() == {"checkpoint_version": 3.0, "iteration": 0}
    assert all(found(model, p, reader.tensors) == [written(model, p)] for p in model.parameters if p.exported)


def test_regions_of_tensors_are_those_of_hugging_face(hf: Path, megatron: Path) -> None:
    from megarl.bridge.megatron_io import MegatronReader

    want, got = HFReader(hf), MegatronReader(DistReader(megatron), ModelMap.from_hf(hf))
    for name in want.names:
        shape = want.shape(name)
        region = tuple(slice(size // 3, size - size // 5) for size in shape)
        assert torch.equal(want.get_slice(name, region), got.get_slice(name, region)), name
        out = torch.zeros([s.stop - s.start for s in region], dtype=torch.bfloat16).t() if len(shape) == 2 else None
        if out is not None:  # other strides, another dtype
            got.read(name, region, out.t())
            assert torch.equal(out.t(), want.get_slice(name, region).bfloat16())


def test_the_commands_say_what_they_did(hf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    megatron, back = tmp_path / "megatron", tmp_path / "back"

    def run(*args: object) -> tuple[int, str]:
        code = cli.main(["convert", *map(str, args)])
        return code, capsys.readouterr().out

    assert run("hf-to-megatron", hf, megatron, "--quiet") == (0, f"{megatron}\n")
    assert run("megatron-to-hf", megatron, back, "--shard-gb", "0.0003", "--sync") == (0, f"{back}\n")
    code, said = run("verify", hf, megatron)
    assert (code, said) == (0, "equal: 46 tensors, 0.001 GB, every byte\n")
    code, said = run("inspect", megatron, "--tensors")
    assert code == 0
    assert "qwen3, 4 layers, hidden size 80" in said
    assert "decoder.layers.mlp.linear_fc1.weight  (4, 224, 80)" in said
    assert "optimizer   none" in said
    weights = load_file(hf / "model.safetensors")
    weights["model.norm.weight"][7] = float("nan")
    other = shutil.copytree(hf, tmp_path / "other")
    save_file(weights, other / "model.safetensors")
    code, said = run("verify", other, back)
    assert code == 1
    assert said.splitlines() == [
        "note: model.norm.weight holds 1 elements that are NaN or infinite, in " + str(other),
        "differs: model.norm.weight differs in 1 of 80 elements",
        f"1 difference between {other} and {back}",
    ]


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3", "deepseek"])
def test_logits_are_compared_on_request(family: str, tmp_path: Path) -> None:
    """In a process of its own: Megatron is not imported into the one of the tests."""
    source, megatron, other = make_tiny(family, tmp_path / "hf"), tmp_path / "megatron", tmp_path / "other"
    hf_to_megatron(source, megatron, show=False)
    weights = load_file(source / "model.safetensors")
    weights["model.layers.1.input_layernorm.weight"].mul_(1.01)
    shutil.copytree(source, other)
    save_file(weights, other / "model.safetensors")
    script = (
        "import sys\nfrom megarl.convert.logits import compare_logits\nfrom megarl.convert.source import *\n"
        "a, b, c = (open_source(Path(path)) for path in sys.argv[1:])\n"
        "print(compare_logits(a, b)[0] < 1e-5, compare_logits(c, b)[0] > 1e-4)"
    )
    command = [sys.executable, "-c", script, source, megatron, other]
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True, timeout=120)
    assert done.stdout.split()[-2:] == ["True", "True"]


def test_progress_tells_rate_and_time_left() -> None:
    out = io.StringIO()
    progress = ByteProgress("writing", 4_000_000_000, out=out)
    progress._begin -= 2.0
    progress._last -= 60.0
    progress.add(1_000_000_000)
    assert out.getvalue() == "writing: 1.00 of 4.00 GB, 0.50 GB/s, 0:06 left\n"
    progress.add(1_000_000_000)
    assert out.getvalue().count("\n") == 1  # not more often than one can read


@pytest.mark.slow
def test_several_processes_make_the_same(hf: Path, tmp_path: Path) -> None:
    for tool, source, target in (
        ("hf_to_megatron", hf, tmp_path / "megatron"),
        ("megatron_to_hf", tmp_path / "megatron", tmp_path / "back"),
    ):
        subprocess.run(
            [
                *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
                *(f"tools/convert_ckpt/{tool}.py", source, target, "--shard-gb", "0.0001"),
            ],
            cwd=ROOT,
            check=True,
            timeout=120,
        )
    assert verify(hf, tmp_path / "megatron", show=False).differences == []
    assert verify(hf, tmp_path / "back", show=False).differences == []


@pytest.mark.slow
def test_smollm2_says_the_same_after_both_ways(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = models.resolve("smollm2")
    megatron, back = tmp_path / "megatron", tmp_path / "back"
    hf_to_megatron(source, megatron, show=False)
    megatron_to_hf(megatron, back, show=False)
    assert (back / "model.safetensors").stat().st_size == (source / "model.safetensors").stat().st_size
    assert verify(source, back, show=False).differences == []
    texts = []
    for folder in (source, back):
        tokenizer = AutoTokenizer.from_pretrained(folder)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        chat = [{"role": "user", "content": "What is the capital of France?"}]
        ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        answer = model.generate(**ids, max_new_tokens=16, do_sample=False)
        texts.append(tokenizer.decode(answer[0]))
    assert "Paris" in texts[0]
    assert texts[0] == texts[1]
