"""Dense families in a real engine beside those that the other tests run: sampled as transformers computes them, new weights proved."""

import pytest

from megarl.models.tiny import make_tiny
from megarl.reshard.fingerprint import fingerprint
from megarl.rollout.engine import Engine
from megarl.rollout.sampling import Sampling
from tests.rollout.test_engine import PROMPTS, shared, tensors_of, update, worst

__all__ = ["shared"]  # a fixture
# Mistral without a window, and with one that no sequence is longer than: SGLang's has none.
CASES = {
    "mistral": {"sliding_window": None},
    "mistral, wide window": {"sliding_window": 256},
    "gemma3": {},  # windows shorter than the sequences
    "glm4-moe": {},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_family_is_sampled_and_proved(name, tmp_path, shared, reference):
    family = name.partition(",")[0]
    first, second = (make_tiny(family, tmp_path / str(seed), seed=seed, **CASES[name]) for seed in (0, 1))
    engine = Engine(str(first), dtype="float32", seed=3, max_total_tokens=4096)
    try:
        assert worst(engine.generate(PROMPTS, Sampling(n=2, max_new_tokens=16)), first, reference) <= 1e-5
        tensors = tensors_of(second)
        expected = {name: fingerprint(tensor) for name, tensor in tensors.items()}
        assert update(engine, tensors, shared, 1) == expected
        assert worst(engine.generate(PROMPTS, Sampling(n=2, max_new_tokens=16)), second, reference) <= 1e-5
    finally:
        engine.shutdown()
