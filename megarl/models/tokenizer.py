"""Tokenizers made here, in the files that `transformers` reads: byte-level BPE in which every digit is a token of its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer

ENDOFTEXT, START, END, PAD = "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>"

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def byte_level(model: BPE) -> Tokenizer:
    """`model` with GPT-2's bytes and word pattern, and digits split one by one; no normaliser, no prefix space."""
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def special(content: str) -> AddedToken:
    return AddedToken(content, special=True, normalized=False)


def train_small(vocab_size: int) -> Tokenizer:
    """A real tokenizer for tiny models, trained on the text below; exactly `vocab_size` tokens, the same every time."""
    tokenizer = byte_level(BPE())
    trainer = BpeTrainer(  # type: ignore[no-untyped-call]
        vocab_size=vocab_size,
        special_tokens=[special(content) for content in (ENDOFTEXT, START, END, PAD)],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_TEXT.splitlines(), trainer)
    if tokenizer.get_vocab_size() != vocab_size:
        raise ValueError(f"the training text gives {tokenizer.get_vocab_size()} tokens, not {vocab_size}")
    return tokenizer


def write_tokenizer(
    folder: Path,
    tokenizer: Tokenizer,
    *,
    eos: str,
    pad: str,
    bos: str | None,
    unk: str | None,
    template: str,
    length: int,
) -> None:
    """tokenizer.json and tokenizer_config.json; `length` is the model's longest sequence in tokens."""
    tokenizer.save(str(folder / "tokenizer.json"))
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": length,
        "clean_up_tokenization_spaces": False,
        "bos_token": bos,
        "eos_token": eos,
        "pad_token": pad,
        "unk_token": unk,
        "chat_template": template,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


_TEXT = """\
Add the numbers and say the answer. What is the sum of three and four? The sum of three and four is seven.
system user assistant: You are a helpful assistant. Answer with one number only, and nothing after it.
Calculate 3 + 5. The result is 8. Calculate 9 - 2. The result is 7. State the final answer to the following problem.
The cat sat on the mat while the other cat was in the garden with a small bird that sang every morning.
To subtract is to take away; to multiply is to add the same number again and again; to divide is to share.
If a train leaves the station in the morning and another leaves in the evening, which of them arrives first?
There are seven days in the week and twelve months in the year, and the longest day is in the summer.
She said that he would bring the bread, the cheese and the apples, but there was nothing on the table.
Think step by step, then give the answer. The answer is the number that is left when all others are gone.
def add(a, b): return a + b
"""
