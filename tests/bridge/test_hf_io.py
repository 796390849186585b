"""Checkpoints through the disk: bit-exact through every layout, and one sentence for each way a folder can be broken."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from megarl.bridge.folders import clear_unfinished, new_folder
from megarl.bridge.hf_io import INDEX, HFReader, HFWriter, copy_companions, export_tensors, load_parameter, save_hf
from megarl.bridge.layout import Cut
from megarl.bridge.model_map import ModelMap, Parameter
from megarl.errors import RunError, UserError
from megarl.models.tiny import RECIPES, make_tiny
from tests.bridge.cases import CONFIGS, LAYOUTS, one_by_one, ranks


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("qwen3", tmp_path_factory.mktemp("hf_io") / "qwen3")


@pytest.fixture
def copy(tiny: Path, tmp_path: Path) -> Path:
    return shutil.copytree(tiny, tmp_path / "copy")


def random_bits(model: ModelMap, dtype: torch.dtype) -> dict[str, Tensor]:
    """Every bit pattern a dtype has, NaNs with payloads and signed zeros included."""
    generator = torch.Generator().manual_seed(5)
    integer = {2: torch.int16, 4: torch.int32}[dtype.itemsize]
    low, high = torch.iinfo(integer).min, torch.iinfo(integer).max
    return {
        name: torch.randint(low, high, shape, generator=generator, dtype=integer).view(dtype)
        for name, shape in model.hf_shapes.items()
    }


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)


@pytest.mark.parametrize(("name", "sizes"), LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_hf_to_megatron_to_hf_is_bit_exact(name: str, sizes: Cut, dtype: torch.dtype, tmp_path: Path) -> None:
    model = ModelMap.from_hf(CONFIGS[name])
    checkpoint = random_bits(model, dtype)
    save_file(checkpoint, tmp_path / "model.safetensors")
    reader = HFReader(tmp_path)
    reader.check(model)
    held: dict[tuple[str, Cut], Tensor] = {}
    for parameter in model.parameters:
        for where in ranks(sizes):
            if parameter.held(where):
                out = torch.full(parameter.local_shape(where), 7.0, dtype=dtype)
                load_parameter(reader, parameter, where, out)
                held[parameter.name, where] = out
    exported = list(export_tensors(model, lambda parameter, where: held[parameter.name, where], sizes))
    assert [name for name, _ in exported] == list(model.hf_shapes)
    for hf_name, tensor in exported:
        assert tensor.dtype == dtype
        assert torch.equal(bits(tensor), bits(checkpoint[hf_name])), hf_name


def test_padding_of_the_vocabulary_is_zero_and_never_leaves(tiny: Path) -> None:
    model, reader = ModelMap.from_hf(tiny), HFReader(tiny)
    parameter = model.parameter("embedding.word_embeddings.weight")
    second = Cut(tensor=1, tensor_size=2)
    out = torch.full(parameter.local_shape(second), float("nan"))
    load_parameter(reader, parameter, second, out)
    assert torch.equal(out[-1], torch.zeros(80))
    assert torch.equal(out[:-1], reader.get("model.embed_tokens.weight")[210:])


def test_loading_casts_to_the_parameters_dtype_and_wants_its_shape(tiny: Path) -> None:
    model, reader = ModelMap.from_hf(tiny), HFReader(tiny)
    parameter = model.parameter("decoder.layers.1.mlp.linear_fc2.weight")
    second = Cut(tensor=1, tensor_size=2)
    out = torch.empty(parameter.local_shape(second), dtype=torch.bfloat16)
    load_parameter(reader, parameter, second, out)
    assert torch.equal(out, reader.get("model.layers.1.mlp.down_proj.weight")[:, 56:].bfloat16())
    with pytest.raises(ValueError, match="shape"):
        load_parameter(reader, parameter, Cut(), out)


def exported(source: Path, target: Path, dtype: torch.dtype = torch.float32, **options: object) -> Path:
    model, reader = ModelMap.from_hf(source), HFReader(source)
    tensors = ((name, reader.get(name)) for name in model.hf_shapes)
    return save_hf(target, tensors, source, shapes=model.hf_shapes, dtype=dtype, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("family", RECIPES)
def test_transformers_loads_an_export(family: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = make_tiny(family, tmp_path / "source")
    target = exported(source, tmp_path / "target", shard_bytes=300_000)
    assert len(list(target.glob("*.safetensors"))) > 2
    model, report = AutoModelForCausalLM.from_pretrained(target, output_loading_info=True)
    assert not any(report.values())
    original = load_file(source / "model.safetensors")
    loaded = one_by_one(model.state_dict(), model.config.model_type)
    assert all(torch.equal(loaded[name], tensor) for name, tensor in original.items())
    tokenizer = AutoTokenizer.from_pretrained(target)
    assert tokenizer.chat_template
    assert tokenizer.eos_token == "<|im_end|>"


def test_one_file_needs_no_index_and_the_dtype_is_recorded(tiny: Path, tmp_path: Path) -> None:
    target = exported(tiny, tmp_path / "target", torch.bfloat16)
    assert sorted(path.name for path in target.iterdir()) == sorted(path.name for path in tiny.iterdir())
    assert json.loads((target / "config.json").read_text())["dtype"] == "bfloat16"
    with safe_open(target / "model.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}
        assert file.get_tensor("model.norm.weight").dtype == torch.bfloat16
    assert HFReader(target).dtype("model.norm.weight") == torch.bfloat16


@pytest.mark.parametrize("keys", [("dtype",), ("torch_dtype",), ("torch_dtype", "dtype")])
def test_each_name_of_the_dtype_that_a_config_has_is_brought_up_to_date(keys: tuple[str, ...], tmp_path: Path) -> None:
    for name in ("source", "copy"):
        (tmp_path / name).mkdir()
    (tmp_path / "source/config.json").write_text(json.dumps({"hidden_size": 80, **dict.fromkeys(keys, "float32")}))
    copy_companions(tmp_path / "source", tmp_path / "copy", torch.bfloat16, {})
    written = json.loads((tmp_path / "copy/config.json").read_text())
    assert written == {"hidden_size": 80, **dict.fromkeys(keys, "bfloat16")}


def test_shards_stay_under_their_size_and_read_back_alike(tiny: Path, tmp_path: Path) -> None:
    limit = 150_000
    target = exported(tiny, tmp_path / "target", shard_bytes=limit)
    index = json.loads((target / INDEX).read_text())
    assert index["metadata"]["total_size"] == sum(
        tensor.nbytes for tensor in load_file(tiny / "model.safetensors").values()
    )
    for path in target.glob("*.safetensors"):
        tensors = load_file(path)
        assert sum(tensor.nbytes for tensor in tensors.values()) <= limit or len(tensors) == 1
    one, many = HFReader(tiny), HFReader(target)
    assert set(one.names) == set(many.names)
    assert all(torch.equal(one.get(name), many.get(name)) for name in one.names)


def test_a_folder_that_exists_is_refused_or_replaced_as_told(tiny: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.mkdir()
    exported(tiny, target)  # an empty folder is nobody's
    (target / "mine.txt").write_text("mine")
    with pytest.raises(UserError, match="exists already"):
        exported(tiny, target)
    assert (target / "mine.txt").exists()
    exported(tiny, target, overwrite=True)
    assert not (target / "mine.txt").exists()
    assert HFReader(target).names


def test_an_export_that_fails_leaves_nothing(tiny: Path, tmp_path: Path) -> None:
    model, reader = ModelMap.from_hf(tiny), HFReader(tiny)

    def dies():  # type: ignore[no-untyped-def]
        yield "model.norm.weight", reader.get("model.norm.weight")
        raise RuntimeError("a rank died")

    with pytest.raises(RuntimeError, match="a rank died"):
        save_hf(tmp_path / "target", dies(), tiny, shapes=model.hf_shapes, dtype=torch.float32)
    with pytest.raises(ValueError, match="never came"):
        save_hf(tmp_path / "target", [], tiny, shapes=model.hf_shapes, dtype=torch.float32)
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_takes_no_more_is_one_sentence(tiny: Path, tmp_path: Path) -> None:
    # A limit on the size of files is the kernel's own refusal, as a full disk is.
    limits, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        with pytest.raises(RunError, match=r"could not be written to .*target: File too large"):
            exported(tiny, tmp_path / "target")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert list(tmp_path.iterdir()) == []


def test_tensors_may_come_in_any_order_but_each_once(tmp_path: Path) -> None:
    shapes = {"a": (3, 5), "b": (7,), "c": (2, 2)}
    tensors = {name: torch.randn(shape) for name, shape in shapes.items()}
    with HFWriter(tmp_path, shapes, torch.float32, shard_bytes=60) as writer:
        for name in ("c", "a", "b"):
            writer.write(name, tensors[name])
        with pytest.raises(ValueError, match="before"):
            writer.write("a", tensors["a"])
        with pytest.raises(ValueError, match="not to be written"):
            writer.write("d", tensors["a"])
    reader = HFReader(tmp_path)
    assert all(torch.equal(reader.get(name), tensor) for name, tensor in tensors.items())
    with pytest.raises(ValueError, match="shape"), HFWriter(tmp_path, shapes, torch.float32) as writer:
        writer.write("a", tensors["b"])
    with pytest.raises(UserError, match="float64"):
        HFWriter(tmp_path, shapes, torch.float64)


def fails(folder: Path, words: str, check: bool = False) -> None:
    with pytest.raises(UserError, match=words) as caught:
        reader = HFReader(folder)
        if check:
            reader.check(ModelMap.from_hf(folder))
    assert "\n" not in str(caught.value)


def test_every_broken_folder_is_one_sentence(copy: Path) -> None:
    weights = copy / "model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:-100])
    fails(copy, "damaged or cut short")
    weights.write_bytes(content[:5])
    fails(copy, "damaged or cut short")
    weights.rename(copy / "model-00001-of-00002.safetensors")
    (copy / "model-00001-of-00002.safetensors").write_bytes(content)
    fails(copy, "1 of the 2 shards")
    (copy / "model-00001-of-00002.safetensors").unlink()
    fails(copy, "holds no safetensors")
    (copy / "pytorch_model.bin").write_bytes(b"pickle")
    fails(copy, "pickle, which can run code")
    fails(copy / "nowhere", "no model folder")


def test_a_checkpoint_that_does_not_fit_its_config_is_refused(copy: Path) -> None:
    tensors = load_file(copy / "model.safetensors")

    def with_(**changes: Tensor | None) -> None:
        changed = {**tensors, **{name.replace("__", "."): tensor for name, tensor in changes.items()}}
        save_file({name: tensor for name, tensor in changed.items() if tensor is not None}, copy / "model.safetensors")

    with_(model__norm__weight=None)
    fails(copy, "lacks model.norm.weight", check=True)
    with_(model__surprise=torch.zeros(3))
    fails(copy, "model.surprise, which no rule of qwen3 knows", check=True)
    with_(model__norm__weight=torch.zeros(81))
    fails(copy, r"model.norm.weight has shape \(81,\), not \(80,\)", check=True)
    with_(model__norm__weight=torch.zeros(80, dtype=torch.float64))
    fails(copy, "stored as F64", check=True)
    with_(lm_head__weight=torch.zeros(419, 80))
    fails(copy, "lm_head.weight differs from model.embed_tokens.weight", check=True)
    with_(lm_head__weight=torch.zeros(419, 80).to(torch.float8_e4m3fn))
    fails(copy, "lm_head.weight is stored as F8_E4M3", check=True)
    with_(lm_head__weight=torch.tensor(1.0))
    fails(copy, "lm_head.weight differs from model.embed_tokens.weight", check=True)
    # What adds nothing: the output layer of a tied model as it is tied, rotary frequencies of old checkpoints.
    embeddings = tensors["model.embed_tokens.weight"].clone()
    with_(lm_head__weight=embeddings, model__layers__0__self_attn__rotary_emb__inv_freq=torch.zeros(12))
    HFReader(copy).check(ModelMap.from_hf(copy))
    embeddings[3, 3] = torch.nan  # unequal to itself, of the same bits
    with_(lm_head__weight=embeddings.clone(), model__embed_tokens__weight=embeddings)
    HFReader(copy).check(ModelMap.from_hf(copy))


def test_a_name_that_only_looks_like_one_of_many_shards_is_none(copy: Path) -> None:
    (copy / "model.safetensors").rename(copy / "a-of-²2.safetensors")
    HFReader(copy).check(ModelMap.from_hf(copy))


def test_an_index_and_its_shards_must_agree(tiny: Path, tmp_path: Path) -> None:
    target = exported(tiny, tmp_path / "target", shard_bytes=300_000)
    index = json.loads((target / INDEX).read_text())
    moved = {**index["weight_map"], "model.norm.weight": "model-00001-of-00004.safetensors"}
    (target / INDEX).write_text(json.dumps({**index, "weight_map": moved}))
    fails(target, "disagree about model.norm.weight")
    for content, words in (
        ("{}", "cannot be read"),
        ('{"weight_map": [1]}', "weight_map"),
        ('{"weight_map": {"a": 5}}', "weight_map"),
    ):
        (target / INDEX).write_text(content)
        fails(target, words)
    (target / INDEX).write_text(json.dumps(index))
    (target / "model-00002-of-00004.safetensors").unlink()
    fails(target, "model-00002-of-00004.safetensors is missing")


def test_a_tensor_in_two_files_is_refused(copy: Path) -> None:
    save_file({"model.norm.weight": torch.zeros(80)}, copy / "extra.safetensors")
    fails(copy, "model.norm.weight is in extra.safetensors and in model.safetensors")


def test_an_unreadable_config_is_one_sentence(copy: Path) -> None:
    unreadable = (("{", "cannot be read"), ("[]", "not an object"), ('{"architectures": 5}', "must be a list of names"))
    for content, words in unreadable:
        (copy / "config.json").write_text(content)
        with pytest.raises(UserError, match=words):
            ModelMap.from_hf(copy)
    (copy / "config.json").unlink()
    with pytest.raises(UserError, match="no config.json"):
        ModelMap.from_hf(copy)


@pytest.mark.parametrize("fails", [True, False])
def test_folders_that_were_made_for_a_folder_stay_only_with_it(fails: bool, tmp_path: Path) -> None:
    target = tmp_path / "new" / "newer" / "target"
    try:
        with new_folder(target) as building:
            (building / "file").touch()
            if fails:
                raise UserError("no")
    except UserError:
        assert fails and list(tmp_path.iterdir()) == []
    else:
        assert [path.name for path in target.iterdir()] == ["file"]


def test_leftovers_of_killed_builds_are_cleared(tmp_path: Path) -> None:
    """Those of processes that are no more. What only begins alike is the user's."""
    most = 1 << 22  # processes that Linux can number
    theirs = {"model", f"model.tmp-{os.getpid()}", "model.tmp-x", f"model.old-{most}b", f"other.tmp-{most}"}
    for name in (*theirs, f"model.tmp-{most}", f"model.old-{most + 1}", f"model.tmp-{most}-a1_b"):
        (tmp_path / name).mkdir()
    clear_unfinished(tmp_path / "nowhere" / "model")
    clear_unfinished(tmp_path / "model")
    assert {path.name for path in tmp_path.iterdir()} == theirs


def test_what_stays_float32_is_written_so(tmp_path: Path) -> None:
    source = make_tiny("deepseek", tmp_path / "source")
    model = ModelMap.from_hf(source)
    target = exported(source, tmp_path / "target", torch.bfloat16, float32=model.float32)
    before, after = HFReader(source), HFReader(target)
    for name in model.hf_shapes:
        assert after.dtype(name) == (torch.float32 if name.endswith("correction_bias") else torch.bfloat16)
        assert torch.equal(after.get(name), before.get(name).to(after.dtype(name)))


def test_a_folder_that_cannot_be_made_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be made: Not a directory"), new_folder(tmp_path / "file" / "model"):
        pass


def test_only_rank_0_is_asked_for_replicated_parameters(tiny: Path) -> None:
    model, reader = ModelMap.from_hf(tiny), HFReader(tiny)
    asked: list[tuple[str, int]] = []

    def fetch(parameter: Parameter, where: Cut) -> Tensor:
        asked.append((parameter.name, where.tensor))
        out = torch.empty(parameter.local_shape(where))
        load_parameter(reader, parameter, where, out)
        return out

    dict(export_tensors(model, fetch, Cut(tensor_size=2)))
    assert ("decoder.final_layernorm.weight", 1) not in asked
    assert ("embedding.word_embeddings.weight", 1) in asked
    assert not any(name == "output_layer.weight" for name, _ in asked)
    assert len(asked) == len(set(asked))
