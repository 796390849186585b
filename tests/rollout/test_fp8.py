"""Up to the door of an engine in float8: SGLang's own model takes the bytes that a sync brings. Computing with them needs a GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from megarl.bridge import fp8
from megarl.rollout.arguments import EngineSettings, arguments

ROOT = Path(__file__).parents[2]


def test_an_engine_starts_from_a_plain_folder_as_a_model_in_float8() -> None:
    said = arguments(EngineSettings("folder", "bfloat16", seed=1, quantised=True))["json_model_override_args"]
    assert json.loads(said) == {"quantization_config": fp8.CONFIG}
    assert "json_model_override_args" not in arguments(EngineSettings("folder", "bfloat16", seed=1))


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3", "qwen3-moe", "mixtral"])
def test_an_engines_model_takes_numbers_and_scales(family: str) -> None:
    """What SGLang has in float8 is what is sent so; its loader puts each part of what it joins to its place."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.rollout.fp8_model", family],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["ours"] == found["theirs"] and found["proved"] == len(found["ours"])
    assert found["differ"] == [] and found["joined"]
    kinds = {name.split(".", 3)[-1] for name in found["float8"]}
    block = {"qwen3-moe": "mlp.experts.w{}_weight", "mixtral": "block_sparse_moe.experts.w{}_weight"}.get(family)
    mlp = (
        {block.format(which) for which in ("13", "2")} if block else {"mlp.gate_up_proj.weight", "mlp.down_proj.weight"}
    )
    assert kinds == {"self_attn.qkv_proj.weight", "self_attn.o_proj.weight"} | mlp
