"""A real model with Megatron's own layers for multi-token prediction, which reads and writes checkpoints."""

from __future__ import annotations

import importlib
from pathlib import Path

import torch

from tests.megatron.checkpoint_jobs import _may_fork
from tests.megatron.harness import Layout, joined


def read_and_write(
    rank: int, world: int, _: int, layout: Layout, hf: str, checkpoint: str, theirs: str, port: int
) -> tuple[list[str], list[str]]:
    """Megatron reads `checkpoint` and writes `theirs`. The layers' parameters on this rank, and those that are not as in `hf`."""
    from megarl.bridge.hf_io import HFReader, load_parameter
    from megarl.bridge.model_map import ModelMap
    from megarl.megatron import model
    from megarl.megatron.specs import LocalNorm, block_spec

    specs = importlib.import_module("megatron.core.models.gpt.gpt_layer_specs")
    mpu = importlib.import_module("megatron.core.parallel_state")
    dist_checkpointing = importlib.import_module("megatron.core.dist_checkpointing")
    with joined(rank, world, layout, port) as place:
        reader = HFReader(hf)
        map_ = ModelMap.from_hf(hf, names=reader.names)
        config = model.transformer_config(map_, place, dtype="float32", sequence=layout.sequence)
        config.mtp_num_layers = map_.dims.mtp
        block = specs.get_gpt_mtp_block_spec(config, block_spec(config), use_transformer_engine=False)
        for layer in block.layer_specs if block else ():
            parts = layer.submodules
            parts.enorm = parts.hnorm = parts.layer_norm = (
                LocalNorm  # Megatron's local one knows no sequence parallelism
            )
        gpt = model.PolicyModel(
            config,
            block_spec(config),
            mtp_block_spec=block,
            pre_process=place.pipeline == 0,
            post_process=place.last_stage,
            **map_.model_args(place.tensor_size),
        )
        tensors = dict(gpt.named_parameters()) | {n: t for n, t in gpt.named_buffers() if n.endswith("expert_bias")}
        for tensor in tensors.values():
            tensor.data.fill_(float("nan"))
        # Where the layers' stage is not the embedding's, Megatron asks which ranks have the same copy of that.
        groups = {"dp_cp_group": mpu.get_data_parallel_group(with_context_parallel=True)}
        gpt.load_state_dict(
            dist_checkpointing.load({"model": gpt.sharded_state_dict(metadata=groups)}, checkpoint)["model"]
        )
        met, wrong = [], []
        for name, tensor in tensors.items():
            if name.startswith("mtp."):
                parameter, want = map_.parameter(name), torch.empty_like(tensor)
                load_parameter(reader, parameter, place, want)
                met.append(parameter.name)
                wrong += [name] if not torch.equal(want, tensor) else []
        if rank == 0:
            Path(theirs).mkdir()
        torch.distributed.barrier()
        with _may_fork():
            dist_checkpointing.save({"model": gpt.sharded_state_dict(metadata=groups)}, theirs)
        return met, wrong
