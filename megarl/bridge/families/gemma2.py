"""Gemma 2 (arXiv:2408.00118): capped attention scores and logits, every other layer with a sliding window."""

from __future__ import annotations

from typing import Any

from megarl.bridge import gemma
from megarl.bridge.family import Config, Family
from megarl.bridge.fields import number
from megarl.bridge.windows import sliding_layers, window_settings


def _settings(config: Config) -> dict[str, Any]:
    return {
        **gemma.scales(config),
        **window_settings(config, 4096, sliding_layers(config, every=2)),
        "attention_softcap": number(config, "attn_logit_softcapping", 50.0),
        "final_softcap": number(config, "final_logit_softcapping", 30.0),
    }


GEMMA2 = Family(
    architecture="Gemma2ForCausalLM",
    model_type="gemma2",
    rules=gemma.RULES,
    transformer=gemma.TRANSFORMER,
    reads=gemma.READS | {"attn_logit_softcapping", "final_logit_softcapping"},
    settings=_settings,
    requires=gemma.REQUIRES,
    ignores=gemma.IGNORES,
    defaults=gemma.DEFAULTS,
)
