"""Corrections to single modules of Megatron-core that take CUDA (or Transformer Engine's optimizer) for granted.

`MENDS` maps a module's name to a function that is called with the module right after its import. Each mend is about one
statement of Megatron-core that is wrong on a CPU; what it was is said beside it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch


def _jit(module: ModuleType) -> None:
    module.disable_jit_fuser()  # torch.compile at import time would start a C++ build for every fused function


def _random(module: ModuleType) -> None:
    """The tracked generator of tensor-parallel regions is the CPU's: there is no other."""

    def set_state(new_state: torch.Tensor, device: Any = -1, graph_safe: bool = False) -> None:
        torch.set_rng_state(new_state)

    def get_state(device: Any = "cpu", clone: bool = False, graph_safe: bool = False) -> torch.Tensor:
        return torch.get_rng_state()

    module._set_cuda_rng_state = set_state  # type: ignore[attr-defined]
    module._get_cuda_rng_state = get_state  # type: ignore[attr-defined]
    # fork() warns when the CPU generator moved inside a region; here that is the generator it is meant to track
    logging.getLogger(module.__name__).addFilter(lambda record: "GPU RNG context" not in record.getMessage())


def _mappings(module: ModuleType) -> None:
    """gloo gathers and reduces parts of one size only; experts' ranks get as many tokens as the router sends them."""
    gather, scatter = module._gather_along_first_dim, module._reduce_scatter_along_first_dim

    def gather_along_first_dim(
        input_: Any, group: Any, output_split_sizes: Any = None, use_global_buffer: bool = False
    ) -> Any:
        if output_split_sizes is None or group.size() == 1:
            return gather(input_, group, output_split_sizes, use_global_buffer)
        longest = max(output_split_sizes)
        own = input_.new_zeros(longest, *input_.shape[1:])
        own[: input_.shape[0]] = input_
        parts = [torch.empty_like(own) for _ in output_split_sizes]
        torch.distributed.all_gather(parts, own, group=group)
        return torch.cat([part[:size] for part, size in zip(parts, output_split_sizes, strict=True)])

    def reduce_scatter_along_first_dim(
        input_: Any, group: Any, input_split_sizes: Any = None, use_global_buffer: bool = False
    ) -> Any:
        if input_split_sizes is None or group.size() == 1:
            return scatter(input_, group, input_split_sizes, use_global_buffer)
        whole = input_.contiguous().clone()
        torch.distributed.all_reduce(whole, group=group)
        return whole.split(input_split_sizes)[group.rank()].contiguous()

    module._gather_along_first_dim = gather_along_first_dim  # type: ignore[attr-defined]
    module._reduce_scatter_along_first_dim = reduce_scatter_along_first_dim  # type: ignore[attr-defined]


def _moe_utils(module: ModuleType) -> None:
    module.__dict__.setdefault("te_general_gemm", None)  # bound only with Transformer Engine, read without it too
    upstream = module.maybe_move_tensor_to_cpu

    def maybe_move_tensor_to_cpu(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        # upstream converts only CUDA tensors, but gloo's all_to_all_single takes no tensors for split sizes
        if as_numpy and isinstance(tensor, torch.Tensor):
            return tensor.numpy()
        return upstream(tensor, as_numpy, record_stream)

    module.maybe_move_tensor_to_cpu = maybe_move_tensor_to_cpu  # type: ignore[attr-defined]


def _multi_latent_attention(module: ModuleType) -> None:
    # takes Transformer Engine to be there when the names of its wrappers can be imported, which without it are None
    if not isinstance(module.TELinear, type):
        module.HAVE_TE = False  # type: ignore[attr-defined]


def _distrib_optimizer(module: ModuleType) -> None:
    """torch's AdamW keeps a `step` tensor a parameter; the distributed optimizer was written for optimizers that do not."""
    cls = module.DistributedOptimizer
    set_states = cls._set_main_param_and_optimizer_states
    state_dict, load_state_dict = cls.state_dict, cls.load_state_dict

    def set_main_param_and_states(self: Any, model_param: Any, tensors: dict[str, torch.Tensor]) -> Any:
        # copies every key of the state, but a checkpoint's shards hold no `step`: load_state_dict has restored it already
        group, order = self.model_param_group_index_map[model_param]
        state = self.optimizer.state[self.optimizer.param_groups[group]["params"][order]]
        if "step" in state and "step" not in tensors:
            tensors = {**tensors, "step": state["step"]}
        return set_states(self, model_param, tensors)

    def state_dict_with_step(self: Any) -> Any:
        # asserts that there is one step count, which a fresh optimizer does not have yet
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                state = self.optimizer.state[parameter]
                if not state:
                    zeros = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
                    state.update(step=torch.tensor(0.0), **zeros)
        return state_dict(self)

    def load_own_steps(self: Any, state: Any) -> None:
        # hands every parameter the same `step` tensor, which each of them then counts up
        load_state_dict(self, state)
        for own in self.optimizer.state.values():
            if isinstance(own.get("step"), torch.Tensor):
                own["step"] = own["step"].clone()

    cls._set_main_param_and_optimizer_states = set_main_param_and_states
    cls.state_dict = state_dict_with_step
    cls.load_state_dict = load_own_steps


MENDS: dict[str, Callable[[ModuleType], None]] = {
    "megatron.core.jit": _jit,
    "megatron.core.tensor_parallel.random": _random,
    "megatron.core.tensor_parallel.mappings": _mappings,
    "megatron.core.transformer.moe.moe_utils": _moe_utils,
    "megatron.core.transformer.multi_latent_attention": _multi_latent_attention,
    "megatron.core.optimizer.distrib_optimizer": _distrib_optimizer,
}
