"""Checkpoints between the converter and real models: every family, every layout, in both directions."""

from __future__ import annotations

from pathlib import Path

import pytest

from megarl.convert.hf_to_megatron import hf_to_megatron
from megarl.convert.megatron_to_hf import megatron_to_hf
from megarl.convert.verify import verify
from megarl.models.heads import make_tiny_reward
from megarl.models.tiny import RECIPES, make_tiny
from tests.distributed import free_port, run_ranks
from tests.megatron.checkpoint_jobs import Job, run_jobs
from tests.megatron.harness import Layout

DENSE = {
    "tp1": Layout(),
    "tp2": Layout(tensor=2),
    "pp2": Layout(pipeline=2),
    "pp2 vpp2": Layout(pipeline=2, virtual=2),
    "dp2": Layout(data=2),
}
EXPERTS = {
    "ep2": Layout(data=2, expert=2),
    "tp2 sp": Layout(tensor=2, sequence=True, expert_tensor=1),
    "tp2 sp etp2": Layout(tensor=2, sequence=True, expert_tensor=2),
}
FAST = [("qwen3", "tp2"), ("qwen3-moe", "ep2")]
EXPERT_FAMILIES = [family for family in RECIPES if "moe" in family or family.startswith(("mixtral", "deepseek"))]
CASES = [
    (family, layout)
    for family in RECIPES
    for layout in (*DENSE, *EXPERTS)
    if (layout in EXPERTS) <= (family in EXPERT_FAMILIES) and not (layout == "tp2" and family in EXPERT_FAMILIES)
]


@pytest.mark.parametrize(
    ("family", "layout"), [pytest.param(*case, marks=() if case in FAST else pytest.mark.slow) for case in CASES]
)
def test_a_model_reads_what_was_converted_and_converts_back_what_it_saves(
    family: str, layout: str, tmp_path: Path
) -> None:
    folder = make_tiny(family, tmp_path / "hf")
    round_trip(folder, (DENSE | EXPERTS)[layout], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["tp2", "pp2"])
def test_a_score_head_goes_the_same_way(layout: str, tmp_path: Path) -> None:
    folder = make_tiny_reward("qwen2", tmp_path / "hf", labels=3, bias=True)
    round_trip(folder, DENSE[layout], tmp_path)


def round_trip(folder: Path, layout: Layout, tmp_path: Path) -> None:
    checkpoint = hf_to_megatron(folder, tmp_path / "checkpoint", show=False)
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    job = Job(layout, str(folder), str(checkpoint), str(ours), free_port(), str(theirs))
    faults = run_ranks(layout.world, run_jobs, [job])
    assert faults == [[[]]] * layout.world
    for saved in (ours, theirs):
        assert verify(folder, saved, config=folder, show=False).differences == []
        back = megatron_to_hf(saved, tmp_path / f"{saved.name}-hf", config=folder, show=False)
        assert (back / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()
