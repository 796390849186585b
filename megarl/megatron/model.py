"""One pipeline stage of the policy, built from the bridge's map and filled from a Hugging Face folder."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch
import torch.nn.functional as F
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig

from megarl.batch.packing import Packed
from megarl.bridge.hf_io import HFReader, load_parameter
from megarl.bridge.model_map import ModelMap, Parameter
from megarl.cpu.layers import AttentionPlan
from megarl.megatron.parallel import Place, device
from megarl.megatron.specs import block_spec, uses_transformer_engine

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_ACTIVATIONS = {"silu": F.silu, "gelu": F.gelu}


@dataclass
class LocalPackedSeqParams(PackedSeqParams):
    """What the local core attention and the rotary embedding read: one row of T tokens, its segments and positions."""

    plan: AttentionPlan | None = None
    positions: torch.Tensor | None = None


class PolicyModel(GPTModel):
    """GPTModel whose last stage answers with hidden states; log-probs are made from them in chunks (`head.py`)."""

    def _preprocess(self, *args, packed_seq_params=None, **kwargs):
        """Rotary angles by position: the rows of a packed row may start anywhere (shared prompts)."""
        outputs = super()._preprocess(*args, packed_seq_params=packed_seq_params, **kwargs)
        positions = getattr(packed_seq_params, "positions", None)
        if positions is None:
            return outputs
        return (outputs[0], outputs[1].index_select(0, positions), *outputs[2:])

    def _postprocess(self, hidden_states, *_, **__):
        return hidden_states

    def output_weight(self) -> torch.Tensor:
        """(V/ranks, H) rows of the output layer on this rank; the embedding where they are tied."""
        if self.share_embeddings_and_output_weights:
            return self.shared_embedding_or_output_weight()
        return self.output_layer.weight


def packed_params(packed: Packed, dtype: torch.dtype) -> PackedSeqParams:
    """Megatron's description of a packed row."""
    if uses_transformer_engine():
        bounds = [s.start for s in packed.segments] + [len(packed.tokens)]
        lengths = [b - a for a, b in pairwise(bounds)]
        ends = torch.tensor(bounds, dtype=torch.int32, device=device())
        return PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=ends,
            cu_seqlens_kv=ends,
            max_seqlen_q=max(lengths),
            max_seqlen_kv=max(lengths),
        )
    total = len(packed.tokens)
    ends = torch.tensor([0, total], dtype=torch.int32, device=device())
    return LocalPackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=ends,
        cu_seqlens_kv=ends,
        max_seqlen_q=total,
        max_seqlen_kv=total,
        plan=AttentionPlan(packed.segments, total, dtype, device()),
        positions=packed.positions.to(device()),
    )


def transformer_config(
    model_map: ModelMap, place: Place, *, dtype: str, sequence: bool, recompute: str = "none"
) -> TransformerConfig:
    """Megatron's configuration of the model on this layout."""
    fields = dict(model_map.transformer_config())
    fields["activation_func"] = _ACTIVATIONS[fields.pop("activation")]
    if recompute == "full":
        fields |= {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    elif recompute == "selective":
        fields["recompute_granularity"] = "selective"
    on_gpu = torch.cuda.is_available()
    return TransformerConfig(
        **fields,
        use_cpu_initialization=not on_gpu,
        perform_initialization=False,  # every value comes from the checkpoint
        tensor_model_parallel_size=place.tensor_size,
        pipeline_model_parallel_size=place.pipeline_size,
        sequence_parallel=sequence,
        params_dtype=DTYPES[dtype],
        pipeline_dtype=DTYPES[dtype],
        bf16=dtype == "bfloat16",
        # Micro-batches have unequal lengths, so stages tell each other shapes; Megatron ties that to this dispatcher.
        variable_seq_lengths=place.pipeline_size > 1,
        moe_token_dispatcher_type="alltoall",
        # A loss is divided once, by global denominators: Megatron must neither average over micro-batches nor over ranks.
        calculate_per_token_loss=True,
        masked_softmax_fusion=False,
        bias_activation_fusion=on_gpu,
        bias_dropout_fusion=on_gpu,
        gradient_accumulation_fusion=False,
        persist_layer_norm=on_gpu,
        apply_rope_fusion=uses_transformer_engine(),
        batch_p2p_sync=False,
    )


def build(model_map: ModelMap, place: Place, config: TransformerConfig) -> torch.nn.Module:
    """This rank's stage with uninitialised parameters; in bfloat16 wrapped so that stages speak bfloat16 to each other."""
    model = PolicyModel(
        config,
        block_spec(config),
        pre_process=place.pipeline == 0,
        post_process=place.last_stage,
        **model_map.model_args(place.tensor_size),
    ).to(device())
    for parameter, tensor in parameters_of(model, model_map):
        # Megatron marks split parameters while it initialises them, which is left out here. Without the marks the gradient
        # norm would count the first rank's part only.
        if not hasattr(tensor, "tensor_model_parallel"):  # Transformer Engine marks its own
            set_tensor_model_parallel_attributes(tensor, not parameter.replicated, parameter.split.value or 0, 1)
    return Float16Module(config, model) if config.bf16 else model


def unwrap(model: torch.nn.Module) -> PolicyModel:
    while not isinstance(model, PolicyModel):
        model = model.module
    return model


def parameters_of(model: torch.nn.Module, model_map: ModelMap) -> Iterator[tuple[Parameter, torch.nn.Parameter]]:
    """This stage's parameters with the bridge's description of each. Layer numbers are local in Megatron, global in the map."""
    stage = unwrap(model)
    for name, tensor in stage.named_parameters():
        parts = name.split(".")
        if name.startswith("decoder.layers."):
            parts[2] = str(stage.decoder.layers[int(parts[2])].layer_number - 1)
        yield model_map.parameter(".".join(parts)), tensor


@torch.no_grad()
def load_hf(model: torch.nn.Module, model_map: ModelMap, folder: Path, place: Place) -> None:
    """Fill this rank's parameters from a Hugging Face folder, reading only its slices."""
    reader = HFReader(folder)
    reader.check(model_map)
    for parameter, tensor in parameters_of(model, model_map):
        load_parameter(reader, parameter, place, tensor.data)
