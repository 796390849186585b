"""What is planned is what Megatron allocates: states to the byte, all of it within 15 %, on real ranks."""

from __future__ import annotations

import pytest

from megarl.bridge.heads import Head
from megarl.config.schema import ParallelConfig
from tests.distributed import run_ranks
from tests.megatron.memory_jobs import Case as Samples
from tests.plan.rank_jobs import Case, Found, found

BOUND = 0.15
DP2 = ParallelConfig(ranks=2)
TP2 = ParallelConfig(ranks=2, tensor=2, sequence=True)
PP2 = ParallelConfig(ranks=2, pipeline=2)
HALF_THE_EXPERTS = Case("qwen3-moe", ParallelConfig(ranks=2, expert=2))
# Tied embeddings (qwen2, qwen3, gemma) are two parameters of two stages, and lie alone in their buffers.
STATES = {
    "one rank": [
        Case("llama"),
        Case("llama", dtype="float32"),
        Case("qwen2"),
        Case("deepseek"),
        Case("gpt-oss"),
        Case("glm4-moe", dtype="float32"),
        Case("gemma3", frozen=("model.embed_tokens.*", "model.layers.1.*")),
        Case("qwen3", head=Head(labels=1, bias=True, fresh=True)),
    ],
    "two ranks": [
        Case("qwen2", DP2),
        Case("qwen2", DP2, distributed=False),
        Case("llama", DP2, dtype="float32"),
        Case("mistral", ParallelConfig(ranks=2, context=2)),
        Case("qwen3", TP2),
        Case("qwen3", PP2),
        Case("llama", ParallelConfig(ranks=2, pipeline=2, virtual=2)),
        Case("gemma2", PP2, dtype="float32"),
    ],
    "two ranks, experts": [
        HALF_THE_EXPERTS,
        Case("deepseek", DP2, frozen=("model.layers.2.*",)),
        Case("deepseek", TP2),
        Case("gpt-oss", ParallelConfig(ranks=2, pipeline=2, stage_layers=[1, 3])),
        Case("mixtral", ParallelConfig(ranks=2, expert_tensor=2), dtype="float32"),
        Case("deepseek-v2", ParallelConfig(ranks=2, tensor=2, sequence=True, expert_tensor=1)),
    ],
    "four ranks": [
        Case("qwen3", ParallelConfig(ranks=4, pipeline=2)),
        Case("qwen2", ParallelConfig(ranks=4, pipeline=2), frozen=("model.layers.0.*",)),
    ],
    "four ranks, experts": [
        Case("qwen3-moe", ParallelConfig(ranks=4, tensor=2, sequence=True, expert=2, expert_tensor=1)),
        Case("deepseek", ParallelConfig(ranks=4, pipeline=2, expert=2)),
    ],
}
LONG = Samples("", prompt=31, response=62, samples=8, together=2)
TOTALS = {
    1: [
        Case("llama", samples=LONG),
        Case("llama", dtype="float32", recompute="full", samples=LONG),
        Case("deepseek", samples=LONG),
        Case("qwen3-moe", recompute="selective", samples=LONG),
    ],
    2: [
        Case("llama", TP2, samples=LONG),
        Case("qwen3", TP2, dtype="float32", samples=LONG),
        Case("llama", PP2, samples=LONG),
        Case("qwen2", DP2, samples=LONG),
        Case("qwen2", ParallelConfig(ranks=2, context=2), samples=LONG),
        Case("qwen3-moe", ParallelConfig(ranks=2, expert=2), samples=LONG),
        Case("llama", ParallelConfig(ranks=2, pipeline=2, virtual=2), recompute="full", samples=LONG),
    ],
}


def ranks(cases: list[Case]) -> list[Found]:
    return [one for of_rank in run_ranks(cases[0].parallel.ranks, found, cases) for one in of_rank]


def told(one: Found) -> str:
    return f"{one.case}, rank {one.rank}: held {one.held}, planned {one.planned}"


def test_a_rank_with_half_the_experts_holds_what_is_planned() -> None:
    wrong = [told(one) for one in ranks([HALF_THE_EXPERTS]) if one.held != one.planned]
    assert not wrong, "\n".join(wrong)


@pytest.mark.slow
@pytest.mark.parametrize("name", STATES)
def test_states_to_the_byte(name: str) -> None:
    wrong = [told(one) for one in ranks(STATES[name]) if one.held != one.planned]
    assert not wrong, "\n".join(wrong)


@pytest.mark.slow
@pytest.mark.parametrize("world", TOTALS)
def test_the_total_within_fifteen_percent(world: int) -> None:
    wrong = []
    for one in ranks(TOTALS[world]):
        planned, measured = sum(one.planned.values()) + one.activations, sum(one.held.values()) + one.peak
        if one.held != one.planned or abs(planned / measured - 1) > BOUND:
            wrong.append(f"{told(one)}; {one.peak} more, planned {one.activations}: {planned / measured:.3f} of it")
    assert not wrong, "\n".join(wrong)
