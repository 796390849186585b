"""What a choice of numbers turns into: Megatron's fields, the recipe that Megatron makes of them, and what is refused."""

from __future__ import annotations

import ast
import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.megatron.precision import RECIPES, Machine, PrecisionSettings, problems

BLACKWELL = Machine(cuda=True, capability=(10, 0), transformer_engine=(2, 9))
HOPPER = Machine(cuda=True, capability=(9, 0), transformer_engine=(2, 9))
LAPTOP = Machine(cuda=False)


def transformer_config(settings: PrecisionSettings, **more: Any) -> Any:
    from megatron.core.transformer.transformer_config import TransformerConfig

    fields = {"num_layers": 8, "hidden_size": 64, "num_attention_heads": 4, **more}
    return TransformerConfig(**fields, **settings.transformer_fields())


def source(module: str) -> ast.Module:
    """Parsed, because fp8 code of Megatron-core is only defined where Transformer Engine is."""
    import megatron.core

    return ast.parse((Path(megatron.core.__path__[0]) / module).read_text())


def function(tree: ast.AST, name: str, keyword: str) -> ast.AST:
    """The definition of that name that mentions `keyword`."""
    (found,) = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name and keyword in ast.unparse(node)
    ]
    return found


@pytest.mark.parametrize(("dtype", "bf16"), [("float32", False), ("bfloat16", True)])
def test_without_float8(dtype: str, bf16: bool) -> None:
    config = transformer_config(PrecisionSettings(dtype))
    assert config.params_dtype is config.pipeline_dtype is getattr(torch, dtype)
    assert (config.bf16, config.fp8, config.fp8_param, config.first_last_layers_bf16) == (bf16, None, False, False)


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_is_what_megatron_is_told(recipe: str) -> None:
    config = transformer_config(PrecisionSettings(fp8=recipe, fp8_params=True))
    assert (config.fp8_recipe, config.fp8_param, config.bf16) == (recipe, True, True)
    assert config.fp8 == {"delayed": "hybrid", "tensorwise": "hybrid", "blockwise": "e4m3", "mxfp8": "e4m3"}[recipe]
    assert config.tp_only_amax_red and not config.first_last_layers_bf16
    assert transformer_config(PrecisionSettings(fp8=recipe, fp8_format="hybrid")).fp8 == "hybrid"


def test_history_of_delayed_scaling() -> None:
    settings = PrecisionSettings(fp8="delayed", fp8_margin=2, fp8_history=16, fp8_history_use="most_recent")
    config = transformer_config(settings)
    assert (config.fp8_margin, config.fp8_amax_history_len, config.fp8_amax_compute_algo) == (2, 16, "most_recent")
    made = function(source("extensions/transformer_engine.py"), "TEDelayedScaling", "super().__init__")
    for field in ("config.fp8_margin", "config.fp8_amax_history_len", "config.fp8_amax_compute_algo"):
        assert field in ast.unparse(made)


@pytest.mark.parametrize(("first", "last"), [(1, 0), (0, 2), (2, 3)])
def test_layers_in_bfloat16_are_those_of_megatron(first: int, last: int) -> None:
    from megatron.core.fp8_utils import is_first_last_bf16_layer

    settings = PrecisionSettings(fp8="tensorwise", first_layers_bf16=first, last_layers_bf16=last)
    config = transformer_config(settings)
    theirs = [is_first_last_bf16_layer(config, layer) for layer in range(8)]
    assert theirs == [settings.in_bf16(layer, 8) for layer in range(8)]
    assert sum(theirs) == first + last


def test_recipes_are_the_classes_that_megatron_makes() -> None:
    """recipe -> class and least version, read from Megatron's own choice."""
    from megarl.megatron.precision import _RECIPES

    choice = function(source("fp8_utils.py"), "get_fp8_recipe", "Fp8Recipe.blockwise")
    made: dict[str, tuple[str, tuple[int, int]]] = {}
    for node in ast.walk(choice):
        if isinstance(node, ast.If) and "config.fp8_recipe == Fp8Recipe." in (test := ast.unparse(node.test)):
            recipe = test.split("Fp8Recipe.")[1].split()[0]
            call = ast.unparse(node.body[-1]).split("(")[0].split(".")[-1].removeprefix("fp8_recipe = ")
            version = test.split("is_te_min_version('")[1].split("'")[0] if "is_te_min" in test else "2.1.0"
            made[recipe] = (call, tuple(int(part) for part in version.split(".")[:2]))
    assert made.keys() == {*RECIPES, "custom"}
    for recipe, (name, _, version, _, _) in _RECIPES.items():
        assert made[recipe][0].removeprefix("TE") == name
        if recipe != "delayed":  # also made by older versions
            assert made[recipe][1] == version


def test_scales_are_agreed_on_by_the_ranks_of_one_micro_batch() -> None:
    """`tp_only_amax_red` is what decides it: data-parallel ranks may have different numbers of micro-batches."""
    context = ast.unparse(function(source("fp8_utils.py"), "get_fp8_context", "fp8_autocast"))
    assert "get_amax_reduction_group(with_context_parallel=True, tp_only_amax_red=config.tp_only_amax_red)" in context


@pytest.mark.parametrize("recipe", RECIPES)
def test_rows_are_padded_to_what_the_products_need(recipe: str) -> None:
    from megatron.core.fp8_utils import get_fp8_align_size

    assert PrecisionSettings(fp8=recipe).token_multiple == get_fp8_align_size(recipe)
    assert PrecisionSettings(fp8=recipe, fp8_backend="emulate").token_multiple == 1
    assert PrecisionSettings().token_multiple == 1


def test_emulation_is_labelled_and_unknown_to_megatron() -> None:
    settings = PrecisionSettings(fp8="mxfp8", fp8_backend="emulate")
    assert settings.label == "fp8 mxfp8 e4m3 (emulated)" and settings.emulated
    assert settings.transformer_fields() == PrecisionSettings().transformer_fields()
    assert PrecisionSettings(fp8="delayed").label == "fp8 delayed hybrid"
    assert PrecisionSettings("float32").label == "float32"


REFUSED = {
    "needs an NVIDIA GPU and Transformer Engine, and this machine has no CUDA": ({"fp8": "delayed"}, LAPTOP),
    "needs Transformer Engine, which is not installed": ({"fp8": "delayed"}, Machine(True, (9, 0))),
    "needs Transformer Engine 2.3 or newer, and 2.2 is installed": (
        {"fp8": "blockwise"},
        Machine(True, (9, 0), (2, 2)),
    ),
    "needs a GPU of compute capability 10.0 or higher, and this one has 9.0": ({"fp8": "mxfp8"}, HOPPER),
    "needs a GPU of compute capability 8.9": ({"fp8": "delayed"}, Machine(True, (8, 0), (2, 9))),
    "on top of bfloat16, not float32": ({"fp8": "delayed", "dtype": "float32"}, BLACKWELL),
    "fp8=delayed cannot leave single layers": ({"fp8": "delayed", "first_layers_bf16": 1}, BLACKWELL),
    "first_layers_bf16 is 5, more than the 4 layers": ({"fp8": "mxfp8", "first_layers_bf16": 5}, BLACKWELL),
    "leave none of the 8 layers": ({"fp8": "mxfp8", "first_layers_bf16": 4, "last_layers_bf16": 4}, BLACKWELL),
    "fp8_params keeps weights in float8, and": ({"fp8_params": True}, BLACKWELL),
    "fp8_params has no meaning": ({"fp8": "mxfp8", "fp8_params": True, "fp8_backend": "emulate"}, LAPTOP),
    "recompute a micro-batch at later scales": ({"fp8": "delayed", "fp8_backend": "emulate"}, LAPTOP),
    "fp8 is int8; it must be one of null, delayed, tensorwise": ({"fp8": "int8"}, BLACKWELL),
    "fp8_format is e5m2; it must be one of": ({"fp8": "mxfp8", "fp8_format": "e5m2"}, BLACKWELL),
    "fp8_history is 0; it must be at least 1": ({"fp8": "delayed", "fp8_history": 0}, BLACKWELL),
    "sizes that divide by 32, and a rank has 48 MLP units": ({"fp8": "mxfp8"}, BLACKWELL),
}


@pytest.mark.parametrize("sentence", REFUSED)
def test_what_cannot_work_is_one_sentence(sentence: str) -> None:
    values, machine = REFUSED[sentence]
    widths = {"MLP units": 48} if "MLP units" in sentence else {"MLP units": 64}
    (problem,) = problems(
        PrecisionSettings(**values), layers=8, pipeline=2, recompute="full", widths=widths, machine=machine
    )
    assert sentence in problem and problem.startswith("actor.precision.")


@pytest.mark.parametrize("recipe", [None, *RECIPES])
def test_what_works(recipe: str | None) -> None:
    settings = PrecisionSettings(fp8=recipe)
    assert not problems(settings, layers=8, widths={"MLP units": 64}, machine=BLACKWELL)
    assert not problems(dataclasses.replace(settings, fp8_backend="emulate"), layers=8, machine=LAPTOP)


@pytest.mark.parametrize(
    "settings",
    [
        PrecisionSettings(fp8="delayed", last_layers_bf16=1),
        PrecisionSettings(fp8="tensorwise", first_layers_bf16=5),
    ],
)
def test_megatron_refuses_the_same(settings: PrecisionSettings) -> None:
    assert problems(settings, layers=8, pipeline=2, machine=BLACKWELL)
    with pytest.raises(ValueError):
        transformer_config(settings, pipeline_model_parallel_size=2)


def test_this_machine_is_asked_where_none_is_named() -> None:
    assert Machine.here().cuda == torch.cuda.is_available()
    if not torch.cuda.is_available():
        (problem,) = problems(PrecisionSettings(fp8="tensorwise"), layers=8)
        assert (
            "this machine has no CUDA; set actor.precision.fp8=null, or actor.precision.fp8_backend=emulate" in problem
        )
