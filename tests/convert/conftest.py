from __future__ import annotations

from pathlib import Path

import pytest

from megarl.convert.hf_to_megatron import hf_to_megatron
from megarl.convert.work import Options
from megarl.models.tiny import make_tiny


@pytest.fixture(scope="session")
def hf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Hugging Face folder; not to be written to."""
    return make_tiny("qwen3", tmp_path_factory.mktemp("convert") / "hf")


@pytest.fixture(scope="session")
def megatron(hf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same as a torch_dist checkpoint of several files; not to be written to."""
    target = tmp_path_factory.mktemp("convert") / "megatron"
    return hf_to_megatron(hf, target, Options(shard_bytes=300_000), show=False)
