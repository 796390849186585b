"""Bytes over links as they are counted from the algorithms, beside what real ranks hand to torch.distributed in a step."""

from __future__ import annotations

from pathlib import Path

import pytest

from megarl.config import read
from megarl.controller.survey import Machines, survey
from megarl.plan import hardware
from megarl.plan.links import Group, traffic
from megarl.plan.memory import Plan
from tests.distributed import run_ranks
from tests.megatron.memory_jobs import Case as Samples
from tests.plan.link_jobs import Case, sent

ROOT = Path(__file__).parents[2]
BOUND = 0.15
SAMPLES = Samples("", prompt=31, response=62, samples=8, together=2)
COMMON = (
    *("data.prompts_per_step=4", "rollout.n=2", "data.max_prompt_tokens=31", "rollout.max_new_tokens=62", "model.dtype=bfloat16"),
    *("actor.micro_batch_tokens=186", "actor.share_prompts=false"),
)  # fmt: skip
# Of each kind of parallelism, on two ranks.
CASES = {
    "tensor": ("llama", "{ranks: 2, tensor: 2}", ()),
    "tensor and sequence": ("qwen3", "{ranks: 2, tensor: 2, sequence: true}", ("actor.recompute=full",)),
    "pipeline": ("llama", "{ranks: 2, pipeline: 2}", ()),
    "tied pipeline": ("qwen2", "{ranks: 2, pipeline: 2}", ()),
    "data": ("qwen2", "{ranks: 2}", ()),
    "data, not sharded": ("llama", "{ranks: 2}", ("actor.optimizer.distributed=false",)),
    "context": ("llama", "{ranks: 2, context: 2}", ()),
    "experts": ("qwen3-moe", "{ranks: 2, expert: 2}", ()),
}


def planned(model: str, layout: str, more: tuple[str, ...]) -> Plan:
    overrides = [*COMMON, f"model.path=tiny-{model}", f"actor.parallel={layout}", *more]
    reading = read(ROOT / "configs/base/laptop.yaml", overrides)
    return Plan(survey(reading, Machines(False, 2, "laptop")), hardware.find("laptop"))


@pytest.mark.parametrize(
    ("size", "stride", "ring", "each"),
    [
        (8, 1, (700, 0), (700, 0)),  # a node
        (4, 8, (0, 600), (0, 600)),  # a rank of each of four nodes
        (16, 1, (656, 94), (350, 400)),  # two nodes: every eighth hop leaves one, half of all others are in the other
        (4, 4, (300, 300), (200, 400)),  # two ranks of each of two nodes
        (1, 1, (0, 0), (0, 0)),
    ],
)
def test_what_leaves_a_node_of_eight(size: int, stride: int, ring: tuple[int, int], each: tuple[int, int]) -> None:
    group = Group(size, stride, 8)
    whole = 800 if size > 1 else 0
    assert group.ring(whole) == pytest.approx(ring, abs=1)
    assert group.each(whole) == pytest.approx(each, abs=1)


@pytest.mark.slow
def test_each_kind_of_parallelism_sends_what_is_counted() -> None:
    plans = {name: planned(*case) for name, case in CASES.items()}
    found = run_ranks(2, sent, [Case(plan.config, SAMPLES) for plan in plans.values()])
    wrong = []
    for at, (name, plan) in enumerate(plans.items()):
        counted = sum(one.inside for one in traffic(plan) if not one.what.startswith("weights"))
        real = max(rank[at] for rank in found)
        print(name, counted, [r[at] for r in found], counted / (real or 1))
        if abs(counted - real) > BOUND * real:
            wrong.append(f"{name}: {real:.0f} bytes sent, {counted} counted")
    assert not wrong, "\n".join(wrong)
