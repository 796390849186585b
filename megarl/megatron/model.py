"""One pipeline stage of the policy, built from the bridge's map and filled from a Hugging Face folder."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state as mpu
from megatron.core.fusions.fused_bias_geglu import quick_gelu
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig

from megarl.batch.packing import Packed
from megarl.bridge.head_io import open_checkpoint
from megarl.bridge.hf_io import load_parameter
from megarl.bridge.model_map import ModelMap, Parameter
from megarl.cpu.layers import AttentionPlan
from megarl.errors import UserError
from megarl.megatron.experts import RoutedRow
from megarl.megatron.layer import LatentPolicyConfig, PolicyConfig
from megarl.megatron.limits import beyond_transformer_engine, uses_transformer_engine
from megarl.megatron.parallel import Place, device
from megarl.megatron.precision import PrecisionSettings
from megarl.megatron.score_head import put_head
from megarl.megatron.specs import block_spec

_BIAS = "router.expert_bias"
_ACTIVATIONS = {"silu": F.silu, "gelu_tanh": partial(F.gelu, approximate="tanh"), "quick_gelu": quick_gelu}


@dataclass
class RowParams(PackedSeqParams):
    """Megatron's description of a packed row, and which sequence each of its rows belongs to, where the routers want to know."""

    routed: RoutedRow | None = None


@dataclass
class LocalPackedSeqParams(RowParams):
    """What the local core attention and the rotary embedding read: one row of T tokens, its segments and positions."""

    plan: AttentionPlan | None = None
    positions: torch.Tensor | None = None


class PolicyModel(GPTModel):
    """GPTModel whose last stage answers with hidden states; log-probs are made from them in chunks (`head.py`)."""

    def __init__(self, config: PolicyConfig | LatentPolicyConfig, *args, **kwargs):
        super().__init__(config, *args, **kwargs)
        self.window_rotary: RotaryEmbedding | None = None
        if config.window_rotary_base is not None:
            self.window_rotary = RotaryEmbedding(
                config.kv_channels,
                rotary_percent=self.rotary_percent,
                rotary_interleaved=config.rotary_interleaved,
                rotary_base=config.window_rotary_base,
                use_cpu_initialization=config.use_cpu_initialization,
                cp_group=self.pg_collection.cp,
            )

    def _preprocess(self, *args, packed_seq_params=None, **kwargs):
        """Embeddings, scaled where the family does that, and rotary angles by position: the rows of a packed row may start
        anywhere (shared prompts)."""
        embedded, angles, *rest = super()._preprocess(*args, packed_seq_params=packed_seq_params, **kwargs)
        if embedded is not None and self.config.embedding_scale != 1.0:
            scale = embedded.new_tensor(self.config.embedding_scale)  # rounded to the model's dtype, as in transformers
            embedded = embedded * scale
        if self.window_rotary is not None:  # side by side: each layer takes its own (layer.py)
            angles = torch.cat([angles, self.window_rotary(len(angles), packed_seq=True)], dim=-1)
        positions = getattr(packed_seq_params, "positions", None)
        if positions is not None and angles is not None:  # latent attention makes its own
            angles = angles.index_select(0, positions)
        return (embedded, angles, *rest)

    def _postprocess(self, hidden_states, *_, **__):
        return hidden_states

    def sharded_state_dict(self, *args, **kwargs):
        """On its last stage Megatron looks for an output layer, in the place of which a score head may stand."""
        headed = self.post_process and self.output_layer is None
        self.post_process = self.post_process and not headed
        try:
            return super().sharded_state_dict(*args, **kwargs)
        finally:
            self.post_process = self.post_process or headed

    def output_weight(self) -> torch.Tensor:
        """(V/ranks, H) rows of the output layer on this rank; the embedding where they are tied."""
        if self.share_embeddings_and_output_weights:
            return self.shared_embedding_or_output_weight()
        return self.output_layer.weight


def packed_params(packed: Packed, config: TransformerConfig, weights: torch.Tensor | None = None) -> RowParams:
    """Megatron's description of a packed row for a model of this `config`. `weights` (samples of the row,): how much each counts
    in the losses that keep experts in use, for which prompts are not shared; None: these losses are off."""
    if packed.piece is not None or uses_transformer_engine():
        # Bounds of whole sequences: Megatron and Transformer Engine know which chunks of each lie on a rank of context parallelism.
        bounds = _bounds(packed)
        positions = None
    else:
        bounds, positions = [0, len(packed.tokens)], packed.positions.to(device())
    longest = max(b - a for a, b in pairwise(bounds))
    ends = torch.tensor(bounds, dtype=torch.int32, device=device())
    common = {
        "qkv_format": "thd",
        "cu_seqlens_q": ends,
        "cu_seqlens_kv": ends,
        "max_seqlen_q": longest,
        "max_seqlen_kv": longest,
        "routed": None if weights is None else _routed(packed, weights),
    }
    if uses_transformer_engine():
        return RowParams(**common)
    rows = packed.piece.rows if packed.piece else None
    window = config.window_size[0] + 1 if config.window_size else None
    plan = AttentionPlan(packed.segments, len(packed.tokens), config.params_dtype, device(), rows, window)
    return LocalPackedSeqParams(**common, plan=plan, positions=positions)


def _bounds(packed: Packed) -> list[int]:
    """Where each sequence of the whole row starts, and the row's end."""
    return packed.piece.bounds if packed.piece else [*(s.start for s in packed.segments), len(packed.tokens)]


def _routed(packed: Packed, weights: torch.Tensor) -> RoutedRow:
    rows = packed.piece.rows[mpu.get_context_parallel_rank()] if packed.piece else torch.arange(len(packed.tokens))
    number = torch.searchsorted(torch.tensor(_bounds(packed)[1:]), rows, right=True)
    number = torch.where(packed.real, number, len(weights))
    return RoutedRow(number.to(device()), weights.to(device(), torch.float32))


def transformer_config(
    model_map: ModelMap,
    place: Place,
    *,
    dtype: str,
    sequence: bool,
    recompute: str = "none",
    stage_layers: Sequence[int] | None = None,
    aux_loss: float = 0.0,
    z_loss: float = 0.0,
    precision: PrecisionSettings | None = None,
) -> PolicyConfig | LatentPolicyConfig:
    """Megatron's configuration of the model on this layout. `stage_layers`: how many layers each (virtual) stage has, from the
    embedding to the head; None: all alike. `aux_loss`, `z_loss`: coefficients of the losses in `experts.py`. `precision` None:
    `dtype`, and no float8."""
    fields = dict(model_map.transformer_config())
    fields["activation_func"] = _ACTIVATIONS[fields.pop("activation")]
    if recompute == "full":
        fields |= {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    elif recompute == "selective":
        fields["recompute_granularity"] = "selective"
    on_gpu, engine = torch.cuda.is_available(), uses_transformer_engine()
    if engine and (beyond := list(beyond_transformer_engine(model_map, place.context_size))):
        raise UserError(" ".join(beyond))
    if model_map.has_experts:
        fields |= {
            "expert_model_parallel_size": place.expert_size,
            "expert_tensor_parallel_size": place.expert_tensor_size,
            "moe_grouped_gemm": engine,
            "moe_aux_loss_coeff": aux_loss,
            "moe_z_loss_coeff": z_loss or None,
        }
        if place.tensor_size > 1 and not sequence:
            raise UserError("tensor parallelism of a model with experts needs sequence parallelism; set sequence=true.")
    kind = LatentPolicyConfig if model_map.is_latent else PolicyConfig
    config = kind(
        **fields,
        use_cpu_initialization=not on_gpu,
        perform_initialization=False,  # every value comes from the checkpoint
        tensor_model_parallel_size=place.tensor_size,
        pipeline_model_parallel_size=place.pipeline_size,
        virtual_pipeline_model_parallel_size=place.virtual_size if place.virtual_size > 1 else None,
        pipeline_model_parallel_layout=_stages(stage_layers) if place.pipeline_size > 1 and stage_layers else None,
        context_parallel_size=place.context_size,
        sequence_parallel=sequence,
        **(precision or PrecisionSettings(dtype)).transformer_fields(),
        # Micro-batches have unequal lengths, so stages tell each other shapes; Megatron ties that to this dispatcher.
        variable_seq_lengths=place.pipeline_size > 1,
        moe_token_dispatcher_type="alltoall",
        # A loss is divided once, by global denominators: Megatron must neither average over micro-batches nor over ranks.
        calculate_per_token_loss=True,
        masked_softmax_fusion=False,
        bias_activation_fusion=on_gpu and fields["activation_func"] is F.silu,
        bias_dropout_fusion=on_gpu,
        gradient_accumulation_fusion=False,
        persist_layer_norm=on_gpu,
        # Over packed rows Megatron does not tell Transformer Engine that pairs are neighbours.
        apply_rope_fusion=engine and not (model_map.is_latent or fields.get("rotary_interleaved")),
        batch_p2p_sync=False,
    )
    for name, value in model_map.config_attributes().items():
        setattr(config, name, value)
    return config


def _stages(layers: Sequence[int]) -> list[list[str]]:
    """What each stage holds, in Megatron's words."""
    stages = [["decoder"] * count for count in layers]
    stages[0].insert(0, "embedding")
    stages[-1].append("loss")
    return stages


def build(model_map: ModelMap, place: Place, config: TransformerConfig) -> list[torch.nn.Module]:
    """This rank's chunks of the model (one, but for virtual stages) with uninitialised parameters; in bfloat16 wrapped so
    that stages speak bfloat16 to each other."""
    return [_chunk(model_map, place, config, number) for number in range(place.virtual_size)]


def _chunk(model_map: ModelMap, place: Place, config: TransformerConfig, number: int) -> torch.nn.Module:
    virtual = number if place.virtual_size > 1 else None
    model = PolicyModel(
        config,
        block_spec(config, virtual),
        pre_process=place.pipeline == 0 and number == 0,
        post_process=place.last_stage and number == place.virtual_size - 1,
        vp_stage=virtual,
        **model_map.model_args(place.tensor_size),
    ).to(device())
    if model_map.head is not None:
        put_head(model, config, model_map.head)
    for parameter, tensor in parameters_of([model], model_map):
        if not isinstance(tensor, torch.nn.Parameter):
            continue
        if parameter.expert is not None:
            # Megatron takes experts for ordinary parameters where expert parallelism is 1, though with another tensor
            # parallelism for them their gradients are summed over other ranks.
            tensor.allreduce = place.expert_size == 1 and place.expert_tensor_size == place.tensor_size
            # Sums over the ranks that have the same part are all that experts need. Megatron marks the bias of the second matrix
            # for sequence parallelism too, which would mix the gradients of different experts.
            tensor.sequence_parallel = False
        # Megatron marks split parameters while it initialises them, which is left out here. Without the marks the gradient
        # norm would count the first rank's part only.
        if not hasattr(tensor, "tensor_model_parallel"):  # Transformer Engine marks its own
            # A bias of an expert is whole on its rank, and another's on the next tensor-parallel one: each counts.
            split = not parameter.replicated or parameter.expert is not None
            set_tensor_model_parallel_attributes(tensor, split, parameter.split.value or 0, 1)
    if not config.bf16:
        return model
    wrapped = Float16Module(config, model)
    for name, buffer in model.named_buffers():
        if name.endswith(_BIAS):
            buffer.data = buffer.data.float()
    return wrapped


def unwrap(model: torch.nn.Module) -> PolicyModel:
    while not isinstance(model, PolicyModel):
        model = model.module
    return model


def parameters_of(chunks: Sequence[torch.nn.Module], model_map: ModelMap) -> Iterator[tuple[Parameter, torch.Tensor]]:
    """This rank's part of the checkpoint: its parameters, and the routers' biases, which are buffers that nothing trains.

    Each with the bridge's description; layers and experts are numbered locally in Megatron, globally in the map.
    """
    for stage in map(unwrap, chunks):
        biases = ((name, buffer) for name, buffer in stage.named_buffers() if name.endswith(_BIAS))
        for name, tensor in chain(stage.named_parameters(), biases):
            yield model_map.parameter(_global_name(stage, name)), tensor


def _global_name(stage: PolicyModel, name: str) -> str:
    parts = name.split(".")
    if parts[:2] != ["decoder", "layers"]:
        return name
    layer = stage.decoder.layers[int(parts[2])]
    parts[2] = str(layer.layer_number - 1)
    if parts[3:5] != ["mlp", "experts"]:
        return ".".join(parts)
    number = layer.mlp.local_expert_indices
    if parts[5] == "local_experts":
        parts[6] = str(number[int(parts[6])])
        return ".".join(parts)
    grouped, kind, local = ".".join(parts).rpartition("weight")  # Transformer Engine: linear_fc1.weight3
    return f"{grouped}{kind}{number[int(local)]}"


@torch.no_grad()
def load_hf(
    chunks: Sequence[torch.nn.Module], model_map: ModelMap, folder: Path, place: Place, reader: Any = None
) -> None:
    """Fill this rank's parameters from a Hugging Face folder, or from what another `reader` has under such names, reading only its
    slices."""
    reader = reader or open_checkpoint(folder, model_map.head)
    reader.check(model_map)
    for parameter, tensor in parameters_of(chunks, model_map):
        load_parameter(reader, parameter, place, tensor.data)
