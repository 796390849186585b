"""How many bytes of parameters, gradients and optimizer states Megatron allocates on a rank: exactly, from shapes alone.

What is trained lies in buffers, one for experts whose gradients other ranks share and one for everything else, of each model chunk
(megatron/core/distributed/param_and_grad_buffer.py). With the distributed optimizer, over the N ranks that share a gradient:

    a parameter        begins at a multiple of 64 elements; parameters lie in the order in which the model makes them, from the last
    a buffer           ends at a multiple of lcm(N, 128) elements; so does each part of it, where the embedding is tied to the output
                       layer of another stage and lies alone
    a rank's states    of the N-th part of each buffer that is its own, padding left out

Without it nothing is padded, parameters are tensors of their own, and every rank has the states of all that it holds. States are
AdamW's two averages and, under bfloat16, master weights. torch's AdamW adds a count of steps, 4 bytes a tensor.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from megarl.bridge.activations import BYTES, Layout
from megarl.bridge.grid import Seat
from megarl.bridge.model_map import ModelMap, Parameter

SIZES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8": 1}
_STEP = 4  # bytes of torch's count of steps
_OUTPUT = "output_layer.weight"
# The order in which Megatron's local spec makes a layer's modules, and those before and after the layers.
_MODULES = (
    *("embedding", "input_layernorm"),
    *("core_attention", "linear_proj", "linear_qkv", "linear_q_proj", "linear_q_down_proj", "linear_q_up_proj"),
    *("linear_kv_down_proj", "linear_kv_up_proj", "q_layernorm", "k_layernorm", "kv_layernorm"),
    *("pre_mlp_layernorm", "router", "experts", "shared_experts", "linear_fc1", "linear_fc2"),
    *("post_self_attn_layernorm", "post_mlp_layernorm", "final_layernorm", "output_layer", "score_head"),
)


class Held(NamedTuple):
    """Bytes on a rank."""

    parameters: int  # and the model's buffers: the routers' biases, tables of angles
    gradients: int = 0
    optimizer: int = 0
    host: int = 0  # of the optimizer's states, in CPU memory beside a GPU

    @property
    def total(self) -> int:
        """On the device."""
        return self.parameters + self.gradients + self.optimizer


@dataclass(frozen=True)
class Learning:
    """What of an optimizer's settings counts here."""

    distributed: bool = True
    frozen: frozenset[str] = frozenset()  # names of Megatron parameters
    main_params: str = "float32"
    main_grads: str = "float32"
    exp_avg: str = "float32"
    exp_avg_sq: str = "float32"
    cpu_offload: float = 0.0
    fused: bool = False  # Transformer Engine's AdamW, which counts steps by groups of parameters
    fp8_params: bool = False  # weights of float8 products are bytes

    @classmethod
    def of(cls, settings: Any, frozen: frozenset[str], *, fused: bool, fp8_params: bool = False) -> Learning:
        """Of the configuration's section, and the parameters that its patterns freeze."""
        return cls(
            settings.distributed,
            frozen,
            settings.main_params_dtype,
            settings.main_grads_dtype,
            settings.exp_avg_dtype,
            settings.exp_avg_sq_dtype,
            settings.cpu_offload,
            fused,
            fp8_params,
        )

    @property
    def aware(self) -> bool:
        """Whether it is Megatron's precision-aware optimizer."""
        low = {self.main_params, self.main_grads, self.exp_avg, self.exp_avg_sq} != {"float32"}
        return low or self.cpu_offload > 0

    def sharded(self, ranks: int) -> bool:
        """As `OptimizerSettings.sharded`."""
        return self.aware or (self.distributed and ranks > 1)

    def state_bytes(self, dtype: str) -> int:
        """Of an element of a rank's share."""
        averages = SIZES[self.exp_avg] + SIZES[self.exp_avg_sq]
        if dtype == "float32":
            return averages
        # The precision-aware optimizer keeps of a float32 master weight what its bfloat16 copy lacks (store_param_remainders).
        remainder = self.aware and self.cpu_offload == 0 and self.main_params == "float32"
        return averages + (2 if remainder else SIZES[self.main_params])


class Buffer(NamedTuple):
    """Elements of a buffer, and of each of the ranks that share it: elements of its own and the tensors they belong to."""

    elements: int
    owned: list[int]
    tensors: list[int]


def buffer(sizes: Sequence[int], alone: Sequence[bool], ranks: int) -> Buffer:
    """Of parameters of so many elements, in the order of the buffer, under the distributed optimizer of so many ranks. `alone`: that
    it has a part of the buffer to itself."""
    multiple = math.lcm(ranks, 128)
    owned, tensors = [0] * ranks, [0] * ranks
    start = 0  # of the part
    spans: list[tuple[int, int]] = []

    def close() -> None:
        nonlocal start, spans
        if not spans:
            return
        end = _up(spans[-1][1], multiple)
        share = (end - start) // ranks
        for first, last in spans:
            for rank in range((first - start) // share, (last - 1 - start) // share + 1):
                begins = start + rank * share
                owned[rank] += min(last, begins + share) - max(first, begins)
                tensors[rank] += 1
        start, spans = end, []

    at = 0
    for size, by_itself in zip(sizes, alone, strict=True):
        if by_itself:
            close()
            at = start
        at = _up(at, 64)
        spans.append((at, at + size))
        at += size
        if by_itself:
            close()
            at = start
    close()
    return Buffer(start, owned, tensors)


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


class _Stage(NamedTuple):
    """What is alike on all ranks of a pipeline stage."""

    whole: int  # bytes of all that a model has there
    untrained: int  # of them, of what no optimizer changes
    tables: int  # and of these, of what no checkpoint has
    elements: int  # that are trained
    of_experts: int  # of them, of experts
    tensors: int
    in_float8: int  # elements of matrices that can be kept in float8
    buffers: list[tuple[Buffer, bool]]  # and whether it is one of experts; empty: nothing is sharded


class States:
    """Of one model in one dtype on one layout. `learning` None: it is only looked at."""

    def __init__(self, model: ModelMap, layout: Layout, *, dtype: str, learning: Learning | None = None):
        self.model, self.layout, self.dtype, self.learning = model, layout, dtype, learning
        self.size = BYTES[dtype]
        self._stages: dict[int, _Stage] = {}

    def __call__(self, seat: Seat) -> Held:
        """Of the rank that stands there."""
        stage, learning = self.stage(seat), self.learning
        if learning is None:
            return Held(stage.whole)
        grad, state = SIZES[learning.main_grads], learning.state_bytes(self.dtype)
        if not stage.buffers:
            steps = 0 if learning.fused else _STEP * stage.tensors
            return Held(stage.whole, stage.elements * grad, stage.elements * state + steps)
        elements = sum(found.elements for found, _ in stage.buffers)
        of_rank = [(found, seat.expert_data if experts else seat.replica) for found, experts in stage.buffers]
        owned = sum(found.owned[rank] for found, rank in of_rank)
        steps = 0 if learning.fused else _STEP * sum(found.tensors[rank] for found, rank in of_rank)
        parameters = elements * self.size - (stage.in_float8 if learning.fp8_params else 0)
        states = owned * state + steps
        host = round(learning.cpu_offload * owned * 4 * 4)  # float32 weight and gradient there, and the averages
        return Held(stage.untrained + parameters, elements * grad, round((1 - learning.cpu_offload) * states), host)

    def frozen(self, seat: Seat) -> int:
        """Bytes of parameters that no optimizer changes, on a rank."""
        stage = self.stage(seat)
        return stage.untrained - stage.tables

    def stage(self, seat: Seat) -> _Stage:
        """Of the rank's pipeline stage: no shape depends on where else a rank stands."""
        if seat.pipeline not in self._stages:
            chunks = self.parameters(seat)
            learning = self.learning or Learning()
            sharded = learning.sharded(seat.data_size * seat.context_size)
            trained = [[p for p in chunk if not p.float32 and p.name not in learning.frozen] for chunk in chunks]
            every = [p for chunk in trained for p in chunk]
            elements = sum(_elements(p, seat) for p in every)
            whole = sum(_elements(p, seat) * (4 if p.float32 else self.size) for chunk in chunks for p in chunk)
            tables = self._tables(seat)
            self._stages[seat.pipeline] = _Stage(
                whole + tables,
                whole + tables - elements * self.size,
                tables,
                elements,
                sum(_elements(p, seat) for p in every if p.expert is not None),
                len(every),
                sum(_elements(p, seat) for p in every if _in_float8(p)),
                self._buffered(trained, seat) if self.learning and sharded else [],
            )
        return self._stages[seat.pipeline]

    def parameters(self, seat: Seat) -> list[list[Parameter]]:
        """That a rank holds, by model chunk, in the order in which the model makes them; the routers' biases among them."""
        held = []
        chunks = self.layout.chunks(seat.pipeline, self.model.dims.layers)
        last = seat.pipeline == seat.pipeline_size - 1
        # The output layer is the embedding itself where both are tied and on one stage.
        same = self.model.tied and seat.pipeline_size == 1
        for number, layers in enumerate(chunks):
            ends = {"first": seat.pipeline == number == 0, "last": last and number == len(chunks) - 1}
            found = [
                p
                for p in self.model.parameters
                if (ends[p.stage] and not (same and p.name == _OUTPUT) if p.layer is None else p.layer in layers)
            ]
            held.append(sorted((p for p in found if p.held(seat)), key=_place_in_model))
        return held

    def _buffered(self, trained: list[list[Parameter]], seat: Seat) -> list[tuple[Buffer, bool]]:
        # Experts lie with everything else where the same ranks share their gradients (megatron/model.py).
        apart = not (seat.expert_size == 1 and seat.expert_tensor_size == seat.tensor_size)
        sharers = {False: seat.data_size * seat.context_size, True: seat.expert_data_size}
        alone = self.model.tied and seat.pipeline_size > 1
        found = []
        for chunk in trained:
            for experts in (False, True):
                there = [p for p in reversed(chunk) if (apart and p.expert is not None) == experts]
                sizes = [_elements(p, seat) for p in there]
                by_itself = [alone and p.layer is None and p.pad_vocabulary for p in there]
                found.append((buffer(sizes, by_itself, sharers[experts]), experts))
        return found

    def _tables(self, seat: Seat) -> int:
        """Bytes of buffers that no checkpoint has: counts of tokens beside each router's bias, YaRN's cosines and sines."""
        facts, args, dims = self.model.transformer_config(), self.model.model_args(), self.model.dims
        chunks = self.layout.chunks(seat.pipeline, dims.layers)
        layers = [layer for chunk in chunks for layer in chunk]
        found = 0
        if facts.get("moe_router_enable_expert_bias"):
            found += sum(dims.is_sparse(layer) for layer in layers) * dims.experts
        if self.model.is_latent and facts.get("rope_type") == "yarn":
            found += len(layers) * 2 * facts["original_max_position_embeddings"] * dims.rope_dim
        elif args.get("position_embedding_type") == "yarn":
            positions = self.model.config_attributes()["yarn_original_max_position_embeddings"]
            found += len(chunks) * 2 * positions * dims.head_dim
        return found * self.size


def _elements(parameter: Parameter, seat: Seat) -> int:
    return math.prod(parameter.local_shape(seat))


def _in_float8(parameter: Parameter) -> bool:
    return parameter.layer is not None and len(parameter.hf_shapes[0]) > 1 and "router" not in parameter.name


def _place_in_model(parameter: Parameter) -> tuple[Any, ...]:
    """Sorts parameters as the model makes them: embedding, layers, head; of a module its weight before its bias."""
    parts = parameter.name.split(".")
    modules = [_MODULES.index(part) for part in parts if part in _MODULES]
    first, *within = modules
    layer = parameter.layer if parameter.layer is not None else -1 if parameter.stage == "first" else math.inf
    return layer, first, parameter.expert or 0, within, parts[-1] == "bias"
