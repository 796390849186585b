"""Where and how finely optimizer states are kept: what Megatron is told, and what is refused before anything is built."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from megarl.megatron.optimizer import learning, megatron_fields
from megarl.megatron.optimizer_settings import OptimizerSettings, has_fused_adam, problems

LOW = {"exp_avg_dtype": "bfloat16", "exp_avg_sq_dtype": "float8", "main_params_dtype": "float16"}


def found(*, dtype: str = "bfloat16", cuda: bool = True, fused_adam: bool = True, updates: int = 10, **settings: Any):
    return problems(OptimizerSettings(**settings), dtype=dtype, total_updates=updates, cuda=cuda, fused_adam=fused_adam)


def test_float32_states_run_anywhere() -> None:
    for dtype in ("float32", "bfloat16"):
        assert not found(dtype=dtype, cuda=False, fused_adam=False)
        fields = megatron_fields(OptimizerSettings(), dtype, sharded=True)
        assert "use_precision_aware_optimizer" not in fields and "optimizer_cpu_offload" not in fields


def test_low_precision_states_are_what_megatron_is_told() -> None:
    settings = OptimizerSettings(**LOW, main_grads_dtype="bfloat16")
    fields = megatron_fields(settings, "bfloat16", sharded=True)
    assert fields["use_precision_aware_optimizer"]
    names = ("exp_avg_dtype", "exp_avg_sq_dtype", "main_params_dtype", "main_grads_dtype")
    assert [fields[n] for n in names] == [torch.bfloat16, torch.uint8, torch.float16, torch.bfloat16]
    assert settings.sharded(1) and not OptimizerSettings().sharded(
        1
    )  # Megatron has it in the distributed optimizer only
    assert not found(**LOW, main_grads_dtype="bfloat16")


def test_low_precision_states_need_fused_adam() -> None:
    (sentence,) = found(cuda=False, **LOW)
    assert "actor.optimizer.exp_avg_dtype=bfloat16" in sentence and "this machine has no CUDA" in sentence
    (sentence,) = found(fused_adam=False, **LOW)
    assert "needs Transformer Engine's FusedAdam on a GPU, and this machine has no Transformer Engine" in sentence


def test_megatron_itself_builds_no_low_precision_states_without_transformer_engine() -> None:
    """0.16.1 fails on the way to its own sentence: it compares no version with 2.1."""
    from megatron.core.optimizer import OptimizerConfig

    if not has_fused_adam():
        with pytest.raises((RuntimeError, TypeError)):
            OptimizerConfig(**megatron_fields(OptimizerSettings(**LOW), "bfloat16", sharded=True))


def test_offloaded_adam_is_what_megatron_is_told() -> None:
    from megatron.core.optimizer import OptimizerConfig

    fields = megatron_fields(OptimizerSettings(cpu_offload=0.75), "bfloat16", sharded=True)
    assert fields["optimizer_cpu_offload"] and fields["optimizer_offload_fraction"] == 0.75
    assert fields["use_precision_aware_optimizer"] and fields["overlap_cpu_optimizer_d2h_h2d"]
    assert fields["exp_avg_dtype"] is torch.float32
    assert fields.keys() <= {field.name for field in dataclasses.fields(OptimizerConfig)}
    assert not found(cpu_offload=0.75)
    (sentence,) = found(cpu_offload=0.75, fused_adam=False)
    assert "which needs Transformer Engine 2.1 or newer" in sentence


def test_nothing_is_offloaded_where_no_gpu_is() -> None:
    """The sentence, and that it is true: Megatron's optimizer finds nothing to copy a gradient from."""
    from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer

    (sentence,) = found(cuda=False, cpu_offload=0.5)
    assert "cpu_offload=0.5 moves optimizer states from a GPU" in sentence and "set it to 0" in sentence
    weight = torch.nn.Parameter(torch.ones(3))
    adam = HybridDeviceOptimizer(
        [weight], 0.5, torch.optim.AdamW, torch.optim.AdamW, overlap_cpu_optimizer_d2h_h2d=False
    )
    assert adam.gpu_optimizer is None and len(adam.cpu_optimizers) == 1
    weight.grad = torch.ones(3)
    with pytest.raises(KeyError):
        adam.step()


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"exp_avg_dtype": "int8"}, "exp_avg_dtype is int8; it must be one of float32, bfloat16, float16, float8"),
        ({"main_params_dtype": "bfloat16"}, "main_params_dtype is bfloat16; it must be one of float32, float16"),
        ({"main_params_dtype": "float16", "dtype": "float32"}, "model.dtype=float32 has none"),
        (
            {"cpu_offload": 0.5, "exp_avg_dtype": "bfloat16"},
            "cpu_offload keeps the optimizer states of the CPU in float32",
        ),
        (
            {"schedule": "wsd", "wsd_decay_steps": 8, "warmup_steps": 3},
            "wsd_decay_steps is 8, but of 10 updates only 7",
        ),
        ({"schedule": "wsd", "warmup_steps": 10, "updates": 10}, "only 0 follow the 10 of the warm-up"),
    ],
)
def test_what_cannot_be_meant_is_one_sentence(settings: dict[str, Any], sentence: str) -> None:
    (problem,) = found(**settings)
    assert sentence in problem and problem.startswith("actor.optimizer.")


def test_a_tenth_of_all_updates_is_the_decay_of_wsd() -> None:
    assert [OptimizerSettings(schedule="wsd").decay_steps(n) for n in (1, 25, 200)] == [1, 2, 20]


def test_the_configuration_s_section_is_taken_by_its_names() -> None:
    from megarl.config.schema import OptimizerConfig

    section = OptimizerConfig(lr=3e-4, schedule="cosine", clip_grad=0.3, beta2=0.95)
    settings = OptimizerSettings.of(section)
    assert (settings.lr, settings.schedule, settings.clip_grad, settings.beta2) == (3e-4, "cosine", 0.3, 0.95)
    assert OptimizerSettings.of(settings) == settings


def test_what_is_refused_is_refused_before_a_buffer_is_made() -> None:
    from megarl.errors import ConfigError

    settings = OptimizerSettings(cpu_offload=0.5, exp_avg_dtype="bfloat16")
    with pytest.raises(ConfigError, match="moves optimizer states from a GPU|float32"):
        learning([], [], None, None, settings, dtype="bfloat16", ranks=1, total_updates=1)
