"""Weights of real ranks in real engines, over every transport: proved by fingerprints, and log-probs equal the trainer's to 1e-5."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from megarl import config
from megarl.controller.cluster import cluster
from megarl.controller.engines import EngineGroup
from megarl.controller.preflight import preflight
from megarl.controller.sync import WeightSync, transport
from megarl.controller.workers import WorkerGroup
from megarl.models.tiny import make_tiny
from megarl.reshard.exposure import Exposure
from tests.controller.runs import CONFIG, processes
from tests.reshard.receiver import Receiver
from tests.reshard.test_fp8 import expected, same

TRANSPORTS = ("colocated", "distributed", "disk")
LAYOUTS = {
    "TP1": {"ranks": 1, "tensor": 1},
    "TP2+SP": {"ranks": 2, "tensor": 2, "sequence": True},
    "PP2": {"ranks": 2, "pipeline": 2},
    "TP2+PP2": {"ranks": 4, "tensor": 2, "pipeline": 2},
    "EP2": {"ranks": 2, "expert": 2},
}
FAMILIES = ("qwen2", "qwen2-untied", "qwen3", "llama", "qwen3-moe", "gemma3", "glm4-moe")


@pytest.fixture(scope="module", autouse=True)
def ray_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with cluster(config.load(CONFIG, []).cluster, tmp_path_factory.mktemp("logs")):
        yield


@contextmanager
def engines_of(folder: Path, ranks: int) -> Iterator[EngineGroup]:
    cfg = config.load(CONFIG, [f"model.path={folder}", f"rollout.engine={{tp_size: {ranks}}}"])
    engines = EngineGroup(cfg, folder)
    try:
        yield engines  # which start beside whatever starts meanwhile
    finally:
        engines.shutdown()


def layouts_of(family: str) -> dict[str, dict[str, int | bool]]:
    """Experts need sequence parallelism wherever tensors are cut; models without have nothing to cut over EP."""
    if not family.endswith("-moe"):
        return {name: layout for name, layout in LAYOUTS.items() if name != "EP2"}
    return {name: layout | {"sequence": layout.get("tensor", 1) > 1} for name, layout in LAYOUTS.items()}


def check_syncs(folder: Path, layout: dict[str, int | bool], engines: list[EngineGroup], scratch: Path) -> int:
    """Give engines, whatever weights they have, those of ranks that read `folder`, once over each transport."""
    parallel = {"tensor": 1, "sequence": False} | layout
    overrides = [f"actor.parallel.{key}={str(value).lower()}" for key, value in parallel.items()]
    cfg = config.load(CONFIG, [f"model.path={folder}", *overrides])
    prepared = preflight(cfg)
    actor = WorkerGroup(cfg, prepared.models, prepared.model.dims.hidden)
    checked = 0
    try:
        actor.start()
        actor.ready()
        for group in engines:
            if any(slot.starting is not None for slot in group.slots):
                group.ready()
            exposures: list[Exposure] = []
            for kind in TRANSPORTS:
                cfg.reshard.transport, cfg.reshard.bucket_mb = kind, 1
                moving = transport(cfg, prepared.model, prepared.folder, scratch / "weights")
                sync = WeightSync(actor, group, moving, "float32", True, 1e-5, prepared.model.dims.vocab)
                try:
                    for version in (1, 2):  # the second over what the first has set up
                        for exposure in exposures:  # so that a sync that does nothing is seen
                            for weights in exposure.views().values():
                                weights.zero_()
                        metrics = sync.push(version)
                        assert (
                            metrics["reshard/verified"] == metrics["reshard/tensors"] == len(prepared.model.hf_shapes)
                        )
                        assert metrics["reshard/probe_abs_max"] <= 1e-5
                        exposures = exposures or [
                            one for ranks in getattr(moving, "_open", {}).values() for one in ranks
                        ]
                        checked += 1
                finally:
                    moving.close()
    finally:
        for rank in actor:
            rank.__ray_terminate__.remote()
    return checked


def test_two_ranks_give_weights_to_an_engine_of_two(tmp_path: Path) -> None:
    first, other = (make_tiny("qwen2-untied", tmp_path / str(seed), seed=seed) for seed in (0, 1))
    with engines_of(other, 2) as engines:
        assert check_syncs(first, LAYOUTS["TP2+SP"], [engines], tmp_path) == 6


@pytest.mark.slow
def test_an_engine_that_dies_while_it_joins_the_ranks_holds_nobody_up(tmp_path: Path) -> None:
    """It would be waited for until cluster.worker_timeout, by the ranks and by the other engine."""
    first, other = (make_tiny("qwen3", tmp_path / str(seed), seed=seed) for seed in (0, 1))
    cfg = config.load(CONFIG, [f"model.path={first}", "reshard.transport=distributed"])
    prepared = preflight(cfg)
    notes: list[str] = []
    engines = EngineGroup(cfg, other, engines=2, max_restarts=1, note=notes.append)
    actor = WorkerGroup(cfg, prepared.models, prepared.model.dims.hidden)
    moving = transport(cfg, prepared.model, prepared.folder, tmp_path)
    sync = WeightSync(actor, engines, moving, "float32", False, 1e-5, prepared.model.dims.vocab)
    engines.renew = sync.renew
    try:
        actor.start()
        actor.ready()
        engines.ready()
        host = engines.slots[1].info["pid"]
        scheduler = next(pid for pid, title in processes(host).items() if "scheduler" in title)
        link = engines.link

        def dying(*arguments: Any) -> Any:
            token = link(*arguments)
            threading.Timer(1.0, os.kill, (scheduler, signal.SIGKILL)).start()
            engines.link = link  # type: ignore[method-assign]
            return token

        engines.link = dying  # type: ignore[method-assign]
        os.kill(scheduler, signal.SIGSTOP)  # so that it does not come to join
        metrics = sync.push(1)
        assert metrics["reshard/verified"] == len(prepared.model.hf_shapes)
        assert len(notes) == 1 and "rollout engine 1 is started anew (1 of 1 in this step)" in notes[0]
        assert "died" in notes[0] and "\n" not in notes[0]
        assert [slot.current for slot in engines.slots] == [True, False]
        assert sync.probe_engines()["reshard/probe_abs_max"] <= 1e-5  # both: the new one is given the weights
        sync.push(2)  # in one group again
        assert sync.probe_engines()["reshard/probe_abs_max"] <= 1e-5 and len(notes) == 1
    finally:
        engines.shutdown()
        for rank in actor:
            rank.__ray_terminate__.remote()


@pytest.mark.slow
def test_ranks_quantise_for_engines_in_float8(tmp_path: Path) -> None:
    """Without an engine, which would need a GPU: what it would be given, from ranks that have parts of blocks."""
    folder = make_tiny("qwen2-untied", tmp_path / "model")
    layout = ["actor.parallel.ranks=2", "actor.parallel.tensor=2", "actor.parallel.sequence=true"]
    cfg = config.load(CONFIG, [f"model.path={folder}", *layout])
    prepared = preflight(cfg)
    cfg.rollout.quantization, cfg.rollout.dtype = "fp8", "bfloat16"
    want = expected(prepared.model, load_file(folder / "model.safetensors"))
    actor = WorkerGroup(cfg, prepared.models, prepared.model.dims.hidden)
    try:
        actor.start()
        actor.ready()
        for cfg.reshard.transport in TRANSPORTS:
            moving, receiver = transport(cfg, prepared.model, prepared.folder, tmp_path / "weights"), Receiver()
            try:
                report = moving.push(actor, receiver, 1)  # type: ignore[arg-type]
            finally:
                moving.close()
            assert report.verified == report.tensors == len(want)
            assert all(same(receiver.tensors[name], tensor) for name, tensor in want.items())
    finally:
        for rank in actor:
            rank.__ray_terminate__.remote()


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_every_layout_to_engines_of_one_and_two_ranks(family: str, tmp_path: Path) -> None:
    first, other = (make_tiny(family, tmp_path / str(seed), seed=seed) for seed in (0, 1))
    with ExitStack() as stack:
        engines = [stack.enter_context(engines_of(other, ranks)) for ranks in (1, 2)]
        for layout in layouts_of(family).values():
            assert check_syncs(first, layout, engines, tmp_path) == 12
