"""Mixtures of experts in a real engine: sampled as transformers computes them, new weights taken, and every expert proved."""

import pytest

from megarl.models.tiny import make_tiny
from megarl.reshard.fingerprint import fingerprint
from megarl.rollout.engine import Engine
from megarl.rollout.sampling import Sampling
from tests.rollout.test_engine import PROMPTS, shared, tensors_of, update, worst

__all__ = ["shared"]  # a fixture
# SGLang's Mixtral has heads of hidden / heads.
FAMILIES = {
    "qwen3-moe": ({}, "mlp.experts.{}.down_proj"),
    "mixtral": ({"head_dim": 12}, "block_sparse_moe.experts.{}.w2"),
}


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_experts_are_sampled_and_proved(family, tmp_path, shared, reference):
    sizes, expert = FAMILIES[family]
    first, second = (make_tiny(family, tmp_path / str(seed), seed=seed, **sizes) for seed in (0, 1))
    engine = Engine(str(first), dtype="float32", seed=3, max_total_tokens=4096)
    try:
        assert worst(engine.generate(PROMPTS, Sampling(n=2, max_new_tokens=16)), first, reference) <= 1e-5
        tensors = tensors_of(second)
        expected = {name: fingerprint(tensor) for name, tensor in tensors.items()}
        assert update(engine, tensors, shared, 1) == expected
        assert worst(engine.generate(PROMPTS, Sampling(n=2, max_new_tokens=16)), second, reference) <= 1e-5

        # One expert in another's place is seen, and named by its own fingerprint alone.
        one, other = (f"model.layers.1.{expert.format(number)}.weight" for number in (3, 7))
        swapped = {**tensors, one: tensors[other], other: tensors[one]}
        prints = update(engine, swapped, shared, 2)
        assert {name for name in prints if prints[name] != expected[name]} == {one, other}
    finally:
        engine.shutdown()
