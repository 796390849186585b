"""What Transformer Engine cannot compute is refused where it would run: when a run is checked, and when a model is built."""

from __future__ import annotations

import pytest

from megarl.bridge.model_map import ModelMap
from megarl.config.schema import ParallelConfig
from megarl.controller import role_checks
from megarl.errors import UserError
from megarl.models.tiny import RECIPES, tiny_config

CAPS, WINDOWS = "caps its attention scores (attn_logit_softcapping)", "context parallelism under Transformer Engine"


@pytest.fixture
def with_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    from megarl.megatron import limits, model

    for module in (limits, model):
        monkeypatch.setattr(module, "uses_transformer_engine", lambda: True)


def told(family: str, context: int) -> list[str]:
    model = ModelMap.from_hf(tiny_config(family))
    return list(role_checks.layout_problems("actor.parallel", ParallelConfig(ranks=2, context=context), model))


@pytest.mark.usefixtures("with_engine")
def test_a_run_is_refused_with_the_layout_that_asks_for_it() -> None:
    for family in RECIPES:
        capped, windowed = family in ("gemma2", "gpt-oss"), family in ("mistral", "gemma2", "gemma3", "gpt-oss")
        assert len(told(family, 1)) == capped, family
        assert len(told(family, 2)) == capped + windowed, family
    assert told("gemma2", 1)[0].startswith("actor.parallel: a model of type gemma2 " + CAPS)
    assert "has attention sinks" in told("gpt-oss", 1)[0]
    assert WINDOWS in told("gemma3", 2)[0]


def test_without_it_all_of_them_run() -> None:
    assert not any(told(family, context) for family in RECIPES for context in (1, 2))


@pytest.mark.usefixtures("with_engine")
def test_no_such_model_is_built() -> None:
    from megarl.megatron.model import transformer_config
    from megarl.megatron.parallel import Place

    place = Place(0, 2, 0, 1, 0, 1, 0, 1, context_size=2)
    with pytest.raises(UserError, match="set context=1"):
        transformer_config(ModelMap.from_hf(tiny_config("mistral")), place, dtype="float32", sequence=False)
