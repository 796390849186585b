"""What a model's folder tells of its tokens: how many there are, which end a text, what they say."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path


def end_tokens(folder: Path) -> list[int]:
    """End-of-sequence tokens that a model folder names: generation_config.json's and config.json's."""
    found: list[int] = []
    for name in ("generation_config.json", "config.json"):
        path = folder / name
        if path.is_file():
            value = json.loads(path.read_text()).get("eos_token_id")
            found += value if isinstance(value, list) else [] if value is None else [value]
    return sorted(set(found))


def vocabulary(folder: Path) -> int:
    """Tokens that the model has an output for."""
    return int(json.loads((folder / "config.json").read_text())["vocab_size"])


def decoder(folder: Path) -> Callable[[Sequence[int]], str]:
    """Text of token ids, special tokens included."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    return lambda ids: str(tokenizer.decode(list(ids), skip_special_tokens=False))
