"""Where ranks and engines of every combination of pools are put, by a real Ray of two nodes that are told to have GPUs."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import Any

import pytest
import ray
from ray.cluster_utils import Cluster

from megarl import config
from megarl.config import Config
from megarl.controller.cluster import environment
from megarl.controller.placement import Places, placed, places_of
from megarl.errors import RunError
from tests.controller.runs import CONFIG

GPUS = 4  # of a node
TP2 = "actor.parallel={ranks: 2, tensor: 2}"
CRITIC = ("algorithm.advantage=gae", "critic.parallel={ranks: 2, tensor: 2}")
REWARD = ("reward_model.path=tiny-qwen3-reward",)
APART = ("rollout.pool=rollout",)
SENT = ("reshard.transport=distributed",)
REFERENCE = ("algorithm.kl_coefficient=0.1",)


REFUSED: list[tuple[tuple[str, ...], str]] = [
    (
        ("actor.parallel={ranks: 6, tensor: 6}", *SENT),
        "tensor-parallel group is kept inside a node, and a node of this Ray cluster has at most 4 GPUs; set actor.parallel.tensor=4",
    ),
    ((TP2, *CRITIC, "critic.parallel={ranks: 5, tensor: 5}"), "critic.parallel.tensor=5: a tensor-parallel group"),
    ((TP2, "rollout.engine.tp_size=5", *SENT), "rollout.engine.tp_size=5: an engine is kept inside a node"),
    (
        ("actor.parallel={ranks: 6, tensor: 2}", "rollout.engine.tp_size=3", *SENT),
        "actor.parallel.tensor=2 and rollout.engine.tp_size=3 share devices, of which 6 would have to lie on one node",
    ),
    (
        (TP2, *CRITIC, *APART, "rollout.engines=5", *SENT),
        "critic.parallel.ranks+rollout.engines*rollout.engine.tp_size=2+2+5=9 but the 2 nodes of this Ray cluster have 8 GPUs; make",
    ),
    (
        (TP2, *APART, "rollout.engines=3"),
        "where actor and engines take 5 devices, and the node that megarl was started on has 4 GPUs; set reshard.transport=",
    ),
]


@pytest.fixture(scope="module")
def two_nodes() -> Iterator[str]:
    """The address of a cluster."""
    before = dict(os.environ)
    os.environ |= environment()
    node: dict[str, Any] = {"num_cpus": 2, "num_gpus": GPUS, "object_store_memory": 80 << 20}
    cluster = Cluster(initialize_head=True, head_node_args=node | {"include_dashboard": False})
    try:
        cluster.add_node(**node)
        yield cluster.address
    finally:
        cluster.shutdown()
        os.environ.clear()
        os.environ.update(before)


@pytest.fixture(autouse=True)
def joined(two_nodes: str) -> Iterator[None]:
    """What a test was lent goes back with its end, as a run's does."""
    ray.init(address=two_nodes, log_to_driver=False)
    end = time.monotonic() + 20
    while ray.available_resources().get("GPU") != 2 * GPUS:
        assert time.monotonic() < end, ray.available_resources()
        time.sleep(0.05)
    yield
    ray.shutdown()


def settings(*overrides: str) -> Config:
    return config.load(CONFIG, ["actor.parallel.sequence=false", "cluster.worker_timeout=1", *overrides])


class Seen:
    """An actor that says where it is."""

    def where(self) -> tuple[str, frozenset[str]]:
        """Its node, and the GPUs that it would compute on."""
        return ray.get_runtime_context().get_node_id(), frozenset(os.environ["CUDA_VISIBLE_DEVICES"].split(","))


Where = list[tuple[str, frozenset[str]]]


def seen(places: Places) -> dict[str, Where]:
    """Where everything comes to lie, started as the run would start it."""
    start = ray.remote(Seen)
    pools = {**places.ranks, "engines": places.engines}
    actors = {
        pool: [start.options(runtime_env={"env_vars": p.environment}, **p.options).remote() for p in there]
        for pool, there in pools.items()
    }
    return {pool: ray.get([a.where.remote() for a in there], timeout=90) for pool, there in actors.items()}


def nodes(where: Where) -> list[str]:
    return [node for node, _ in where]


def gpus(where: Where) -> list[tuple[str, str]]:
    """Of all together, each with its node."""
    return sorted((node, gpu) for node, shown in where for gpu in shown)


def test_what_cannot_be_placed_is_one_sentence() -> None:
    """And nothing has been started, nor waited for."""
    for overrides, said in REFUSED:
        with pytest.raises(RunError) as caught:
            placed(settings(*overrides), "GPU")
        assert said in str(caught.value)
    used = ray.util.placement_group([{"GPU": 3}, {"GPU": 3}], strategy="STRICT_SPREAD")
    assert used.wait(10)
    with pytest.raises(
        RunError, match="within 1 s Ray found no room for the pools actor: 1 times 2 free GPUs, each time on one node"
    ):
        placed(settings(TP2), "GPU")


@pytest.mark.slow
def test_all_on_the_same_ranks() -> None:
    """Each rank has a GPU of its own, and each engine those of a tensor-parallel group."""
    shared = (*CRITIC[:1], "critic.head_std=0", *REWARD, *REFERENCE)
    cfg = settings(
        "actor.parallel={ranks: 8, tensor: 2}", "rollout.engines=4", "rollout.engine.tp_size=2", *shared, *SENT
    )
    there = seen(places_of(cfg))
    assert there.keys() == {"actor", "engines"}
    assert len(set(gpus(there["actor"]))) == 8 and gpus(there["engines"]) == gpus(there["actor"])
    for engine, where in enumerate(there["engines"]):
        assert gpus([where]) == gpus(there["actor"][2 * engine : 2 * engine + 2])


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["colocated", "distributed"])
def test_engines_apart(transport: str) -> None:
    """With shared memory on the actor's node and the driver's, else anywhere; no GPU twice."""
    cfg = settings(TP2, *APART, "rollout.engine.tp_size=2", f"reshard.transport={transport}")
    there = seen(placed(cfg, "GPU"))
    both = there["actor"] + there["engines"]
    assert len(gpus(both)) == len(set(gpus(both))) == 4
    assert [len(shown) for _, shown in both] == [1, 1, 2]
    assert len(set(nodes(there["actor"]))) == 1
    if transport == "colocated":
        assert len(set(nodes(both))) == 1


@pytest.mark.slow
def test_roles_apart_and_two_of_them_together() -> None:
    """Critic and reward model share ranks, the reference has its own, and nothing is split over nodes that must not be."""
    own = ("reward_model.pool=critic", "reference.parallel.ranks=1", "actor.parallel={ranks: 3, tensor: 3}")
    cfg = settings(*CRITIC, *REWARD, *REFERENCE, *own, *APART, *SENT)
    assert cfg.pools == {
        "actor": ["actor"], "critic": ["critic", "reward_model"], "reference": ["reference"], "rollout": ["rollout"]
    }  # fmt: skip
    there = seen(placed(cfg, "GPU"))
    everything = [where for pool in there.values() for where in pool]
    assert {pool: len(where) for pool, where in there.items()} == {
        "actor": 3,
        "critic": 2,
        "reference": 1,
        "engines": 1,
    }
    assert len(set(gpus(everything))) == 7
    assert len(set(nodes(there["actor"]))) == len(set(nodes(there["critic"]))) == 1
    assert nodes(there["actor"]) != nodes(there["critic"])


@pytest.mark.slow
def test_cores_where_there_are_no_gpus() -> None:
    """A core a rank; an engine that shares has that of its ranks, on their node."""
    there = placed(settings(TP2, *CRITIC, *SENT), "CPU")
    assert [p.options["num_cpus"] for p in (*there.ranks["actor"], *there.ranks["critic"])] == [1, 1, 1, 1]
    assert [p.options["num_cpus"] for p in there.engines] == [0]
    start = ray.remote(_node)
    pools = {"actor": there.ranks["actor"], "critic": there.ranks["critic"], "engines": there.engines}
    found = {
        pool: {ray.get(start.options(**place.options).remote(), timeout=60) for place in places}
        for pool, places in pools.items()
    }
    assert (
        len(found["actor"]) == 1 and found["engines"] == found["actor"] and found["critic"].isdisjoint(found["actor"])
    )


def _node() -> str:
    return str(ray.get_runtime_context().get_node_id())
