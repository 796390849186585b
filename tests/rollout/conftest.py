"""Engines take 15 to 40 s to start: one for all tests of this folder that need no other."""

import pytest
import torch

from megarl.models.tiny import make_tiny
from megarl.rollout.engine import Engine


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "qwen3"
    make_tiny("qwen3", path)
    return path


@pytest.fixture(scope="session")
def other_folder(tmp_path_factory):
    """The same architecture with other weights."""
    path = tmp_path_factory.mktemp("models") / "qwen3-other"
    make_tiny("qwen3", path, seed=1)
    return path


@pytest.fixture(scope="session")
def engine(folder):
    running = Engine(str(folder), dtype="float32", seed=3, max_total_tokens=4096)
    yield running
    running.shutdown()


@pytest.fixture(scope="session")
def reference():
    """transformers' log-probs of a response after a prompt, in float32."""
    from transformers import AutoModelForCausalLM

    models = {}

    def log_probs(path, prompt, response, temperature=1.0):
        if path not in models:
            models[path] = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        with torch.no_grad():
            logits = models[path](torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1].float()
        return torch.log_softmax(logits / temperature, -1).gather(1, torch.tensor(response)[:, None])[:, 0]

    return log_probs
