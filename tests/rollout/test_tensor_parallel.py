"""An engine of two ranks: what it samples is what transformers computes, and new weights are proved on what each rank holds."""

import pytest

from megarl.models.tiny import make_tiny
from megarl.reshard.fingerprint import fingerprint
from megarl.rollout.engine import Engine
from megarl.rollout.sampling import Sampling
from tests.rollout.test_engine import PROMPTS, expose, fill, shared, tensors_of, update, worst

__all__ = ["shared"]  # a fixture
# One key-value head for two ranks: SGLang copies it to both on a GPU, and on a CPU adds heads of zeros.
FAMILIES = {
    "qwen2-untied": {},
    "qwen2": {},
    "qwen3": {},
    "llama": {},
    "qwen3-moe": {},
    "llama, one key-value head": {"num_key_value_heads": 1},
}


@pytest.mark.slow  # tests/controller/test_weights.py has one in the fast set
@pytest.mark.parametrize("family", FAMILIES)
def test_two_ranks_sample_and_are_proved(family, tmp_path, shared, reference):
    kind = family.partition(",")[0]
    first, second = (make_tiny(kind, tmp_path / str(seed), seed=seed, **FAMILIES[family]) for seed in (0, 1))
    engine = Engine(str(first), dtype="float32", seed=3, max_total_tokens=4096, extra={"tp_size": 2})
    try:
        assert worst(engine.generate(PROMPTS, Sampling(n=2, max_new_tokens=16)), first, reference) <= 1e-5
        tensors = tensors_of(second)
        expected = {name: fingerprint(tensor) for name, tensor in tensors.items()}
        assert update(engine, tensors, shared, 1) == expected
        assert worst(engine.generate(PROMPTS, Sampling(n=2, max_new_tokens=16)), second, reference) <= 1e-5

        # Both are cut over the ranks: one by rows, the other by columns.
        for part in ("up_proj", "down_proj"):
            name = next(n for n in tensors if n.startswith("model.layers.1.") and n.endswith(f".{part}.weight"))
            turned = {**tensors, name: tensors[name].t().contiguous().view(tensors[name].shape)}
            prints = update(engine, turned, shared, 2)
            assert {name for name in prints if prints[name] != expected[name]} == {name}

        tensors = tensors_of(first)
        prints = fill(engine, expose(engine, tensors_of(second), shared), tensors)
        assert prints == {name: fingerprint(tensor) for name, tensor in tensors.items()}
        assert worst(engine.generate(PROMPTS, Sampling(n=2, max_new_tokens=16)), first, reference) <= 1e-5
    finally:
        engine.shutdown()
