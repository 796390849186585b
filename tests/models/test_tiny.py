"""Tiny models: what transformers makes of them, and that nothing in them lets a mistake pass."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megarl.bridge.model_map import ModelMap
from megarl.errors import UserError
from megarl.models import check_folder, names, resolve
from megarl.models.tiny import RECIPES, make_tiny, tiny_config

TEXT = "system: add 3 + 45, naïvely, then say “東京 😀”\n\tdone  "


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("tiny")
    return {family: make_tiny(family, root / family) for family in RECIPES}


@pytest.mark.parametrize("family", RECIPES)
def test_transformers_loads_and_runs_it(family: str, made: dict[str, Path]) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, report = AutoModelForCausalLM.from_pretrained(made[family], output_loading_info=True)
    assert not any(report.values())
    assert model.dtype == torch.float32
    tokenizer = AutoTokenizer.from_pretrained(made[family])
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": "What is 12 + 3?"}], tokenize=False)
    assert prompt == "<|im_start|>user\nWhat is 12 + 3?<|im_end|>\n"
    with torch.no_grad():
        logits = model(torch.tensor([tokenizer(prompt)["input_ids"]])).logits
    assert 0.5 < float(logits.std()) < 2.0  # sampled text varies, and no logit runs away
    assert (model.generation_config.eos_token_id, model.generation_config.pad_token_id) == (2, 3)


@pytest.mark.parametrize("family", RECIPES)
def test_its_tokenizer_is_a_real_one(family: str, made: dict[str, Path]) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(made[family])
    ids = tokenizer(TEXT)["input_ids"]
    assert tokenizer.decode(ids) == TEXT
    assert len(ids) < len(TEXT.encode())  # merges are at work
    assert [tokenizer.decode([token]) for token in tokenizer("345")["input_ids"]] == ["3", "4", "5"]
    assert tokenizer("<|im_start|>a<|im_end|><|pad|>")["input_ids"] == [1, tokenizer("a")["input_ids"][0], 2, 3]
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<|pad|>")
    assert len(tokenizer) == json.loads((made[family] / "config.json").read_text())["vocab_size"]
    assert tokenizer.decode(ids + [2], skip_special_tokens=True) == TEXT


@pytest.mark.parametrize("family", RECIPES)
def test_nothing_in_it_hides_a_mistake(family: str, made: dict[str, Path]) -> None:
    model = ModelMap.from_hf(made[family])
    dims = model.dims
    # Qwen2 derives the head size from the hidden size, so there the two are equal by architecture.
    sizes = [dims.hidden, dims.vocab, dims.q, dims.heads, dims.head_dim, dims.layers]
    # Every head has its own key and value under latent attention; Mixtral has no MLP but its experts.
    sizes += [dims.nope_dim, dims.rope_dim, dims.v_dim, dims.kv_rank, dims.kv_down, dims.kv_up, dims.v]
    sizes += [] if model.is_latent else [dims.kv, dims.kv_heads]
    sizes += [dims.q_rank, dims.experts, dims.expert_ffn, dims.shared_ffn]
    sizes += [dims.ffn] if dims.ffn != dims.expert_ffn else []
    sizes = [size for size in sizes if size]
    assert len(set(sizes)) == len(sizes) - (dims.q == dims.hidden), sizes
    assert (dims.q == dims.hidden) == family.startswith("qwen2")
    whole = 1 if family == "gpt-oss" else None  # Megatron cannot cut experts with biases
    assert model.check_layout(2, 2, 2 if model.has_experts else 1, whole, sequence=True) == []
    assert dims.vocab % 2 == 1
    for name, tensor in load_file(made[family] / "model.safetensors").items():
        assert tensor.std() > 0.05, name
        if "norm" in name:
            assert (tensor - 1).abs().mean() > 0.05, name
    assert sum(path.stat().st_size for path in made[family].iterdir()) < 3_000_000


def test_the_seed_decides_and_overrides_are_taken(tmp_path: Path) -> None:
    start = time.perf_counter()
    again = [make_tiny("qwen3", tmp_path / f"{number}", seed=number % 2) for number in range(3)]
    assert time.perf_counter() - start < 9
    one, other, same = (folder.joinpath("model.safetensors").read_bytes() for folder in again)
    assert one == same
    assert one != other
    assert again[0].joinpath("tokenizer.json").read_bytes() == again[1].joinpath("tokenizer.json").read_bytes()
    deeper = make_tiny("qwen3", tmp_path / "deeper", num_hidden_layers=6, rope_theta=5e4)
    assert ModelMap.from_hf(deeper).dims.layers == 6
    assert ModelMap.from_hf(deeper).model_args()["rotary_base"] == 50000


def test_what_cannot_be_made_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="'gpt2'; there are deepseek, .*, llama, .*, qwen3-moe"):
        make_tiny("gpt2", tmp_path / "gpt2")
    with pytest.raises(UserError, match="a_typo"):
        make_tiny("llama", tmp_path / "llama", a_typo=1)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "file").write_text("")
    with pytest.raises(UserError, match="exists already"):
        make_tiny("llama", tmp_path / "mine")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine"]


def test_names_are_made_in_the_cache_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGARL_CACHE", str(tmp_path / "cache"))
    folder = resolve("tiny-qwen2-untied")
    stamp = (folder / "model.safetensors").stat().st_mtime_ns
    assert resolve("tiny-qwen2-untied") == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == stamp
    assert folder.parent == tmp_path / "cache"
    assert check_folder(folder) == folder
    assert not ModelMap.from_hf(folder).tied
    tiny = {f"tiny-{family}" for family in RECIPES}
    assert set(names()) == {"smollm2", *tiny, *(f"{name}-reward" for name in tiny)}


def test_paths_are_checked(tmp_path: Path, made: dict[str, Path]) -> None:
    assert resolve(made["llama"]) == made["llama"]
    with pytest.raises(UserError, match=r"no model folder .*nowhere.*smollm2"):
        resolve(tmp_path / "nowhere")
    folder = tmp_path / "folder"
    folder.mkdir()
    for missing, content in (
        ("no config.json", ("config.json", json.dumps(tiny_config("llama")))),
        ("no tokenizer", ("tokenizer.json", "{}")),
        ("no weights", ("pytorch_model.bin", "")),
        ("only pickled weights", ("model.safetensors", "")),
    ):
        with pytest.raises(UserError, match=missing):
            resolve(folder)
        (folder / content[0]).write_text(content[1])
    assert resolve(str(folder)) == folder


def test_a_cache_that_cannot_be_written_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MEGARL_CACHE", str(tmp_path / "file"))
    with pytest.raises(UserError, match=r"cannot be written .*MEGARL_CACHE"):
        resolve("tiny-llama")


@pytest.mark.parametrize("seed", [-1, 2**63])
def test_a_seed_that_no_generator_takes(tmp_path: Path, seed: int) -> None:
    with pytest.raises(UserError, match="The seed"):
        make_tiny("qwen3", tmp_path / "m", seed=seed)
    assert not any(tmp_path.iterdir())
