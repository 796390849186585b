"""The Megatron engine of one rank: a model stage, forward passes and training steps over a micro-batch plan.

Numbers do not depend on the plan or the layout: losses arrive divided by global denominators, gradients are summed over
micro-batches and data-parallel ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.distributed import finalize_model_grads
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region, gather_from_sequence_parallel_region

from megarl.algorithms import Denominators, Objective, ObjectiveResult
from megarl.algorithms.divergence import EXACT_KL, top_k_kl
from megarl.batch import Batch, Level
from megarl.batch.packing import Packed, cut, pack, plan_runs
from megarl.bridge.activations import Estimate, Layout
from megarl.bridge.heads import Head
from megarl.bridge.model_map import ModelMap, Parameter
from megarl.config import schema
from megarl.errors import RunError
from megarl.megatron import experts
from megarl.megatron import model as stage
from megarl.megatron.emulate import Emulation, emulate_fp8
from megarl.megatron.head import Divergences, TokenScores, divergences, join
from megarl.megatron.limits import uses_transformer_engine
from megarl.megatron.offload import Memory
from megarl.megatron.optimizer import Optimizer, learning
from megarl.megatron.optimizer_settings import OptimizerSettings
from megarl.megatron.parallel import Place, device
from megarl.megatron.precision import PrecisionSettings
from megarl.megatron.schedule import Schedule, micro_batch_count, most
from megarl.megatron.shortage import estimates_of, is_shortage, room, sentence


@dataclass(frozen=True)
class EngineSettings:
    """What an engine needs to know of the configuration."""

    dtype: str
    sequence: bool = False
    recompute: str = "none"
    micro_batch_tokens: int = 8192
    logits_chunk_tokens: int = 1024
    share_prompts: bool | None = None
    stage_layers: tuple[int, ...] | None = (
        None  # of each (virtual) pipeline stage, in the model's order; None: all alike
    )
    # Coefficients of the losses that keep experts in use (experts.py), of a model that learns.
    aux_loss: float = 0.0
    z_loss: float = 0.0
    precision: PrecisionSettings | None = None  # None: `dtype`, no float8

    @classmethod
    def of(cls, config: schema.Config) -> EngineSettings:
        actor = config.actor
        return cls(
            config.model.dtype,
            actor.parallel.sequence,
            actor.recompute,
            actor.micro_batch_tokens,
            actor.logits_chunk_tokens,
            actor.share_prompts,
            tuple(actor.parallel.stage_layers) if actor.parallel.stage_layers else None,
            actor.experts.aux_loss,
            actor.experts.z_loss,
            PrecisionSettings(config.model.dtype, **vars(actor.precision)),
        )


class MegatronEngine:
    """One rank's part of a model. Without an optimizer it can only look (reference), with one it can learn (actor)."""

    def __init__(
        self,
        folder: Path,
        place: Place,
        settings: EngineSettings,
        *,
        optimizer: schema.OptimizerConfig | OptimizerSettings | None = None,
        total_updates: int = 1,
        head: Head | None = None,
        reader: Any = None,
    ):
        """`reader`: where the weights come from, if not from `folder` (`load_hf`)."""
        self.map = ModelMap.from_hf(folder, head)
        self.place = place
        self.settings = settings
        # The attention that knows shared prompts is the local one, and under context parallelism a prefix is something else.
        alone = place.context_size == 1
        self.balances = self.map.has_experts and bool(settings.aux_loss or settings.z_loss)
        self.share_prompts = alone and not uses_transformer_engine() and settings.share_prompts is not False
        self.share_prompts = self.share_prompts and not self.balances  # these losses are by sequence
        self.precision = settings.precision or PrecisionSettings(settings.dtype)
        self.config = stage.transformer_config(
            self.map,
            place,
            dtype=settings.dtype,
            sequence=settings.sequence,
            recompute=settings.recompute,
            stage_layers=settings.stage_layers,
            aux_loss=settings.aux_loss,
            z_loss=settings.z_loss,
            precision=self.precision,
        )
        self.chunks = stage.build(self.map, place, self.config)
        stage.load_hf(self.chunks, self.map, folder, place, reader)
        self.emulations: list[Emulation] = []
        if self.precision.emulated:
            self.emulations = [emulate_fp8(chunk, self.precision) for chunk in self.chunks]
        self.optimizer: Optimizer | None = None
        if optimizer is not None:
            self.chunks, self.optimizer = learning(
                self.chunks,
                list(self.parameters()),
                self.map,
                self.config,
                optimizer,
                dtype=settings.dtype,
                ranks=place.data_size * place.context_size,
                total_updates=total_updates,
                fp8_params=self.precision.fp8_params,
            )
            self.config.grad_scale_func = self.optimizer.inner.scale_loss
        self.config.finalize_model_grads_func = _sum_gradients
        self.memory = Memory(self.chunks, self.optimizer)
        self.schedule = Schedule(self.config, place)

    def parameters(self) -> Iterator[tuple[Parameter, torch.Tensor]]:
        """This rank's parameters and the bridge's description of each."""
        return stage.parameters_of(self.chunks, self.map)

    @torch.no_grad()
    def log_probs(
        self, batch: Batch, *, temperature: float, sum_p2: bool = False, top_k: int = 0, hidden: bool = False
    ) -> Batch | None:
        """Log-probs and entropies of the response tokens, as a batch of RESPONSE fields in the order of `batch`; with `sum_p2` also
        the sum of the squared probabilities of the whole vocabulary in each one's place.

        For an exact KL to this model: with `top_k` also `top_ids`, `top_log_probs` (tokens, k) of the likeliest tokens there and
        `log_rest`, the log of the mass of all others; with `hidden` also `hidden`, the (tokens, H) states that predict.
        None on ranks whose stage is not the last.
        """
        names = ["log_probs", "entropy", *(["sum_p2"] if sum_p2 else [])]
        names += [*(["top_ids", "top_log_probs", "log_rest"] if top_k else []), *(["hidden"] if hidden else [])]
        options = {"sum_p2": sum_p2, "top_k": top_k}
        return self._look(batch, partial(self._scores_only, temperature, options, hidden), names)

    def output_weight(self) -> torch.Tensor | None:
        """(V/ranks, H) this rank's rows of the output layer; None on ranks whose stage is not the last."""
        return stage.unwrap(self.chunks[-1]).output_weight() if self.place.last_stage else None

    def train(
        self,
        batch: Batch,
        objective: Callable,
        denominators: Denominators,
        *,
        temperature: float = 1.0,
        reference_weight: torch.Tensor | None = None,
    ) -> dict[str, Any]:
        """One optimizer step on this rank's shard of a mini-batch.

        `batch` needs the RESPONSE fields that the objective reads. `reference_weight`: the reference's `output_weight`, for the KL
        over the whole vocabulary. Returns `sum/NAME` (to be added over data-parallel ranks) and
        `max/NAME` (to be maximised) of the last stage; where losses of experts are learned from, their means of every rank as
        `sum/moe/NAME`; and of every rank `grad_norm`, `lr`, `applied` (0: the gradient was not
        finite and nothing was changed), `offending`: the indices in `batch` of samples whose own gradient is not finite then.
        """
        if self.optimizer is None:
            raise RuntimeError("this engine was built without an optimizer")
        self.memory.need()
        for chunk in self.chunks:
            chunk.train()
            chunk.zero_grad_buffer()
        self.optimizer.inner.zero_grad()
        loss = partial(self._loss, objective, denominators, temperature)
        if reference_weight is not None:
            loss = partial(loss, reference_weight=reference_weight)
        weigh = partial(_sequence_weights, denominators) if self.balances else None
        experts.forget(self.chunks)
        results = self._run(batch, self._plan(batch), loss, forward_only=False, weigh=weigh)
        self.memory.before_change()
        try:
            update = self.optimizer.update()
        except (MemoryError, RuntimeError) as error:
            if not is_shortage(error):
                raise
            raise RunError(
                "out of memory in the optimizer: its states do not fit beside the model, whatever the micro-batches; cut them over "
                "more data-parallel ranks (optimizer.distributed), or the model over more ranks"
            ) from error
        metrics: dict[str, float] = {}
        for name, value in ((k, float(v)) for r in results for k, v in r.items()):
            metrics[name] = (
                max(metrics.get(name, value), value) if name.startswith("max/") else metrics.get(name, 0) + value
            )
        if self.balances:
            metrics |= experts.report(self.chunks, device())
        offending = [] if update.applied else self._offending(batch, loss, weigh)
        update_metrics = {"grad_norm": update.grad_norm, "lr": update.lr, "applied": float(update.applied)}
        return metrics | update_metrics | {"offending": offending}

    def _offending(self, batch: Batch, loss: Callable, weigh: Callable | None) -> list[int]:
        """Samples whose gradient alone is not finite: first the micro-batches in question, then their samples one by one."""
        with_samples = [part for part in self._plan(batch) if part]
        suspects = [i for part in self._spoilt(batch, with_samples, loss, weigh) for i in part]
        return sorted(i for (i,) in self._spoilt(batch, [[i] for i in suspects], loss, weigh))

    def _spoilt(self, batch: Batch, parts: list[list[int]], loss: Callable, weigh: Callable | None) -> list[list[int]]:
        """Those of the parts whose gradients on this rank are not finite, each run on its own; gradients are lost."""
        spoilt = []
        summing, self.config.finalize_model_grads_func = self.config.finalize_model_grads_func, _leave_gradients
        for part in parts + [[]] * (most(len(parts), self.place) - len(parts)):
            for chunk in self.chunks:
                chunk.zero_grad_buffer()
            plan = [part] + [[]] * (micro_batch_count(1, self.place) - 1)
            self._run(batch, plan, loss, forward_only=False, weigh=weigh)
            # Experts are left out: theirs are gradients of other ranks' samples, too.
            buffers = (buffer.grad_data for chunk in self.chunks for buffer in chunk.buffers)
            bad = torch.tensor(float(not all(bool(b.isfinite().all()) for b in buffers)), device=device())
            for group in (mpu.get_model_parallel_group(), mpu.get_context_parallel_group()):
                dist.all_reduce(bad, dist.ReduceOp.MAX, group=group)
            spoilt += [part] * int(bad)
        self.config.finalize_model_grads_func = summing
        return [part for part in spoilt if part]

    def _plan(self, batch: Batch) -> list[list[int]]:
        """Sample indices of each micro-batch. Where the layout asks for more micro-batches than the budget of tokens, they are
        smaller, and the rest is empty."""
        budget = self.settings.micro_batch_tokens
        plan = plan_runs(batch, budget, share_prompts=self.share_prompts)
        count = micro_batch_count(len(plan), self.place)
        if count > len(plan):
            finer = plan_runs(batch, budget, share_prompts=self.share_prompts, at_least=count)
            plan = finer if len(finer) <= count else plan
        return plan + [[]] * (count - len(plan))

    def _look(self, batch: Batch, finish: Callable, names: Sequence[str]) -> Batch | None:
        """Forward passes; what `finish` reported under these names as RESPONSE fields in the order of `batch`."""
        self.memory.need("parameters")
        for chunk in self.chunks:
            chunk.eval()
        plan = self._plan(batch)
        results = self._run(batch, plan, finish, forward_only=True)
        if not self.place.last_stage:
            return None
        order = torch.tensor([i for part in plan for i in part], dtype=torch.long)
        done = batch.take(order).select([])
        for name in names:
            flat = torch.cat([r[name] for r in results]) if results else torch.zeros(0)
            done = done.set(name, flat.cpu(), Level.RESPONSE)
        return done.take(torch.argsort(order))

    def _run(
        self,
        batch: Batch,
        plan: list[list[int]],
        finish: Callable,
        *,
        forward_only: bool,
        weigh: Callable[[Batch], torch.Tensor] | None = None,
    ) -> list[dict[str, Any]]:
        """Forward (and backward) passes over a plan; every layout goes through here. Answers what `finish` made of each
        micro-batch. `weigh`: how much each sample counts in the losses that keep experts in use."""
        if not plan:
            # This rank has no samples, but its gradients take part in the sum over ranks.
            if not forward_only:
                _sum_gradients(self.chunks)
            return []
        parts = [batch.take(torch.tensor(indices, dtype=torch.long)) for indices in plan]
        packed = [(part, self._pack(part)) for part in parts]

        def forward(iterator, chunk):
            micro, row = next(iterator)
            params = stage.packed_params(row, self.config, weigh(micro) if weigh else None)
            tokens, positions = row.tokens.to(device())[None], row.positions.to(device())[None]
            hidden = chunk(tokens, positions, None, packed_seq_params=params)
            return hidden, partial(self._finish, finish, micro, row)

        shares = self.place.tensor_size if self.settings.sequence else 1
        lengths = [len(row.tokens) // shares for _, row in packed]
        free = room()
        try:
            return self.schedule(self.chunks, packed, lengths, forward, forward_only=forward_only)
        except (MemoryError, RuntimeError) as error:
            if not is_shortage(error):
                raise
            told = str(error).splitlines()[:1]
        # Raised here, where what the failed pass held is let go: a sentence needs memory too.
        exact_kl = next((kind for kind, fields in EXACT_KL.items() if fields[0] in batch.names), None)
        said = self._shortage([row for _, row in packed], not forward_only, free, exact_kl)
        raise RunError(said) from MemoryError(*told)

    def _shortage(self, rows: list[Packed], learns: bool, free: int, exact_kl: str | None) -> str:
        place, settings = self.place, self.settings
        layout = Layout(
            place.tensor_size,
            place.pipeline_size,
            place.virtual_size,
            place.context_size,
            place.expert_tensor_size,
            settings.sequence,
            settings.stage_layers,
        )
        estimate = Estimate(
            self.map,
            layout,
            dtype=settings.dtype,
            recompute=settings.recompute,
            chunk=settings.logits_chunk_tokens,
            learns=learns,
            local=not uses_transformer_engine(),
            exact_kl=exact_kl,
        )
        return sentence("an update" if learns else "a forward pass", rows, layout, estimates_of(estimate), free)

    def _pack(self, micro: Batch) -> Packed:
        """The row of tokens of a micro-batch, or this rank's piece of it."""
        multiple = self.precision.token_multiple * (self.place.tensor_size if self.settings.sequence else 1)
        ranks = self.place.context_size
        row = pack(micro, share_prompts=self.share_prompts, multiple=multiple, context=ranks)
        return row if ranks == 1 else cut(row, self.place.context, ranks)

    def _finish(self, finish: Callable, micro: Batch, row: Packed, hidden: torch.Tensor):
        loss, report = finish(micro, row, hidden)
        return loss, torch.zeros((), dtype=torch.int), report

    def _states(self, row: Packed, hidden: torch.Tensor, *, shared_out: bool) -> torch.Tensor:
        """(R, H) states that predict the response tokens, of those predicted on this rank.

        `shared_out`: what comes after is shared out over the tensor-parallel ranks, so that each one's gradient is a part of the
        whole; else each does all of it.
        """
        if self.settings.sequence:
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=shared_out)
        elif shared_out:
            hidden = copy_to_tensor_model_parallel_region(hidden)
        return hidden[:, 0].index_select(0, row.predicts.to(hidden.device))

    def _scores(self, row: Packed, hidden: torch.Tensor, temperature: float, **options: Any) -> Divergences:
        """`options`: of `divergences`, for the response tokens predicted on this rank. The answer is for all of the micro-batch."""
        done = divergences(
            self._states(row, hidden, shared_out=True),
            stage.unwrap(self.chunks[-1]).output_weight(),
            row.targets.to(hidden.device),
            vocabulary=self.map.dims.vocab,
            temperature=temperature,
            chunk=self.settings.logits_chunk_tokens,
            group=mpu.get_tensor_model_parallel_group(),
            softcap=self.config.final_softcap,
            **options,
        )
        if row.piece is None:
            return done
        floats = {**done.scores._asdict(), "kl": done.kl, "log_rest": done.log_rest}
        there = {name: values for name, values in floats.items() if values is not None}
        floats |= dict(zip(there, self._whole(row, torch.stack(list(there.values()))), strict=True))
        scores = TokenScores(floats.pop("log_probs"), floats.pop("entropy"), floats.pop("sum_p2"))
        wide = {name: getattr(done, name) for name in ("at_log_probs", "top_ids", "top_log_probs")}
        return Divergences(
            scores, **floats, **{n: None if x is None else self._whole(row, x.t()).t() for n, x in wide.items()}
        )

    def _whole(self, row: Packed, values: torch.Tensor) -> torch.Tensor:
        """(N, R here) values of the response tokens predicted on this rank -> (N, R) of all of the micro-batch: what comes
        after sees whole sequences."""
        if row.piece is None:
            return values
        return join(values, row.piece.slots.to(values.device), row.piece.responses, mpu.get_context_parallel_group())

    def _scores_only(
        self,
        temperature: float,
        options: dict[str, Any],
        with_hidden: bool,
        micro: Batch,
        row: Packed,
        hidden: torch.Tensor,
    ):
        done = self._scores(row, hidden, temperature, **options)
        report = done.scores._asdict() | done._asdict()
        if with_hidden:
            report["hidden"] = self._whole(row, self._states(row, hidden, shared_out=False).t()).t()
        return torch.zeros((), device=hidden.device), report

    def _loss(
        self,
        objective: Objective,
        denominators: Denominators,
        temperature: float,
        micro: Batch,
        row: Packed,
        hidden: torch.Tensor,
        *,
        reference_weight: torch.Tensor | None = None,
    ):
        kind = getattr(objective, "exact_kl", None)
        options = self._compared(kind, micro, row, hidden, reference_weight)
        done = self._scores(row, hidden, temperature, **options)
        scores = done.scores
        if not len(micro):
            return scores.log_probs.sum(), {}  # an empty micro-batch: nothing, but a backward pass like any other
        flat = micro.response_mask.to(hidden.device)
        wide = EXACT_KL.get(kind, ())  # of what is compared, the objective sees the KL alone
        fields = [name for name in micro.names if micro.level(name) is Level.RESPONSE and name not in wide]
        data = {name: micro.padded(name).to(hidden.device) for name in fields}
        if kind == "full":
            data["exact_kl"] = on_rectangle(done.kl, flat)
        elif kind == "top_k":
            theirs = [micro[name].to(hidden.device) for name in ("ref_top_log_probs", "ref_log_rest")]
            kl = top_k_kl(done.at_log_probs, theirs[0], done.log_rest, theirs[1])
            data["exact_kl"] = on_rectangle(kl, flat)
        result = objective(on_rectangle(scores.log_probs, flat), on_rectangle(scores.entropy, flat), data, denominators)
        return result.loss, report_of(result)

    def _compared(
        self, kind: str | None, micro: Batch, row: Packed, hidden: torch.Tensor, weight: torch.Tensor | None
    ) -> dict[str, Any]:
        """What `divergences` needs of the reference, for the response tokens predicted on this rank."""
        if kind is None:
            return {}
        values = micro["ref_hidden" if kind == "full" else "ref_top_ids"]
        values = (values if row.piece is None else values[row.piece.slots]).to(hidden.device)
        return {"reference": (values, weight)} if kind == "full" else {"at": values}


def report_of(result: ObjectiveResult) -> dict[str, torch.Tensor]:
    """`sum/NAME` and `max/NAME` of a micro-batch."""
    report = {f"sum/{k}": v.detach().clone() for k, v in result.sums.items()}
    report |= {f"max/{k}": v.detach().clone() for k, v in result.maxima.items()}
    return report | {"sum/loss": result.loss.detach().clone()}


def on_rectangle(flat: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """(R, ...) values of the real positions -> (B, T, ...), zero elsewhere; differentiable."""
    rest = flat.shape[1:]
    whole = torch.zeros((*mask.shape, *rest), dtype=flat.dtype, device=flat.device)
    return whole.masked_scatter(mask.view(*mask.shape, *(1 for _ in rest)).expand_as(whole), flat)


def _sum_gradients(models: list, num_tokens=None, **kwargs) -> None:
    """Megatron's gradient reductions without its division: the loss was already divided by global denominators."""
    finalize_model_grads(models, None, **kwargs)


def _sequence_weights(denominators: Denominators, micro: Batch) -> torch.Tensor:
    """(samples,) what each sequence counts in a mean over the mini-batch's sequences that have a loss."""
    if not len(micro):
        return torch.zeros(0)
    return micro.padded("loss_mask").bool().any(dim=1).float() / (denominators.sequences or 1.0)


def _leave_gradients(models: list, num_tokens=None, **kwargs) -> None:
    """In place of Megatron's reductions, to see what the samples of this rank alone have done."""
