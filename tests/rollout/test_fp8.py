"""Up to the door of an engine in float8: SGLang's own model takes the bytes that a sync brings. Computing with them needs a GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from megarl.bridge import fp8
from megarl.models.tiny import make_tiny
from megarl.reshard.fingerprint import combine
from megarl.rollout.arguments import EngineSettings, arguments

ROOT = Path(__file__).parents[2]


def test_an_engine_starts_from_a_plain_folder_as_a_model_in_float8() -> None:
    said = arguments(EngineSettings("folder", "bfloat16", seed=1, quantised=True))["json_model_override_args"]
    assert json.loads(said) == {"quantization_config": fp8.CONFIG}
    assert "json_model_override_args" not in arguments(EngineSettings("folder", "bfloat16", seed=1))


# Whole blocks of what SGLang joins, on two ranks; the hidden size cuts one.
SIZES = {
    "num_hidden_layers": 2,
    "hidden_size": 200,
    "intermediate_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
}
FAMILIES = {
    "llama": {},
    "mistral": {},
    "qwen2": {"hidden_size": 512},  # of these two the heads' size follows
    "mixtral": {"hidden_size": 512, "num_local_experts": 3},
    "qwen3": {},
    "qwen3-moe": {"moe_intermediate_size": 256, "num_experts": 3},
}
EXPERTS = {"qwen3-moe": "mlp.experts.w{}_weight", "mixtral": "block_sparse_moe.experts.w{}_weight"}


@pytest.mark.slow
@pytest.mark.parametrize(("family", "ranks"), [*((family, 1) for family in FAMILIES), ("qwen3", 2), ("qwen3-moe", 2)])
def test_an_engines_model_takes_numbers_and_scales(family: str, ranks: int, tmp_path: Path) -> None:
    """What SGLang has in float8 is what is sent so; its loader puts each part of what it joins and cuts to its place."""
    folder = make_tiny(family, tmp_path / "model", **(SIZES | FAMILIES[family]))
    command = [sys.executable, "-m", "tests.rollout.fp8_model", str(folder)]
    started = [
        subprocess.Popen(
            [*command, str(rank), str(ranks)], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for rank in range(ranks)
    ]
    try:
        said = [process.communicate(timeout=280) for process in started]
    finally:
        for process in started:
            process.kill()
    assert all(process.returncode == 0 for process in started), [errors[-2000:] for _, errors in said]
    found = [json.loads(out.splitlines()[-1]) for out, _ in said]
    given = found[0]["given"]
    parts: dict[str, dict[tuple[int, ...], int]] = {name: {} for name in given}
    for rank in found:
        assert rank["expected"] == sorted(given)
        for name, origin, value in rank["parts"]:
            assert parts[name].setdefault(tuple(origin), value) == value, name
    assert {name: combine(list(shares.values())) for name, shares in parts.items()} == given
    assert all(len(shares) == ranks for name, shares in parts.items() if name.endswith(fp8.SCALES))
    kinds = {name.split(".", 3)[-1] for name in found[0]["float8"]}
    mlp = [EXPERTS[family].format(which) for which in ("13", "2")] if family in EXPERTS else []
    mlp = mlp or ["mlp.gate_up_proj.weight", "mlp.down_proj.weight"]
    assert kinds == {"self_attn.qkv_proj.weight", "self_attn.o_proj.weight", *mlp}
