"""One rank of the trainer: a process that hosts the roles over the Megatron room. The controller makes it a Ray actor."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray.util

from megarl.algorithms import Denominators, Objective, advantage
from megarl.algorithms.divergence import EXACT_KL
from megarl.algorithms.value_loss import ValueObjective
from megarl.batch import Batch
from megarl.config import Config
from megarl.config.schema import ParallelConfig
from megarl.reshard.bucket import BucketSpec
from megarl.reshard.exposure import Exposure
from megarl.reshard.link import Meeting, Region
from megarl.reshard.stream import Stream
from megarl.reshard.transfer import Member
from megarl.roles.models import Models
from megarl.roles.ports import unused_port
from megarl.roles.watch import watched

if TYPE_CHECKING:
    import torch

    from megarl.bridge.layout import Copy


@watched
class Worker:
    """Methods are called on all ranks at the same time, with the same arguments but for the shard of the batch."""

    def __init__(self, config: Config, models: Models, layout: ParallelConfig, threads: int | None):
        """`models`: of the roles that these ranks host."""
        self.config = config
        self.models = models
        self.layout = layout
        self.threads = threads
        self.saves: dict[str, Any] = {}  # by role, what is being written
        self.copies: dict[str, Any] = {}  # and what it is written from

    def address(self) -> tuple[str, int]:
        """An address of this host and a free port on it, for the ranks to meet at."""
        alone = self.config.cluster.address is None
        return "127.0.0.1" if alone else ray.util.get_node_ip_address(), unused_port()

    def start(self, rank: int, world: int, address: str, port: int) -> dict[str, Any]:
        """Join the job and build the roles; answers where the rank stands."""
        import torch

        from megarl.megatron import parallel
        from megarl.reshard.writer import ShardWriter
        from megarl.roles.building import build

        layout = self.layout
        if self.threads is not None:
            torch.set_num_threads(self.threads)
        self.place = parallel.start(
            rank,
            world,
            address,
            port,
            tensor=layout.tensor,
            pipeline=layout.pipeline,
            virtual=layout.virtual,
            context=layout.context,
            expert=layout.expert,
            expert_tensor=layout.expert_tensor,
            seed=self.config.run.seed,
            # The controller gives up first: it knows who does not answer, a collective only that somebody does not.
            timeout=2 * self.config.cluster.worker_timeout,
        )
        self.roles = build(self.config, self.models, self.place, layout)
        self.objective = Objective.from_config(self.config.algorithm)
        if self.config.critic is not None:
            self.value_objective = ValueObjective.from_config(self.config.critic)
        self.writers = {}
        for name in (name for name in ("actor", "critic") if getattr(self.models, name) is not None):
            with self.roles.looking(name) as engine:
                self.writers[name] = ShardWriter(engine.parameters(), self.place)
        return asdict(self.place) | {"primary": self.place.primary, "pid": os.getpid()}

    def log_probs(self, batch: Batch) -> Batch | None:
        """RESPONSE fields `old_log_probs` and `entropy` of the actor as it is now (at the sampling temperature); `sum_p2` where
        the estimator wants it."""
        wanted = "sum_p2_BT" in advantage.required(self.config.algorithm.advantage)
        with self.roles.looking("actor") as engine:
            done = engine.log_probs(batch, temperature=self.config.rollout.temperature, sum_p2=wanted)
        names = {"log_probs": "old_log_probs", "entropy": "entropy"} | ({"sum_p2": "sum_p2"} if wanted else {})
        return self._answer(done, names)

    def reference_log_probs(self, batch: Batch) -> Batch | None:
        """RESPONSE field `ref_log_probs`; for an exact KL in the loss, at the same temperature, `ref_top_ids`, `ref_top_log_probs`
        (tokens, k) and `ref_log_rest`, or `ref_hidden` (tokens, H)."""
        kind = self.objective.exact_kl
        options: dict[str, Any] = {"temperature": self.config.rollout.temperature, "hidden": kind == "full"}
        options["top_k"] = self.config.algorithm.kl_top_k if kind == "top_k" else 0
        with self.roles.looking("reference") as engine:
            done = engine.log_probs(batch, **options)
        names = ["ref_log_probs", *(EXACT_KL[kind] if kind else ())]
        return self._answer(done, {name.removeprefix("ref_"): name for name in names})

    def values(self, batch: Batch) -> Batch | None:
        """RESPONSE field `values` of the critic as it is now."""
        with self.roles.looking("critic") as engine:
            return self._answer(engine.values(batch), {"values": "values"})

    def reward_scores(self, batch: Batch) -> Batch | None:
        """SAMPLE field `scores` (N, labels) of the reward model."""
        with self.roles.looking("reward_model") as engine:
            return self._answer(engine.scores(batch), {"scores": "scores"})

    def update(self, batch: Batch, denominators: Denominators) -> dict[str, float]:
        """One optimizer step of the actor on this data-parallel rank's shard of a mini-batch."""
        options: dict[str, Any] = {"temperature": self.config.rollout.temperature}
        beside = "reference" if self.objective.exact_kl == "full" else None
        with self.roles.learning("actor", beside) as engine:
            if beside is not None:
                options["reference_weight"] = self.roles.beside(beside).output_weight()
            return engine.train(batch, self.objective, denominators, **options)

    def update_critic(self, batch: Batch, denominators: Denominators) -> dict[str, float]:
        """One optimizer step of the critic on this data-parallel rank's shard of a mini-batch."""
        with self.roles.learning("critic") as engine:
            return engine.train(batch, self.value_objective, denominators)

    def score(self, batch: Batch) -> Batch | None:
        """RESPONSE field `log_probs` of the actor at temperature 1, for probes."""
        with self.roles.looking("actor") as engine:
            return self._answer(engine.log_probs(batch, temperature=1.0), {"log_probs": "log_probs"})

    def write(self, bucket: BucketSpec, role: str = "actor") -> dict[str, int]:
        """Put this rank's slices of a bucket's tensors, of the actor or the critic, to their places in the shared bucket; this rank's
        shares of the fingerprints that the bucket asks for."""
        with self.roles.looking(role):
            return self.writers[role].write(bucket)

    def pieces(self, bucket: BucketSpec, role: str) -> list[tuple[Copy, torch.Tensor]]:
        """This rank's slices of a bucket's tensors, for who shares no memory with it; each with where it belongs."""
        with self.roles.looking(role):
            return self.writers[role].pieces(bucket)

    def offer(self, kind: str, paths: list[str], size: int) -> str:
        """Hold memory of this rank's device for these buckets, and for no other; why it cannot be, empty where it can."""
        from megarl.reshard import devices

        return devices.offer(kind, paths, size)

    def measure(self, shapes: dict[str, tuple[int, ...]]) -> None:
        """Find the scales of the actor's matrices that engines get in float8, with all other ranks."""
        import torch.distributed as dist

        with self.roles.looking("actor"):
            self.writers["actor"].measure(shapes, lambda found: dist.all_reduce(found, dist.ReduceOp.MAX))

    def write_stream(self, stream: Stream) -> dict[str, int]:
        """The actor's slices of all buckets of an update, as the engines let go of those before."""
        with self.roles.looking("actor"):
            return self.writers["actor"].write_stream(stream, self.place.rank)

    def open(self, engines: dict[Member, list[Exposure]]) -> dict[Member, int]:
        """Map the weights of engines on this node; bytes of the actor's that this rank will write into each."""
        return self.writers["actor"].open(engines)

    def write_in_place(self, members: list[Member]) -> None:
        """The actor's slices straight into the weights of engines."""
        with self.roles.looking("actor"):
            self.writers["actor"].write_in_place(members)

    def shares(self, kinds: dict[str, str]) -> dict[str, int]:
        """This rank's shares of the fingerprints of the actor's tensors, in the dtypes that stand beside their names."""
        with self.roles.looking("actor"):
            return self.writers["actor"].shares(kinds)

    def regions(self) -> dict[str, list[Region]]:
        """The parts of the actor's tensors that this rank answers for."""
        return self.writers["actor"].regions()

    def link(self, meeting: Meeting) -> None:
        """Join the group over which weights go to engines that share no memory with this rank."""
        from megarl.reshard.link import Outlet

        self.outlet = Outlet(meeting, self.place.rank, self.regions())

    def send(self, buckets: list[BucketSpec]) -> dict[str, int]:
        """As `write_stream`, over the link; returns when all has been taken."""
        with self.roles.looking("actor"):
            return self.writers["actor"].send(buckets, self.outlet)

    def begin_save(self, folder: str, role: str, copied: bool) -> None:
        """Begin to write this rank's part of a role to a checkpoint. Not `copied`: nothing else may be called before `finish_save`."""
        from megarl.megatron.dist_checkpoint import Copies
        from megarl.roles.saving import Save

        copies = self.copies.setdefault(role, Copies()) if copied else None
        with self.roles.learning(role) as engine:
            if copies is not None:
                engine.memory.before_change = copies.settle
            source = Path(getattr(self.models, role))
            self.saves[role] = Save(Path(folder), role, engine, self.place, source, copies)

    def written(self, role: str) -> bool:
        """Whether what `begin_save` began is on the disk."""
        return self.saves[role].written

    def finish_save(self, role: str) -> dict[str, int]:
        """Wait until all ranks have written; sizes of the files this one wrote, by path in the folder."""
        return self.saves.pop(role).finish()

    def load(self, folder: str, role: str) -> bool:
        """Fill a role from a checkpoint; whether what is a rank's alone came back too."""
        from megarl.roles import saving

        with self.roles.learning(role) as engine:
            return saving.load(Path(folder), role, engine, self.place)

    def rest(self) -> dict[str, float]:
        """The roles make room for engines on their device, as far as the configuration says; what was moved since the last time."""
        return self.roles.rest(leave=self.config.rollout.pool == "actor")

    def peak_memory(self) -> int:
        """Bytes that this rank held at most since the last time: on its device, or in all where there is none."""
        import torch

        from megarl.cpu.memory import peak

        if not torch.cuda.is_available():
            return peak([os.getpid()])
        held = torch.cuda.max_memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        return held

    def _answer(self, done: Batch | None, names: dict[str, str]) -> Batch | None:
        """Only the primary rank of a data-parallel group sends an answer; the others hold the same one or none."""
        if done is None or not self.place.primary:
            return None
        answer = done.select([])
        for old, new in names.items():
            answer = answer.set(new, done[old], done.level(old))
        return answer
