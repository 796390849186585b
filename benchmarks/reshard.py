"""Bytes a second of a weight sync, trainer's ranks to engine, beside a memcpy of the same bytes in the same run.

    python -m benchmarks.reshard [--rounds N] [--only REGEX] [--json FILE] [--plot FILE]

SmolLM2-135M (or the model that stands in for it) and a random Llama of 1.1 billion parameters, bfloat16, from one rank and from
TP2 x PP2, into a real engine: what a run does, but for ranks that hold weights alone, without gradients and optimizer. The memcpy
copies between two warm buffers with all cores. A sync writes straight into the engine's weights; through buckets, as an engine's first
goes, it copies everything twice (into the bucket, out of it). The proof reads everything twice.
SmolLM2's 9 heads cannot be shared by two ranks: there the same weights are read as 6 heads of 96.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from statistics import median
from typing import Any

import ray
import torch
from torch.distributed import TCPStore

from benchmarks.table import Row, at_least, at_most, plain, text, write_json
from megarl import config, cpu, models
from megarl.bridge.hf_io import HFWriter
from megarl.bridge.model_map import ModelMap
from megarl.controller.engines import EngineGroup
from megarl.reshard.bucket import BucketSpec
from megarl.reshard.colocated import Colocated
from megarl.reshard.disk import Disk
from megarl.reshard.distributed import Distributed
from megarl.reshard.exposure import Exposure
from megarl.reshard.link import Meeting, Outlet, Regions, join
from megarl.reshard.stream import Stream
from megarl.reshard.transfer import Member
from megarl.roles.ports import unused_port

ROOT = Path(__file__).parents[1]
LAYOUTS = {"TP1": (1, 1), "TP2 x PP2": (2, 2)}  # tensor, pipeline
SWEEP_MB = (4, 16, 64, 256)
CHUNK = 256 << 20  # bytes of the buffers that memcpy copies between
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 32000,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 22,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "dtype": "bfloat16",
}


@contextmanager
def random_llama() -> Iterator[Path]:
    """A folder with 1.1 billion random parameters, which is removed again."""
    folder = Path(tempfile.mkdtemp(prefix="megarl-bench-"))
    try:
        (folder / "config.json").write_text(json.dumps(LLAMA))
        shapes = ModelMap.from_hf(folder).hf_shapes
        noise = 0.02 * torch.randn(1 << 22, dtype=torch.float32).bfloat16()
        with HFWriter(folder, shapes, torch.bfloat16) as writer:
            for number, (name, shape) in enumerate(shapes.items()):
                size = torch.Size(shape).numel()
                writer.write(name, noise.roll(number).repeat(-(-size // len(noise)))[:size].view(shape))
        yield folder
    finally:
        shutil.rmtree(folder)


@contextmanager
def divisible_smollm2() -> Iterator[Path]:
    """SmolLM2's own weights in a folder whose config.json has heads that two ranks can share."""
    source = models.resolve("smollm2")
    with tempfile.TemporaryDirectory() as folder:
        settings = json.loads((source / "config.json").read_text())
        heads = {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 96}
        Path(folder, "config.json").write_text(json.dumps(settings | heads))
        for path in source.glob("*.safetensors"):
            Path(folder, path.name).symlink_to(path)
        yield Path(folder)


class Rank:
    """A trainer's rank that holds weights alone."""

    def start(self, rank: int, world: int, port: int, folder: str, tensor: int, pipeline: int, threads: int) -> int:
        from megarl.megatron import parallel
        from megarl.megatron.engine import EngineSettings, MegatronEngine
        from megarl.reshard.writer import ShardWriter

        torch.set_num_threads(threads)
        place = parallel.start(rank, world, "127.0.0.1", port, tensor=tensor, pipeline=pipeline, seed=1, timeout=300)
        self.engine = MegatronEngine(Path(folder), place, EngineSettings("bfloat16"))
        self.writer = ShardWriter(self.engine.parameters(), place)
        return os.getpid()

    def write_stream(self, stream: Stream, rank: int) -> dict[str, int]:
        return self.writer.write_stream(stream, rank)

    def open(self, engines: dict[Member, list[Exposure]]) -> dict[Member, int]:
        return self.writer.open(engines)

    def write_in_place(self, members: list[Member]) -> None:
        self.writer.write_in_place(members)

    def shares(self, kinds: dict[str, str]) -> dict[str, int]:
        return self.writer.shares(kinds)

    def write(self, bucket: BucketSpec) -> dict[str, int]:
        return self.writer.write(bucket)

    def regions(self) -> Regions:
        return self.writer.regions()

    def link(self, meeting: Meeting, rank: int) -> None:
        self.outlet = Outlet(meeting, rank, self.regions())

    def send(self, buckets: list[BucketSpec]) -> dict[str, int]:
        return self.writer.send(buckets, self.outlet)


class Ranks:
    """All ranks, as the controller's worker group is."""

    def __init__(self, folder: Path, tensor: int, pipeline: int):
        world = tensor * pipeline
        threads = max(1, (os.cpu_count() or 1) // world)
        remote = ray.remote(Rank).options(num_cpus=0, runtime_env={"env_vars": cpu.process_env(threads)})
        self.actors = [remote.remote() for _ in range(world)]
        port = unused_port()
        starts = [
            actor.start.remote(rank, world, port, str(folder), tensor, pipeline, threads)
            for rank, actor in enumerate(self.actors)
        ]
        self.pids: list[int] = ray.get(starts)

    def __len__(self) -> int:
        return len(self.actors)

    def write_stream(self, stream: Stream) -> list[dict[str, int]]:
        return ray.get([actor.write_stream.remote(stream, rank) for rank, actor in enumerate(self.actors)])

    def open(self, engines: dict[Member, list[Exposure]]) -> list[dict[Member, int]]:
        return ray.get([actor.open.remote(engines) for actor in self.actors])

    def write_in_place(self, members: Sequence[Member]) -> None:
        ray.get([actor.write_in_place.remote(list(members)) for actor in self.actors])

    def shares(self, kinds: dict[str, str]) -> list[dict[str, int]]:
        return ray.get([actor.shares.remote(kinds) for actor in self.actors])

    def write(self, bucket: BucketSpec) -> list[dict[str, int]]:
        return ray.get([actor.write.remote(bucket) for actor in self.actors])

    def regions(self) -> list[Regions]:
        return ray.get([actor.regions.remote() for actor in self.actors])

    def link(self, meeting: Meeting) -> list[Any]:
        return [actor.link.remote(meeting, rank) for rank, actor in enumerate(self.actors)]

    def linked(self, token: list[Any], wait: float) -> bool:
        ray.get(token)
        return True

    def unlink(self, token: list[Any]) -> None:
        """Not called: no engine is lost here."""

    def send(self, buckets: list[BucketSpec]) -> list[dict[str, int]]:
        return ray.get([actor.send.remote(buckets) for actor in self.actors])

    def close(self) -> None:
        for actor in self.actors:
            ray.kill(actor)


class Peer:
    """One end of a bare send/recv."""

    def join(self, meeting: Meeting, rank: int) -> None:
        self.rank, self.group = rank, join(meeting, rank)
        self.buffer = torch.ones(0, dtype=torch.uint8)

    def move(self, size: int, message: int) -> float:
        if len(self.buffer) < size:  # weights are not in a core's cache either
            self.buffer = torch.ones(size, dtype=torch.uint8)
        begun = time.perf_counter()
        for start in range(0, size, message):
            part = [self.buffer[start : start + min(message, size - start)]]
            (self.group.recv(part, 0, 0) if self.rank else self.group.send(part, 1, 0)).wait()
        return time.perf_counter() - begun


class Bare:
    """A process that sends to another: what a group can do that has nothing else to do."""

    def __init__(self) -> None:
        remote = ray.remote(Peer).options(num_cpus=0, runtime_env={"env_vars": cpu.process_env(1)})
        self.peers = [remote.remote() for _ in range(2)]
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        meeting = Meeting("127.0.0.1", self._store.port, 1, 2, 60.0)
        ray.get([peer.join.remote(meeting, rank) for rank, peer in enumerate(self.peers)])

    def __call__(self, size: int, message: int) -> float:
        return max(ray.get([peer.move.remote(size, message) for peer in self.peers]))

    def close(self) -> None:
        for peer in self.peers:
            ray.kill(peer)


class Memory:
    """Peak of the memory that is some processes' own, above what it was; /dev/shm is counted by who asks."""

    def __init__(self, pids: list[int]):
        self._pids = pids
        self._running = True
        self._before = self._now()
        self.extra = 0
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()

    def _now(self) -> int:
        return sum(_anonymous(pid) for pid in self._pids)

    def _watch(self) -> None:
        while self._running:
            self.extra = max(self.extra, self._now() - self._before)
            time.sleep(0.005)

    def stop(self) -> int:
        self._running = False
        self._thread.join()
        return self.extra


def _anonymous(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return 1024 * int(re.search(r"RssAnon:\s+(\d+)", status)[1])  # type: ignore[index]


def session_of(leader: int) -> list[int]:
    """Processes of an engine."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[3]) == leader:
            found.append(int(path.parent.name))
    return found


class Memcpy:
    """Copies as many bytes as a sync moves."""

    def __init__(self) -> None:
        self._source = torch.ones(CHUNK, dtype=torch.uint8)
        self._target = torch.ones(CHUNK, dtype=torch.uint8)

    def __call__(self, size: int) -> float:
        begun = time.perf_counter()
        for start in range(0, size, CHUNK):
            part = min(CHUNK, size - start)
            self._target[:part].copy_(self._source[:part])
        return time.perf_counter() - begun


class Syncs:
    """Syncs in place or with buckets of one size, and with one way of proving, each beside a memcpy."""

    def __init__(self, model: ModelMap, bucket_mb: int, verify: str, in_place: bool):
        self.seconds: list[float] = []
        self.memcpy: list[float] = []
        self.loader: list[float] = []  # seconds inside SGLang, without waiting
        size = bucket_mb << 20
        self._transfer = Colocated(model, dtype="bfloat16", bucket_bytes=size, verify=verify, in_place=in_place)
        self._transfer._turn = 1  # else "sampled" begins with all
        self.bytes = self._transfer.bytes
        self.bucket = max(size, *(bucket.nbytes for bucket in self._transfer.buckets))
        self.close = self._transfer.close

    @property
    def held(self) -> int:
        """Bytes of memory for buckets."""
        return sum(512 * Path(path).stat().st_blocks for path in self._transfer.paths)

    def once(self, number: int, ranks: Ranks, engines: EngineGroup, memcpy: Memcpy) -> None:
        copied = memcpy(self.bytes)
        report = self._transfer.push(ranks, engines, number)
        if number:
            self.seconds.append(report.seconds)
            self.memcpy.append(copied)
            self.loader.append(ray.get(engines.slots[0].actor.ready.remote())["update_seconds"]["load"])

    @property
    def ratio(self) -> float:
        """memcpy's seconds ÷ the sync's."""
        return median(copied / synced for copied, synced in zip(self.memcpy, self.seconds, strict=True))

    def more_than(self, other: Syncs) -> float:
        """The share of these syncs that the others, in alternation with them, did without."""
        return median(1 - less / more for less, more in zip(other.seconds, self.seconds, strict=True))


def alternate(runs: Sequence[Syncs], rounds: int, ranks: Ranks, engines: EngineGroup, memcpy: Memcpy) -> float:
    """In alternation: other work on the machine meets all alike. Peak memory beyond models, in buckets, after two rounds that are not
    counted: in place, the first goes through buckets and the second is proved in full whatever is asked for."""
    for run in (*runs, *runs):
        run.once(0, ranks, engines, memcpy)
    held = max(run.held for run in runs)
    memory = Memory([*ranks.pids, *session_of(engines.slots[0].info["pid"]), os.getpid()])
    try:
        for number in range(1, rounds + 1):
            for run in runs:
                run.once(number, ranks, engines, memcpy)
    finally:
        extra = memory.stop()
        for run in runs:
            run.close()
    return (held + extra) / max(run.bucket for run in runs)


def elsewhere(
    ranks: Ranks, engines: EngineGroup, model: ModelMap, folder: Path, rounds: int, bucket_mb: int
) -> dict[str, list[float]]:
    """Of the transports for engines that share no memory: as messages, beside a bare send/recv; through a folder, seconds."""
    options = {"dtype": "bfloat16", "bucket_bytes": bucket_mb << 20, "verify": "off"}
    found: dict[str, list[float]] = {"distributed ÷ bare": [], "disk": []}
    bare = Bare()
    with tempfile.TemporaryDirectory() as scratch:
        messages = Distributed(model, **options)
        disk = Disk(model, **options, folder=Path(scratch), source=folder)
        try:
            for number in range(rounds + 1):
                alone = bare(messages.bytes, bucket_mb << 20)
                pushed = messages.push(ranks, engines, number).seconds
                written = disk.push(ranks, engines, number).seconds
                if number:  # the first meets
                    found["distributed ÷ bare"].append(alone / pushed)
                    found["disk"].append(written)
        finally:
            bare.close()
            disk.close()
    return found


def measure(name: str, folder: Path, layout: str, rounds: int) -> tuple[list[Row], dict[int, float]]:
    """Rows of one model from one layout; and GB/s by the size of the buckets."""
    cfg = config.load(ROOT / "configs/demo.yaml", [f"model.path={folder}", "rollout.max_total_tokens=1024"])
    model = ModelMap.from_hf(folder)
    engines = EngineGroup(cfg, folder)
    ranks = None
    try:
        ranks = Ranks(folder, *LAYOUTS[layout])
        engines.ready()
        memcpy, chosen = Memcpy(), cfg.reshard.bucket_mb
        off, sampled, full = (Syncs(model, chosen, verify, in_place=True) for verify in ("off", "sampled", "full"))
        extra = alternate([off, sampled, full], rounds, ranks, engines, memcpy)
        sweep = {mb: Syncs(model, mb, "off", in_place=False) for mb in SWEEP_MB}
        alternate(list(sweep.values()), rounds, ranks, engines, memcpy)
        usual = Syncs(model, chosen, "full", in_place=False)
        through = alternate([usual], rounds, ranks, engines, memcpy)
        others = elsewhere(ranks, engines, model, folder, rounds, chosen)
    finally:
        if ranks is not None:
            ranks.close()
        engines.shutdown()
    label = f"reshard: {name}, {layout}:"
    bare = median(off.seconds)
    rows = [
        at_least(f"{label} sync without proof ÷ memcpy", off.ratio, 0.5),
        plain(f"{label} the same, fastest rounds", min(off.memcpy) / min(off.seconds)),
        plain(f"{label} sync with the sampled proof ÷ memcpy", sampled.ratio),
        plain(f"{label} sync with the full proof ÷ memcpy", full.ratio),
        at_most(f"{label} sampled proof, share of a sync", sampled.more_than(off), 0.05),
        plain(f"{label} full proof, share of a sync", full.more_than(off)),
        at_most(f"{label} peak extra memory, in buckets", extra, 2.0),
        plain(f"{label} memcpy, GB/s", off.bytes / median(off.memcpy) / 1e9),
        plain(f"{label} sync without proof, GB/s", off.bytes / bare / 1e9),
        at_least(
            f"{label} distributed, sync without proof ÷ bare send/recv", median(others["distributed ÷ bare"]), 0.8
        ),
        plain(f"{label} disk, sync without proof, GB/s", off.bytes / median(others["disk"]) / 1e9),
        *(plain(f"{label} through buckets of {mb} MiB, ÷ memcpy", run.ratio) for mb, run in sweep.items()),
        plain(f"{label} through buckets, with the full proof, ÷ memcpy", usual.ratio),
        plain(
            f"{label} through buckets: SGLang's own loader, share of it", median(usual.loader) / median(usual.seconds)
        ),
        plain(f"{label} through buckets: peak extra memory, in buckets", through),
    ]
    return rows, {mb: run.bytes / median(run.seconds) / 1e9 for mb, run in sweep.items()}


def plot(curves: dict[str, dict[int, float]], path: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for name, curve in curves.items():
        axes.plot(list(curve), list(curve.values()), "o-", label=name)
    axes.set_xscale("log", base=2)
    axes.set(
        xlabel="reshard.bucket_mb", ylabel="GB/s", ylim=(0, None), title="A weight sync by the size of its buckets"
    )
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default="", help="of models and layouts, as 'SmolLM2-135M, TP1'")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path, default=ROOT / "build/reshard.png")
    args = parser.parse_args()
    from megarl.controller.cluster import cluster

    rows: list[Row] = []
    curves: dict[str, dict[int, float]] = {}

    def run(name: str, layout: str, folder: Path) -> None:
        found, curve = measure(name, folder, layout, args.rounds)
        print(text(found), flush=True)
        rows.extend(found)
        curves[f"{name}, {layout}"] = curve

    folders = {
        ("SmolLM2-135M", "TP1"): lambda: nullcontext(models.resolve("smollm2")),
        ("SmolLM2-135M", "TP2 x PP2"): divisible_smollm2,
        ("Llama 1.1B", "TP1"): random_llama,
        ("Llama 1.1B", "TP2 x PP2"): random_llama,
    }
    with tempfile.TemporaryDirectory() as scratch:
        cfg = config.load(ROOT / "configs/demo.yaml", [])
        with cluster(cfg.cluster, Path(scratch, "logs")):
            for (name, layout), folder_of in folders.items():
                if re.search(args.only, f"{name}, {layout}"):
                    with folder_of() as folder:
                        run(name, layout, folder)
    plot(curves, args.plot)
    print(f"\nthe sweep is drawn in {args.plot}")
    if args.json:
        write_json(args.json, rows)
    return 0 if all(row.met for row in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
