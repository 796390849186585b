"""A small real tokenizer, as every response is decoded with one."""

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from megarl.models.tokenizer import CHATML, END, ENDOFTEXT, PAD, train_small, write_tokenizer


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerBase:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder, train_small(330), eos=END, pad=PAD, bos=None, unk=ENDOFTEXT, template=CHATML, length=2048)
    return AutoTokenizer.from_pretrained(folder)
