"""A layout that cannot be is refused before anything starts, axis by axis and family by family, with a change that makes it legal."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest

from megarl.controller.preflight import preflight_file
from megarl.errors import ConfigError
from megarl.models.tiny import make_tiny

ROOT = Path(__file__).parents[2]
DENSE = ("qwen2", "qwen3", "llama")
EXPERTS = ("qwen3-moe", "deepseek")
PLAIN = {"ranks": "1", "tensor": "1", "sequence": "false"}


class Bad(NamedTuple):
    """Fields of actor.parallel, what is said of them, and those by which the sentence mends them."""

    fields: dict[str, str]
    said: tuple[str, ...]
    mended: dict[str, str]
    families: tuple[str, ...] = DENSE + EXPERTS


CASES = {
    "tensor": Bad(
        {"ranks": "5", "tensor": "5", "sequence": "true"},
        ("actor.parallel.tensor=5: tensor parallelism 5 does not divide the model's", "use 2"),
        {"ranks": "2", "tensor": "2"},
    ),
    "pipeline": Bad(
        {"ranks": "3", "pipeline": "3"},
        ("actor.parallel.pipeline=3: pipeline parallelism 3 does not divide the model's 4 layers; use 2 or 4",),
        {"ranks": "2", "pipeline": "2"},
    ),
    "ranks, of tensor": Bad(
        {"ranks": "3", "tensor": "2", "sequence": "true"},
        ("actor.parallel.ranks=3 does not divide by tensor*pipeline*context=2*1*1; set actor.parallel.ranks=4",),
        {"ranks": "4"},
    ),
    "ranks, of context": Bad(
        {"ranks": "3", "context": "2"},
        ("actor.parallel.ranks=3 does not divide by tensor*pipeline*context=1*1*2; set actor.parallel.ranks=4",),
        {"ranks": "4"},
    ),
    "data": Bad(
        {"ranks": "17"},
        ("a mini-batch has 16 samples", "for 17 data-parallel ranks", "set data.prompts_per_step=5 or more"),
        {"ranks": "16"},
    ),
    "sequence": Bad(
        {"sequence": "true"},
        ("actor.parallel.sequence=true splits over tensor-parallel ranks", "set actor.parallel.sequence=false"),
        {"sequence": "false"},
    ),
    "virtual, of one stage": Bad(
        {"virtual": "2"},
        ("actor.parallel.virtual=2 interleaves the stages of a pipeline", "set actor.parallel.virtual=1"),
        {"virtual": "1"},
    ),
    "virtual": Bad(
        {"ranks": "2", "pipeline": "2", "virtual": "3"},
        ("actor.parallel.virtual=3: 6 virtual stages", "the model's 4 layers; set actor.parallel.virtual=1"),
        {"virtual": "1"},
    ),
    "layers of stages": Bad(
        {"ranks": "2", "pipeline": "2", "stage_layers": "[1,1]"},
        ("actor.parallel.stage_layers=[1, 1] must add up to the model's 4 layers",),
        {"stage_layers": "[1,3]"},
    ),
    "number of stages": Bad(
        {"ranks": "2", "pipeline": "2", "stage_layers": "[4]"},
        ("actor.parallel.stage_layers names 1 stages", "makes 2; give it 2 numbers"),
        {"stage_layers": "[1,3]"},
    ),
    "expert, without experts": Bad(
        {"ranks": "2", "expert": "2"},
        ("actor.parallel.expert=2: expert parallelism 2 needs a model with experts, which this is not; use 1",),
        {"expert": "1"},
        DENSE,
    ),
    "expert": Bad(
        {"ranks": "7", "expert": "7"},
        ("actor.parallel.expert=7: expert parallelism 7 does not divide the model's", "experts of a layer; use"),
        {"ranks": "2", "expert": "2"},
        EXPERTS,
    ),
    "expert, of the ranks": Bad(
        {"ranks": "3", "expert": "2"},
        ("expert*expert_tensor=2 does not divide the ranks of a pipeline stage, of which there are 3; set ", "ranks=6"),
        {"ranks": "6"},
        EXPERTS,
    ),
    "expert tensor": Bad(
        {"ranks": "7", "expert_tensor": "7"},
        ("actor.parallel.expert_tensor=7: expert tensor parallelism 7 does not divide the model's", "use"),
        {"ranks": "2", "expert_tensor": "2"},
        EXPERTS,
    ),
    "tensor without sequence, of experts": Bad(
        {"ranks": "2", "tensor": "2"},
        ("tensor parallelism 2 of a model with experts needs sequence parallelism; set sequence=true",),
        {"sequence": "true"},
        EXPERTS,
    ),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("bad")


def problems(folder: Path, family: str, fields: dict[str, str]) -> list[str]:
    """What is said of a layout; what is not about layouts is left out."""
    model = folder / family
    if not model.exists():
        make_tiny(family, model)
    overrides = [f"actor.parallel.{key}={value}" for key, value in (PLAIN | fields).items()]
    try:
        preflight_file(ROOT / "configs/tiny.yaml", [f"model.path={model}", f"run.root={folder}/runs", *overrides])
    except ConfigError as error:
        about = ("actor.parallel", "expert", "data-parallel")
        return [p for p in error.problems if not p.startswith("model.path") and any(word in p for word in about)]
    return []


@pytest.mark.parametrize(
    ("axis", "family"),
    [
        pytest.param(
            axis,
            family,
            marks=() if family == ("deepseek" if case.families == EXPERTS else "qwen3") else pytest.mark.slow,
        )
        for axis, case in CASES.items()
        for family in case.families
    ],
)
def test_a_bad_layout_is_refused_with_a_change_that_mends_it(folder: Path, axis: str, family: str) -> None:
    case = CASES[axis]
    found = problems(folder, family, case.fields)
    # DeepSeek's experts cannot be cut by 5 either, which is another sentence.
    assert any(all(part in said for part in case.said) for said in found), found
    assert problems(folder, family, case.fields | case.mended) == []
