"""What one rank of an engine holds of the checkpoint: views of SGLang's own parameters under the checkpoint's names."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from megarl.bridge import fp8
from megarl.errors import RunError

FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
# SGLang holds a layer's experts as two tensors, w13_weight (experts, 2 x MLP, hidden) and w2_weight (experts, hidden, MLP), and their
# scales likewise; the checkpoint one by one.
_EXPERTS = {"w13": ("gate_proj", "up_proj"), "w2": ("down_proj",)}
_OF_EXPERTS = [f"{which}_{kind[1:]}" for which in _EXPERTS for kind in (fp8.NUMBERS, fp8.SCALES)]
_OF_CACHE = ("k_scale", "v_scale")  # of a float8 cache; no checkpoint has them
_MIXTRAL_BLOCK, _MIXTRAL_NAMES = "block_sparse_moe.experts", {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}


class Shard(NamedTuple):
    """`view` lies in the checkpoint's tensor from `start` on along `axis`; None: it is that whole tensor."""

    view: torch.Tensor
    axis: int | None = None
    start: int = 0

    def real(self, name: str, shape: tuple[int, ...]) -> Shard:
        """The part that a tensor of the checkpoint of this shape has: SGLang rounds MLPs, heads and vocabularies up and fills up with
        zeros. Raises RunError naming the tensor where this cannot be a part of it."""
        view = self.view
        sizes = list(view.shape)
        if self.axis is not None and len(sizes) == len(shape):
            sizes[self.axis] = max(0, min(sizes[self.axis], shape[self.axis] - self.start))
            rest = view.narrow(self.axis, sizes[self.axis], view.shape[self.axis] - sizes[self.axis])
            if rest.numel() and rest.any():
                raise RunError(f"{name}: the engine's model has weights where it should have zeros of padding")
            view = view.narrow(self.axis, 0, sizes[self.axis])
        whole = [size for axis, size in enumerate(view.shape) if axis != self.axis]
        if len(view.shape) != len(shape) or whole != [s for axis, s in enumerate(shape) if axis != self.axis]:
            raise RunError(f"{name} came as {shape}, the engine's model has it as {tuple(self.view.shape)}")
        return self._replace(view=view)

    @property
    def origin(self) -> list[int]:
        """Where its first element lies in the checkpoint's tensor."""
        return [self.start if axis == self.axis else 0 for axis in range(self.view.dim())]


def shards_of(model: torch.nn.Module) -> dict[str, Shard]:
    """This rank's parameters under the checkpoint's names: views, nothing is copied.

    Fused projections and experts are cut where the checkpoint has separate tensors. Parameters that several modules share appear
    once, under the first name, as in a checkpoint with tied embeddings.
    """
    return dict(_shards(model))


def _shards(model: torch.nn.Module) -> Iterator[tuple[str, Shard]]:
    for name, parameter in model.named_parameters():
        module_name, _, kind = name.rpartition(".")
        parent, _, leaf = module_name.rpartition(".")
        module: Any = model.get_submodule(module_name)
        data = parameter.data
        if kind in _OF_CACHE:
            continue
        if leaf in FUSED:
            sizes = module.output_partition_sizes
            parts = data.split(list(fp8.blocks(sizes)) if f".{kind}" == fp8.SCALES else sizes)
            for part, view in zip(FUSED[leaf], parts, strict=True):
                yield f"{parent}.{part}.{kind}", Shard(view, 0, _place(module, part) * len(view))
        elif leaf == "experts" and kind in _OF_EXPERTS:
            yield from _of_experts(module_name, kind, data, module)
        elif hasattr(module, "org_vocab_size"):
            yield name, Shard(data, 0, module.shard_indices.org_vocab_start_index)
        elif hasattr(module, "input_size_per_partition") and data.dim() > 1:  # cut by columns
            yield name, Shard(data, 1, _rank(module.tp_group) * data.shape[1])
        elif hasattr(module, "output_partition_sizes"):  # by rows
            yield name, Shard(data, 0, _rank(module.tp_group) * len(data))
        else:
            yield name, Shard(data)


def _of_experts(module_name: str, kind: str, weights: torch.Tensor, module: Any) -> Iterator[tuple[str, Shard]]:
    which, _, kind = kind.partition("_")
    parts, axis = _EXPERTS[which], 1 if which == "w2" else 0
    first = module.moe_ep_rank * module.num_local_experts
    for number, expert in enumerate(weights, first):
        for part, view in zip(parts, expert.chunk(len(parts)), strict=True):
            name = _MIXTRAL_NAMES[part] if module_name.endswith(_MIXTRAL_BLOCK) else part
            yield f"{module_name}.{number}.{name}.{kind}", Shard(view, axis, module.moe_tp_rank * view.shape[axis])


def _place(module: Any, part: str) -> int:
    """Which of a fused projection's equal shares this rank has. With more ranks than key-value heads several have the same."""
    if part in ("k_proj", "v_proj"):
        return _rank(module.kv_tp_group) // module.num_kv_head_replicas
    return _rank(module.tp_group)


def _rank(group: Any) -> int:
    """SGLang's group of ranks over which a module is cut; None: it is not."""
    return 0 if group is None else int(group.rank_in_group)
