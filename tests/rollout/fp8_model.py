"""SGLang's own model in float8 on a CPU, built and loaded, which is all that can be done with it there. Argument: a family.

It loads the folder's plain weights, as an engine does when it starts, then buckets as an engine does in a sync; prints as JSON what
came of it.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from megarl.rollout.host import prepare_imports

prepare_imports()

import torch  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from sglang.srt.configs.load_config import LoadConfig  # noqa: E402
from sglang.srt.configs.model_config import ModelConfig  # noqa: E402
from sglang.srt.distributed.parallel_state import init_distributed_environment, initialize_model_parallel  # noqa: E402
from sglang.srt.layers.dp_attention import init_dp_gathered_buffer, initialize_dp_attention  # noqa: E402
from sglang.srt.model_loader.loader import _get_quantization_config, _initialize_model  # noqa: E402
from sglang.srt.model_loader.utils import set_default_torch_dtype  # noqa: E402
from sglang.srt.runtime_context import SpawnRanks, publish  # noqa: E402
from sglang.srt.server_args import ServerArgs  # noqa: E402

from megarl.bridge import fp8  # noqa: E402
from megarl.bridge.model_map import ModelMap  # noqa: E402
from megarl.models.tiny import make_tiny  # noqa: E402
from megarl.reshard.bucket import BucketSpec  # noqa: E402
from megarl.reshard.fingerprint import fingerprint  # noqa: E402
from megarl.reshard.transfer import plan  # noqa: E402
from megarl.rollout.arguments import EngineSettings, arguments  # noqa: E402
from megarl.rollout.loader import load_buckets  # noqa: E402

# Whole blocks of what SGLang joins; the hidden size cuts one.
SIZES: dict[str, Any] = {
    "num_hidden_layers": 2,
    "hidden_size": 200,
    "intermediate_size": 384,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
}
OF = {
    "qwen2": {"hidden_size": 512},
    "qwen3-moe": {"moe_intermediate_size": 256, "num_experts": 3},
    "mixtral": {"hidden_size": 512, "num_local_experts": 3},
}


def build(folder: Path) -> torch.nn.Module:
    """As a scheduler of an engine that is `quantised` does, alone."""
    settings = EngineSettings(str(folder), "bfloat16", seed=1, max_total_tokens=1024, quantised=True)
    args = ServerArgs(**arguments(settings))
    config = ModelConfig.from_server_args(args)
    publish(args, role="scheduler", ranks=SpawnRanks(world_rank=0))
    meeting = f"file://{folder.parent}/meeting"
    init_distributed_environment(world_size=1, rank=0, local_rank=0, distributed_init_method=meeting, backend="gloo")
    initialize_model_parallel()
    initialize_dp_attention(args)
    init_dp_gathered_buffer(config)
    load = LoadConfig(load_format="auto")
    with set_default_torch_dtype(torch.bfloat16):
        return _initialize_model(config, load, _get_quantization_config(config, load))


def main(family: str, root: Path) -> dict[str, Any]:
    folder = make_tiny(family, root / "model", **(SIZES | OF.get(family, {})))
    model, plain = ModelMap.from_hf(folder), load_file(folder / "model.safetensors")
    engine = build(folder)
    engine.load_weights((name, tensor.bfloat16()) for name, tensor in plain.items())  # type: ignore[operator]
    shapes, given = fp8.quantised(model), {}
    (planned,) = plan(model, torch.bfloat16, 1 << 30, shapes)
    bucket = BucketSpec(str(root / "bucket"), planned.tensors, tuple(item.name for item in planned.tensors))
    bucket.create()
    for name, view in bucket.views().items():
        if name in shapes:
            scales = fp8.scales_of(fp8.magnitudes(plain[name], (0, 0))[1])
            given[name] = view.copy_(fp8.quantise(plain[name], (0, 0), scales))
            given[fp8.scales_name(name)] = scales
        elif name in plain:
            given[name] = view.copy_(plain[name])
        else:
            view.copy_(given[name])
    report = load_buckets(engine, [bucket], None, 0)
    joined = next(p for name, p in engine.named_parameters() if name.endswith("0.self_attn.qkv_proj.weight_scale_inv"))
    first = "model.layers.0.self_attn.{}_proj.weight_scale_inv"
    return {
        "float8": sorted(name for name, p in engine.named_parameters() if p.dtype == fp8.DTYPE),
        "ours": sorted(given),
        "theirs": sorted(report["expected"]),
        "differ": [name for name, origin, found in report["parts"] if any(origin) or found != fingerprint(given[name])],
        "proved": len(report["parts"]),
        "joined": torch.equal(joined.data, torch.cat([given[first.format(x)] for x in "qkv"])),
    }


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        print(json.dumps(main(sys.argv[1], Path(made))))
