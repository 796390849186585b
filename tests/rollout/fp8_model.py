"""SGLang's own model in float8 on a CPU, built and loaded, which is all that can be done with it there. Arguments: the model's
folder, this rank, how many the engine has.

It loads the folder's plain weights, as an engine does when it starts, then a bucket as an engine does in a sync; prints as JSON what
came of it.
"""

from __future__ import annotations

import json
import sys
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
from megarl.reshard.bucket import BucketSpec  # noqa: E402
from megarl.reshard.fingerprint import fingerprint  # noqa: E402
from megarl.reshard.transfer import plan  # noqa: E402
from megarl.rollout.arguments import EngineSettings, arguments  # noqa: E402
from megarl.rollout.loader import load_buckets  # noqa: E402


def build(folder: Path, rank: int, ranks: int) -> torch.nn.Module:
    """As a scheduler of an engine that is `quantised` does."""
    extra = {"tp_size": ranks}
    args = ServerArgs(
        **arguments(EngineSettings(str(folder), "bfloat16", seed=1, max_total_tokens=1024, extra=extra, quantised=True))
    )
    config = ModelConfig.from_server_args(args)
    publish(args, role="scheduler", ranks=SpawnRanks(world_rank=rank))
    init_distributed_environment(
        world_size=ranks,
        rank=rank,
        local_rank=rank,
        distributed_init_method=f"file://{folder.parent}/meeting",
        backend="gloo",
    )
    initialize_model_parallel()
    initialize_dp_attention(args)
    init_dp_gathered_buffer(config)
    load = LoadConfig(load_format="auto")
    with set_default_torch_dtype(torch.bfloat16):
        return _initialize_model(config, load, _get_quantization_config(config, load))


def main(folder: Path, rank: int, ranks: int) -> dict[str, Any]:
    model, plain = ModelMap.from_hf(folder), load_file(folder / "model.safetensors")
    engine = build(folder, rank, ranks)
    engine.load_weights((name, tensor.bfloat16()) for name, tensor in plain.items())  # type: ignore[operator]
    shapes, given = fp8.quantised(model), {}
    (planned,) = plan(model, torch.bfloat16, 1 << 30, shapes)
    names = tuple(item.name for item in planned.tensors)
    bucket = BucketSpec(str(folder.parent / f"bucket-{rank}"), planned.tensors, names)
    bucket.create()
    for name, view in bucket.views().items():
        if name in shapes:
            given[fp8.scales_name(name)] = fp8.scales_of(fp8.magnitudes(plain[name], (0, 0))[1])
            given[name] = fp8.quantise(plain[name], (0, 0), given[fp8.scales_name(name)])
        elif name in plain:
            given[name] = plain[name].bfloat16()
        view.copy_(given[name])
    report = load_buckets(engine, [bucket], None, 0)
    return {
        "float8": sorted(name for name, parameter in engine.named_parameters() if parameter.dtype == fp8.DTYPE),
        "given": {name: fingerprint(tensor) for name, tensor in given.items()},
        "expected": sorted(report["expected"]),
        "parts": report["parts"],
    }


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))))
