"""A small real tokenizer, with a chat template and without one."""

from pathlib import Path

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from megarl.models.tokenizer import CHATML, END, ENDOFTEXT, PAD, train_small, write_tokenizer


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerBase:
    return _make(tmp_path_factory.mktemp("chat"), CHATML)


@pytest.fixture(scope="session")
def base_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerBase:
    """Of a base model: it has never heard of turns."""
    made = _make(tmp_path_factory.mktemp("base"), CHATML)
    made.chat_template = None
    return made


def _make(folder: Path, template: str) -> PreTrainedTokenizerBase:
    trained = train_small(330)
    write_tokenizer(folder, trained, eos=END, pad=PAD, bos=None, unk=ENDOFTEXT, template=template, length=2048)
    return AutoTokenizer.from_pretrained(folder)
