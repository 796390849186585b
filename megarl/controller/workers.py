"""Ranks of the trainer as one object: shards go out, answers come back in the batch's order."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import ray
import torch

from megarl import cpu
from megarl.algorithms import Objective, denominators
from megarl.algorithms.value_loss import ValueObjective
from megarl.batch import Batch, Level
from megarl.batch.packing import shares
from megarl.bridge.layout import Copy
from megarl.config import Config
from megarl.config.schema import ClusterConfig
from megarl.controller.calls import Later, put, wait_for
from megarl.controller.placement import Place, places_of
from megarl.errors import RunError
from megarl.reshard.bucket import BucketSpec
from megarl.reshard.exposure import Exposure
from megarl.reshard.link import Meeting, Regions
from megarl.reshard.stream import Stream
from megarl.reshard.transfer import Member
from megarl.roles.models import Models
from megarl.roles.worker import Worker

_ROLES = {"update": "actor", "update_critic": "critic"}


class WorkerGroup:
    """The ranks of a pool, which host the actor and all that stand with it, or roles that have ranks of their own.

    Calls of one group come to its ranks in the order in which they were begun, whoever waits for them and when.
    """

    def __init__(
        self,
        config: Config,
        models: Models,
        hidden: int,
        *,
        pool: str = "actor",
        places: Sequence[Place] | None = None,
    ):
        """`models`: of the roles that are hosted. `hidden`: the size of the first one's hidden states; what attention costs beside
        the rest of a layer follows from it. `pool`: the section that describes the ranks. `places` None: Ray is
        asked for some."""
        self.config = config
        self._pair_cost = 1 / (6 * hidden)  # multiplications: 4 hidden for a pair of rows, 24 hidden² for a row
        self.layout = config.layouts[pool]
        self.data_size = self.layout.data
        name = "trainer" if pool == "actor" else pool.replace("_", " ")  # what failures call the ranks by
        self._process = f"{name} rank"
        self._starting = f"starting the {name}"
        self._timeout = config.cluster.worker_timeout
        threads = getattr(config, pool).threads
        environment = cpu.process_env(threads or max(1, (os.cpu_count() or 1) // self.layout.ranks))
        environment |= _search_path() | {"MEGARL_RANKS": name}  # for whoever looks at the processes of a machine
        environment |= interface(config.cluster)
        self.actors = [
            ray.remote(Worker)
            .options(runtime_env={"env_vars": environment | there.environment}, max_concurrency=1, **there.options)
            .remote(config, models, self.layout, threads)
            for there in places or places_of(config).ranks[pool]
        ]
        self._objective = Objective.from_config(config.algorithm)
        self._value_objective = ValueObjective.from_config(config.critic) if config.critic is not None else None
        self._pending: list[Any] = []
        # By role: problems whose samples had a gradient that is not finite, in the updates of the last step.
        self.offending: dict[str, list[str]] = {}
        self.places: list[dict[str, Any]] = []

    def start(self) -> None:
        """Begin building on all ranks; `ready` waits for it, so that engines can start beside."""
        address, port = self.meeting_place()
        world = len(self.actors)
        self._pending = [actor.start.remote(rank, world, address, port) for rank, actor in enumerate(self.actors)]

    def ready(self) -> None:
        self.places = wait_for(self._pending, self._starting, self._timeout, self._process)

    def log_probs(self, batch: Batch) -> Later[Batch]:
        """`old_log_probs`, `entropy` (RESPONSE fields).

        Mini-batch by mini-batch (`in_parts`), so that the first update sees the very same numbers and its ratio is exactly 1.
        """
        return self.in_parts("log_probs", "log-probs", batch)

    def in_parts(self, method: str, what: str, batch: Batch) -> Later[Batch]:
        """`begin` on each mini-batch by itself, which so is cut and packed as in its update: numbers of one model are then
        equal to the last bit, and so are those of two whose weights are."""
        parts = batch.split(self.config.algorithm.mini_batches)
        answers = [self.begin(method, what, part) for part in parts]
        return Later(lambda: Batch.concat([answer.get() for answer in answers]))

    def score(self, batch: Batch) -> Batch:
        """`log_probs` (RESPONSE field) at temperature 1."""
        return self.forward("score", "log-probs of the probe", batch)

    def update(self, batch: Batch) -> Later[dict[str, float]]:
        """The optimizer steps of one step of training: `epochs` passes over `mini_batches` parts of the batch.

        Metrics of the step: means over its updates, maxima over them, `skipped`: the updates that were not applied.
        """
        return self._updates("update", "update", self._prepared, batch, self._objective.reads)

    def update_critic(self, batch: Batch) -> Later[dict[str, float]]:
        """The same steps of the critic."""
        assert self._value_objective is not None
        return self._updates(
            "update_critic", "update of the critic", lambda part: part, batch, self._value_objective.reads
        )

    def write(self, bucket: BucketSpec, role: str = "actor") -> list[dict[str, int]]:
        return self._all("write", "writing weights", bucket, role)

    def pieces(self, bucket: BucketSpec, role: str) -> list[list[tuple[Copy, torch.Tensor]]]:
        return self._all("pieces", "sending weights", bucket, role)

    def offer(self, kind: str, paths: Sequence[str], size: int) -> list[str]:
        return self._all("offer", "making weight buckets", kind, list(paths), size)

    def measure(self, shapes: Mapping[str, Sequence[int]]) -> None:
        self._all("measure", "measuring weights", dict(shapes))

    def write_stream(self, stream: Stream) -> list[dict[str, int]]:
        return self._all("write_stream", "writing weights", stream)

    def open(self, engines: Mapping[Member, Sequence[Exposure]]) -> list[dict[Member, int]]:
        return self._all("open", "mapping the engines' weights", dict(engines))

    def write_in_place(self, members: Sequence[Member]) -> None:
        self._all("write_in_place", "writing weights", list(members))

    def shares(self, kinds: Mapping[str, str]) -> list[dict[str, int]]:
        return self._all("shares", "proving weights", dict(kinds))

    def meeting_place(self) -> tuple[str, int]:
        (place,) = wait_for([self.actors[0].address.remote()], "looking for a port", self._timeout, self._process)
        return place

    def regions(self) -> list[Regions]:
        return self._all("regions", "linking ranks and engines")

    def link(self, meeting: Meeting) -> list[Any]:
        return [actor.link.remote(meeting) for actor in self.actors]

    def linked(self, token: list[Any], wait: float) -> bool:
        done, missing = ray.wait(token, num_returns=len(token), timeout=wait)
        numbers = [token.index(call) for call in done]
        wait_for(done, "linking ranks and engines", self._timeout, self._process, numbers)
        return not missing

    def unlink(self, token: list[Any]) -> None:
        for call in token:
            with contextlib.suppress(ray.exceptions.RayError):  # a dead rank is told by whatever is asked of it next
                ray.get(call, timeout=self._timeout)

    def send(self, buckets: Sequence[BucketSpec]) -> list[dict[str, int]]:
        return self._all("send", "sending weights", list(buckets))

    def begin_save(self, folder: Path, role: str, copied: bool) -> None:
        """Begin to write a role to a checkpoint. Not `copied`: nothing else may be called before `finish_save`."""
        self._all("begin_save", "writing the checkpoint", str(folder), role, copied)

    def written(self, role: str) -> bool:
        """Whether what `begin_save` began is on the disk."""
        return all(self._all("written", "writing the checkpoint", role))

    def finish_save(self, role: str) -> dict[str, int]:
        """Wait until all is written; sizes of the files by path in the folder."""
        answers = self._all("finish_save", "writing the checkpoint", role)
        return {name: file for answer in answers for name, file in answer.items()}

    def load(self, folder: Path, role: str) -> bool:
        """Fill a role from a checkpoint, whatever layout wrote it. Whether what is a rank's alone (random states, float8 histories)
        came back too."""
        return all(self._all("load", "reading the checkpoint", str(folder), role))

    def rest(self) -> dict[str, float]:
        """The engines sample now: roles make room for them, as far as the configuration says. Metrics of what was moved."""
        answers = self._all("rest", "offloading")
        return {key: max(answer.get(key, 0.0) for answer in answers) for key in answers[0]}

    def peak_memory(self) -> list[int]:
        """Bytes that each rank held at most since the last time."""
        return self._all("peak_memory", "measuring memory")

    def _updates(
        self, method: str, what: str, prepare: Callable[[Batch], Batch], batch: Batch, reads: Sequence[str]
    ) -> Later[dict[str, float]]:
        """Epochs over mini-batches of a method of the ranks; `prepare` sees each mini-batch whole."""
        a = self.config.algorithm
        needed = batch.select(["tokens", "uid", *(name for name in reads if name in batch)])
        self.offending[_ROLES[method]] = []
        parts = [_Part(prepare(part), self) for part in needed.split(a.mini_batches)]
        updates = [self._one_update(method, what, part) for _ in range(a.epochs) for part in parts]

        def merged() -> dict[str, float]:
            results = [update.get() for update in updates]
            means: dict[str, float] = {}
            for key in results[0]:
                values = [r[key] for r in results]
                means[key] = max(values) if key.endswith("_max") else sum(values) / len(values)
            return means | {"skipped": sum(1 - r["applied"] for r in results)}

        return Later(merged)

    def _prepared(self, part: Batch) -> Batch:
        """With what the policy loss must know of a whole mini-batch; most know nothing of it."""
        if not self._objective.prepares:
            return part
        responses = [name for name in part.names if part.level(name) is Level.RESPONSE]
        data = {name: part.padded(name) for name in responses if part[name].dim() == 1}
        try:
            made = self._objective.prepare(data)
        except (RuntimeError, ValueError) as error:  # the loss may be the user's own
            raise RunError(" ".join(str(error).split())) from error
        for name, values_BT in made.items():
            part = part.set(name, part.unpad(values_BT), Level.RESPONSE)
        return part

    def _one_update(self, method: str, what: str, part: _Part) -> Later[dict[str, float]]:
        calls = self._calls(method, part.references, part.totals)
        return Later(lambda: self._metrics(_ROLES[method], part, self._wait(calls, what)))

    def _metrics(self, role: str, part: _Part, answers: list[dict[str, Any]]) -> dict[str, float]:
        """Of one update of all ranks; samples whose gradient is not finite join `offending`."""
        metrics = {k: answers[0][k] for k in ("grad_norm", "lr", "applied")}
        primaries = [a for a, place in zip(answers, self.places, strict=True) if place["primary"]]
        for key in sorted({k for a in primaries for k in a if "/" in k}):
            values = [a[key] for a in primaries if key in a]
            kind, name = key.split("/", 1)
            metrics[name] = max(values) if kind == "max" else sum(values)
        for answer, place in zip(answers, self.places, strict=True):
            if place["primary"]:
                self.offending[role] += [part.uids[part.rows[place["data"]][at]] for at in answer["offending"]]
        return metrics

    def forward(self, method: str, what: str, batch: Batch) -> Batch:
        """Call a method of all ranks on the tokens of a batch; the fields it answers with, in the batch's order."""
        return self.begin(method, what, batch).get()

    def begin(self, method: str, what: str, batch: Batch) -> Later[Batch]:
        """`forward`, to be waited for later."""
        rows = self._shares(batch)
        shards = [batch.select(["tokens"]).take(torch.tensor(part, dtype=torch.long)) for part in rows]
        calls = self._calls(method, [put(shard, what) for shard in shards])

        def joined() -> Batch:
            parts: list[Batch | None] = [None] * self.data_size
            for answer, place in zip(self._wait(calls, what), self.places, strict=True):
                if place["primary"]:
                    parts[place["data"]] = answer
            whole = Batch.concat([p for p in parts if p is not None and len(p)])
            return whole.take(torch.argsort(torch.tensor([row for part in rows for row in part])))

        return Later(joined)

    def _calls(self, method: str, references: Sequence[Any], *arguments: Any) -> list[Any]:
        """Begin a method of every rank on its shard of the batch."""
        return [
            getattr(actor, method).remote(references[place["data"]], *arguments)
            for actor, place in zip(self.actors, self.places, strict=True)
        ]

    def _wait(self, calls: Sequence[Any], what: str) -> list[Any]:
        return wait_for(calls, what, self._timeout, self._process)

    def _shares(self, batch: Batch) -> list[list[int]]:
        """Rows of each data-parallel rank, of like cost, samples of a prompt together where that is even."""
        whole = self.config.actor.share_prompts is not False and self.layout.context == 1
        return shares(batch, self.data_size, pair_cost=self._pair_cost, share_prompts=whole)

    def _all(self, method: str, what: str, *arguments: Any) -> list[Any]:
        return wait_for(
            [getattr(a, method).remote(*arguments) for a in self.actors], what, self._timeout, self._process
        )

    def __len__(self) -> int:
        return len(self.actors)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.actors)


class _Part:
    """A mini-batch, cut over the data-parallel ranks and lying where they take it from, once for all epochs."""

    def __init__(self, batch: Batch, group: WorkerGroup):
        self.uids: list[str] = list(batch["uid"])
        self.rows = group._shares(batch)
        self.totals = denominators(batch.padded("loss_mask"), max_length=group.config.rollout.max_new_tokens)
        sent = batch.pop(["uid"])
        shards = [sent.take(torch.tensor(part, dtype=torch.long)) for part in self.rows]
        self.references = [put(shard, "sharing out a batch") for shard in shards]


def interface(cluster: ClusterConfig) -> dict[str, str]:
    """What gloo and NCCL read."""
    names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME") if cluster.interface else ()
    return {name: str(cluster.interface) for name in names}


def _search_path() -> dict[str, str]:
    """Ranks find a user's own losses where the controller does: in the folder it was started in, too."""
    return {"PYTHONPATH": os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), os.getcwd()]))}
