"""Losses that keep experts in use, from the router's own layer, the same under every split of a mini-batch.

Both are off unless asked for: reinforcement learning trains what a policy samples, and a balancing loss moves the policy too.

For a sequence s of T_s tokens (the last one, which predicts nothing, left out), expert i of E, k experts a token, router logits
x_ti and scores p_ti (softmax of x over the experts; of sigmoid routers σ(x) divided by its sum):

    balance_s = Σ_i f_si · P_si,   f_si = E / (k·T_s) · #tokens of s that went to i,   P_si = 1 / T_s · Σ_t p_ti
    z_s       = 1 / T_s · Σ_t (log Σ_i exp x_ti)²

    loss += Σ_layers 1 / N · Σ_s (aux_loss · balance_s + z_loss · z_s),   N sequences in the mini-batch that have a loss at all

(arXiv:2412.19437, eq. 17-20; arXiv:2202.08906, eq. 5.) By sequence, not by micro-batch as Switch has it and Megatron does: then
neither the micro-batches nor the ranks show in it. Differs from the paper in that f counts where tokens really went, the
router's bias and groups included. Megatron's own losses stay off.

Reported without their coefficients, as means over the layers with experts: `moe/aux_loss` 1 / (L·N) · Σ_layers Σ_s balance_s (1 where
tokens are spread evenly), `moe/z_loss` 1 / (L·N) · Σ_layers Σ_s z_s.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.tensor_parallel import RowParallelLinear
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.moe.router import TopKRouter

from megarl.megatron.layer import PolicyLayer


@dataclass(frozen=True)
class RoutedRow:
    """Which sequence each row of a packed micro-batch belongs to, and how much each sequence counts."""

    sequence: torch.Tensor  # (T,) int64 of the whole tensor-parallel group's rows; G where a row is in none
    weights: torch.Tensor  # (G,) float32: 1 / N, or 0 for a sequence that has no loss


class RoutedLayer(PolicyLayer):
    """A transformer layer whose router knows the packed row. By layer, not by model: recomputation and pipelines run the layers
    of several micro-batches in turn."""

    def forward(self, *args: Any, packed_seq_params: Any = None, **kwargs: Any) -> Any:
        self.mlp.router.row = getattr(packed_seq_params, "routed", None)
        return super().forward(*args, packed_seq_params=packed_seq_params, **kwargs)


class BiasedExpertOut(RowParallelLinear):
    """The second matrix of an expert with biases. Megatron adds the bias in place, which autograd forbids on a single rank: there
    the answer is a view that a function of its own made."""

    def forward(self, input_: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        output, bias = super().forward(input_)
        return output.clone(), bias


class BalancingRouter(TopKRouter):
    """TopKRouter with the losses above in the place of Megatron's."""

    row: RoutedRow | None = None
    seen: torch.Tensor | float = 0.0  # (2,) this rank's summands of both losses since `forget`

    def apply_z_loss(self, logits: torch.Tensor, padding_mask: Any = None) -> torch.Tensor:
        return logits

    def routing(self, logits: torch.Tensor, padding_mask: Any = None) -> tuple[torch.Tensor, torch.Tensor]:
        probs, routing_map = super().routing(logits, padding_mask)
        balance, z = self.config.moe_aux_loss_coeff, self.config.moe_z_loss_coeff or 0.0
        if self.row is None or not (balance or z) or not torch.is_grad_enabled():
            return probs, routing_map
        flat = logits.reshape(-1, self.config.num_moe_experts).float()
        losses = balancing_losses(flat, routing_map, self.row, self.score_function, group=self.tp_cp_group)
        self.seen = (
            self.seen + losses.detach()
        )  # a recomputed layer comes here once: its first pass is without gradient
        loss = torch.dot(losses, losses.new_tensor([balance, z]))
        return MoEAuxLossAutoScaler.apply(probs, loss), routing_map


def _routers(chunks: Sequence[torch.nn.Module]) -> Iterator[BalancingRouter]:
    return (module for chunk in chunks for module in chunk.modules() if isinstance(module, BalancingRouter))


def forget(chunks: Sequence[torch.nn.Module]) -> None:
    """A new mini-batch begins."""
    for router in _routers(chunks):
        router.seen = 0.0


def report(chunks: Sequence[torch.nn.Module], device: torch.device) -> dict[str, float]:
    """`sum/moe/aux_loss` and `sum/moe/z_loss` since `forget`, the same on all ranks of a data-parallel group: to be added over these
    groups. Collective among the ranks of one."""
    routers = list(_routers(chunks))
    # Both losses, and the layers that have one: the stages have other layers, the other ranks the same layers and other tokens.
    sums = torch.zeros(3, dtype=torch.float64, device=device)
    for router in routers:
        sums[:2] += router.seen
    sums[2] = len(routers)
    dist.all_reduce(sums, group=mpu.get_pipeline_model_parallel_group())
    losses, layers = sums[:2].contiguous(), float(sums[2])
    for group in (mpu.get_tensor_model_parallel_group(), mpu.get_context_parallel_group()):
        dist.all_reduce(losses, group=group)
    aux, z = (losses / max(layers, 1.0)).tolist()
    return {"sum/moe/aux_loss": aux, "sum/moe/z_loss": z}


def balancing_losses(
    logits_TE: torch.Tensor,
    chosen_TE: torch.Tensor,
    row: RoutedRow,
    score_function: str,
    *,
    group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """(2,) this rank's summands of 1 / N · Σ_s balance_s and of 1 / N · Σ_s z_s for one layer; `group` has the row's other tokens
    (sequence, context parallelism)."""
    tokens, experts = logits_TE.shape
    sequence = row.sequence
    if len(sequence) != tokens:  # sequence parallelism: this rank's run of them
        sequence = sequence.split(tokens)[dist.get_rank(group) % (len(sequence) // tokens)]
    count = len(row.weights)
    sent_GE = logits_TE.new_zeros(count + 1, experts).index_add_(0, sequence, chosen_TE.to(logits_TE.dtype))
    length_G = logits_TE.new_zeros(count + 1).index_add_(0, sequence, logits_TE.new_ones(tokens))
    if group is not None and dist.get_world_size(group) > 1:
        dist.all_reduce(sent_GE, group=group)
        dist.all_reduce(length_G, group=group)
    length_G = length_G.clamp_min(1.0)
    weights_G = torch.cat([row.weights, row.weights.new_zeros(1)])
    scores_TE = torch.softmax(logits_TE, dim=-1)
    if score_function == "sigmoid":
        scores_TE = torch.sigmoid(logits_TE)
        scores_TE = scores_TE / (scores_TE.sum(dim=-1, keepdim=True) + 1e-20)
    # f has length · k tokens sent in its denominator, P the length.
    share_GE = sent_GE * (experts / sent_GE.sum(dim=-1, keepdim=True).clamp_min(1.0))
    per_token_GE = share_GE * (weights_G / length_G)[:, None]
    balance = (per_token_GE[sequence] * scores_TE).sum()
    z = ((weights_G / length_G)[sequence] * torch.logsumexp(logits_TE, dim=-1).square()).sum()
    return torch.stack([balance, z])
