"""What autograd really keeps during a training step, counted on real ranks, beside what is estimated."""

from __future__ import annotations

import re
import resource
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megarl import models
from megarl.algorithms import Objective, denominators
from megarl.batch import Batch, Level, Sample
from megarl.bridge.activations import Estimate, Layout, MicroBatch
from megarl.bridge.model_map import ModelMap
from megarl.config.schema import OptimizerConfig
from tests.megatron.harness import before_update


@dataclass(frozen=True)
class Case:
    model: str
    layout: Layout = field(default_factory=Layout)
    dtype: str = "float32"
    recompute: str = "none"
    expert: int = 1
    prompt: int = 31
    response: int = 62
    samples: int = 8
    together: int = 2  # samples of a micro-batch


class Kept:
    """Bytes of the storages that autograd holds, each counted once; parameters, which are there anyway, are left out."""

    def __init__(self, parameters):
        self.known = {p.untyped_storage().data_ptr() for p in parameters}
        self.holders: Counter[int] = Counter()
        self.now = self.peak = 0

    def hooks(self):
        return torch.autograd.graph.saved_tensors_hooks(lambda t: _Held(self, t), lambda held: held.tensor)

    def take(self, storage: torch.UntypedStorage) -> None:
        self.holders[storage.data_ptr()] += 1
        if self.holders[storage.data_ptr()] == 1:
            self.now += storage.nbytes()
            self.peak = max(self.peak, self.now)

    def let_go(self, storage: torch.UntypedStorage) -> None:
        self.holders[storage.data_ptr()] -= 1
        if self.holders[storage.data_ptr()] == 0:
            self.now -= storage.nbytes()


class _Held:
    def __init__(self, kept: Kept, tensor: torch.Tensor):
        self.tensor, self.kept = tensor, kept
        self.counts = tensor.untyped_storage().data_ptr() not in kept.known
        if self.counts:
            kept.take(tensor.untyped_storage())

    def __del__(self):
        if self.counts:
            self.kept.let_go(self.tensor.untyped_storage())


class Peak(TorchDispatchMode):
    """Bytes of the tensors that operations made and that are there at one time, at most, what was there before left out."""

    def __init__(self, *known: torch.Tensor):
        super().__init__()
        self.known = {t.untyped_storage().data_ptr() for t in known}
        self.alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.alive = {at: (ref, size) for at, (ref, size) in self.alive.items() if not ref.expired()}
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage.data_ptr() not in self.known:
                    self.alive[storage.data_ptr()] = (StorageWeakRef(storage), storage.nbytes())
        self.peak = max(self.peak, sum(size for _, size in self.alive.values()))
        return out


def head_peak(model: ModelMap, dtype: torch.dtype, responses: int, chunk: int, exact_kl: str | None) -> int:
    """Bytes at most in a backward pass of the head, what the forward pass gave for it left out but for a reference's states."""
    from megarl.megatron.head import divergences

    vocabulary, width = model.dims.vocab, model.dims.hidden
    g = torch.Generator().manual_seed(0)
    hidden, states = (torch.randn(responses, width, generator=g).to(dtype) for _ in range(2))
    weight, other = (torch.randn(vocabulary, width, generator=g).mul_(0.1).to(dtype) for _ in range(2))
    targets = torch.randint(0, vocabulary, (responses,), generator=g)
    options = {"vocabulary": vocabulary, "chunk": chunk}
    compared: dict[str, Any] = {}
    if exact_kl == "full":
        compared["reference"] = (states, other)
    elif exact_kl == "top_k":
        compared["at"] = divergences(states, other, targets, top_k=4, **options).top_ids
    done = divergences(hidden.requires_grad_(), weight.requires_grad_(), targets, **compared, **options)
    loss = done.scores.log_probs.sum() + 0.1 * done.scores.entropy.sum()
    if exact_kl:
        loss = loss + (done.kl if exact_kl == "full" else done.at_log_probs.sum(dim=1) + done.log_rest).sum()
    with Peak(hidden, weight, states, other) as peak:
        loss.backward()
    return peak.peak + (states.nbytes if exact_kl == "full" else 0)


def equal_samples(case: Case) -> Batch:
    g = torch.Generator().manual_seed(0)
    samples = []
    for i in range(case.samples):
        prompt, response = (torch.randint(5, 400, (n,), generator=g).tolist() for n in (case.prompt, case.response))
        samples.append(Sample(str(i), str(i), prompt, response, [1] * len(response), [0.0] * len(response)))
    batch = Batch.from_samples(samples)
    count = int(batch.response_lengths.sum())
    batch = batch.set("old_log_probs", torch.full((count,), -6.0), Level.RESPONSE)
    return batch.set("advantages", torch.randn(count, generator=g), Level.RESPONSE)


def compared(rank: int, world: int, port: int, cases: list[Case]) -> list[tuple[int, int]]:
    """Bytes kept at most, measured and estimated, of each case on this rank."""
    from megarl.megatron import parallel
    from megarl.megatron.engine import EngineSettings, MegatronEngine

    found = []
    for number, case in enumerate(cases):
        cut = case.layout
        place = parallel.start(
            rank,
            world,
            "127.0.0.1",
            port + number,
            tensor=cut.tensor,
            pipeline=cut.pipeline,
            virtual=cut.virtual,
            context=cut.context,
            expert=case.expert,
            expert_tensor=cut.expert_tensor,
            seed=1,
        )
        length = case.prompt + case.response
        engine = MegatronEngine(
            models.resolve(case.model),
            place,
            EngineSettings(
                case.dtype,
                cut.sequence,
                case.recompute,
                micro_batch_tokens=case.together * length,
                share_prompts=False,
                stage_layers=cut.stage_layers,
            ),
            optimizer=OptimizerConfig(),
        )
        batch = equal_samples(case)
        totals = denominators(batch.padded("loss_mask"))
        own = batch.shard(place.data, place.data_size)
        kept = Kept(p for chunk in engine.chunks for p in chunk.parameters())
        with kept.hooks():
            engine.train(own, Objective(), totals)
        estimate = Estimate(engine.map, cut, dtype=case.dtype, recompute=case.recompute)
        micro = MicroBatch.of([length - 1] * case.together, case.response * case.together)
        memory = estimate(micro, micro_batches=len(own) // case.together, rank=place.pipeline)
        found.append((kept.peak, memory.held))
        parallel.stop()
    return found


def starved(rank: int, world: int, port: int, megabytes: int, recompute: str, response: int) -> tuple[list[str], float]:
    """An update of more than the process may take, again with the setting that each error names; what the errors said, and the
    loss of the update that fitted (0: none did)."""
    from megarl.errors import RunError
    from megarl.megatron import parallel
    from megarl.megatron.engine import EngineSettings, MegatronEngine
    from megarl.megatron.shortage import room

    place = parallel.start(rank, world, "127.0.0.1", port, tensor=1, pipeline=1, seed=1)

    def engine(budget: int, recompute: str) -> MegatronEngine:
        settings = EngineSettings("float32", recompute=recompute, micro_batch_tokens=budget, share_prompts=False)
        return MegatronEngine(models.resolve("tiny-llama"), place, settings, optimizer=OptimizerConfig())

    case = Case("tiny-llama", prompt=40, response=response, samples=16)
    batch = equal_samples(case)
    totals = denominators(batch.padded("loss_mask"))
    engine(8 * 60, "none").train(batch.rows(0, 1), Objective(), totals)  # threads and libraries take their memory
    one = engine(1 << 20, recompute)
    told: list[str] = []
    hard = allow(megabytes)
    assert room() <= megabytes << 20
    try:
        while len(told) < 8:
            try:
                return told, one.train(batch, Objective(), totals)["sum/loss"]
            except RunError as error:
                told.append(str(error))
            if not (found := re.search(r"set micro_batch_tokens=(\d+) or less(?: with recompute=(\w+))?$", told[-1])):
                break
            recompute = found[2] or recompute
            one = engine(int(found[1]), recompute)
        return told, 0.0
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
        parallel.stop()


def allow(megabytes: int) -> int:
    """From now on this process may take so much more memory and no more. Answers the limit to put back."""
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    status = Path("/proc/self/status").read_text().splitlines()
    size = next(int(line.split()[1]) << 10 for line in status if line.startswith("VmSize:"))
    resource.setrlimit(resource.RLIMIT_AS, (size + (megabytes << 20), hard))
    return hard


def without_states(rank: int, world: int, port: int, folder: str) -> tuple[str, float]:
    """What an update says for whose optimizer states there is no room, and the largest change of a weight."""
    from megarl.errors import RunError
    from megarl.megatron import parallel
    from megarl.megatron.engine import EngineSettings, MegatronEngine

    place = parallel.start(rank, world, "127.0.0.1", port, tensor=1, pipeline=1, seed=1)
    engine = MegatronEngine(Path(folder), place, EngineSettings("float32"), optimizer=OptimizerConfig())
    before = {p.name: t.detach().clone() for p, t in engine.parameters()}
    limits: list[int] = []
    before_update(engine, lambda: limits.append(allow(8)))
    batch = equal_samples(Case("", prompt=4, response=6, samples=2))
    try:
        engine.train(batch, Objective(), denominators(batch.padded("loss_mask")))
        told = ""
    except RunError as error:
        told = str(error)
    finally:
        for hard in limits:
            resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
    changed = max(float((t.detach() - before[p.name]).abs().max()) for p, t in engine.parameters())
    parallel.stop()
    return told, changed
