"""Checkpoints between the converter and real models: every family, every layout, in both directions."""

from __future__ import annotations

import itertools
import math
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.bridge.model_map import ModelMap
from megarl.bridge.torch_dist import DistReader
from megarl.convert.hf_to_megatron import hf_to_megatron
from megarl.convert.inspect import inspect
from megarl.convert.megatron_to_hf import megatron_to_hf
from megarl.convert.verify import verify
from megarl.errors import UserError
from megarl.models.heads import make_tiny_reward
from megarl.models.tiny import RECIPES, make_tiny, tiny_config
from tests.distributed import free_port, run_ranks
from tests.megatron import resume_jobs
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
EXPERT_FAMILIES = [family for family in RECIPES if ModelMap.from_hf(tiny_config(family)).has_experts]


def possible(family: str, layout: Layout) -> bool:
    model, part = ModelMap.from_hf(tiny_config(family)), layout.expert_tensor
    return not model.check_layout(layout.tensor, 1, layout.expert, part, sequence=layout.sequence)


CASES = [
    (family, name)
    for family in RECIPES
    for name, layout in (DENSE | EXPERTS).items()
    if (name in EXPERTS) <= (family in EXPERT_FAMILIES) and possible(family, layout)
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


FROZEN = {
    "llama with a frozen layer: one rank, to pp2": ("model.layers.1.*",),
    "llama with a frozen first stage: pp2, to one rank": ("model.embed_tokens.weight",),
}
RESUMED = {
    "llama with a frozen layer: one rank, to pp2": ("llama", Layout(), Layout(pipeline=2)),
    "llama with a frozen first stage: pp2, to one rank": ("llama", Layout(pipeline=2, stage_layers=(0, 4)), Layout()),
    "qwen3: dp2, to tp2": ("qwen3", Layout(data=2), Layout(tensor=2)),
    "qwen3: tp2, to pp2": ("qwen3", Layout(tensor=2), Layout(pipeline=2)),
    "qwen3: plain optimizer, to dp2 plain": ("qwen3", Layout(distributed=False), Layout(data=2, distributed=False)),
    "qwen2-untied: pp2 vpp2, to dp2": ("qwen2-untied", Layout(pipeline=2, virtual=2), Layout(data=2)),
    "qwen3-moe: ep2, to tp2": ("qwen3-moe", Layout(data=2, expert=2), EXPERTS["tp2 sp"]),
    "qwen3 in bfloat16: dp2, to tp2": ("qwen3", Layout(data=2), Layout(tensor=2)),
    "qwen3 in bfloat16, plain optimizer: tp2, to dp2": ("qwen3", Layout(tensor=2), Layout(data=2)),
}


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=() if case == "qwen3: dp2, to tp2" else pytest.mark.slow) for case in RESUMED]
)
def test_training_goes_on_as_if_it_had_not_stopped(case: str, tmp_path: Path) -> None:
    family, layout, other = RESUMED[case]
    dtype, far = ("bfloat16", 0.05) if "bfloat16" in case else ("float32", 1e-5)
    folder = make_tiny(family, tmp_path / "hf")

    def run(name: str, on: Layout, first: int, last: int, start: str | None = None) -> Any:
        start = None if start is None else str(tmp_path / start)
        end, meanwhile = str(tmp_path / name), name == "half"
        job = resume_jobs.Job(
            on, str(folder), free_port(), first, last, start, end, dtype, FROZEN.get(case, ()), meanwhile
        )
        return run_ranks(on.world, resume_jobs.run_jobs, [job])[0][0]

    run("straight", layout, 0, 4)
    run("half", layout, 0, 2)
    assert run("resumed", layout, 2, 4, "half") == {"step": 2, "name": "a run"}
    run("elsewhere", other, 2, 4, "half")
    assert furthest(tmp_path / "straight", tmp_path / "resumed") == (0.0, 0.0)
    weights, states = furthest(tmp_path / "straight", tmp_path / "elsewhere")
    assert weights < far
    assert states < far
    assert furthest(tmp_path / "straight", tmp_path / "half")[0] > 1e-3
    back = megatron_to_hf(tmp_path / "straight", tmp_path / "back", config=folder, show=False)
    assert verify(tmp_path / "straight", back, config=folder, show=False).differences == []
    assert "tensors of state" in inspect(tmp_path / "straight", folder)[-1]
    altered_states_are_for_verify_and_altered_weights_for_all(tmp_path / "straight", folder)


def altered_states_are_for_verify_and_altered_weights_for_all(saved: Path, config: Path) -> None:
    """By the checksums that training writes: a conversion looks at the weights', `verify` at all."""
    for of_state in (True, False):
        keys = [key for key in DistReader(saved).tensors if key.startswith("optimizer.") == of_state]
        chunk = DistReader(saved).tensors[keys[-1]].chunks[-1]
        with (saved / chunk.file).open("r+b") as file:
            file.seek(chunk.start + chunk.length // 2)
            file.write(b"?!")
        target = saved.with_name(f"altered-{of_state}")
        with nullcontext() if of_state else pytest.raises(UserError, match="its checksum is not the one"):
            megatron_to_hf(saved, target, config=config, show=False)
        with pytest.raises(UserError, match=f"{chunk.file} is damaged: its checksum is not the one"):
            verify(config, saved, config=config, show=False)


@pytest.mark.parametrize("shape", [(7,), (5, 3), (4, 1), (1, 6), (3, 2, 5)])
def test_a_run_of_elements_is_the_rectangles_that_it_is_cut_into(shape: tuple[int, ...]) -> None:
    from megarl.megatron.dist_checkpoint import Piece, _cut

    count, width = math.prod(shape), math.prod(shape[1:])
    half = torch.zeros(shape)  # two pieces of a parameter, as gate and up are, of a tensor of two layers
    whole = (2, 2 * shape[0], *shape[1:])
    pieces = [Piece("w", half, (1, at, *(0 for _ in shape[1:])), whole, mine=True, leading=1) for at in (0, shape[0])]
    every = range(0, 2 * count + 1, width if len(shape) > 2 else 1)
    for start, stop in itertools.combinations_with_replacement(every, 2):
        found = torch.zeros(whole)
        for piece in _cut(pieces, torch.arange(start, stop).float() + 1, "s.", (start, stop)):
            region = tuple(slice(o, o + s) for o, s in zip(piece.offsets, piece.sizes, strict=True))
            assert not found[region].any() and piece.key == "s.w"
            found[region] = piece.data
        want = torch.arange(2 * count).float() + 1
        want[:start], want[stop:] = 0, 0
        assert torch.equal(found[1].flatten(), want) and not found[0].any()


def held(stored: Any, rows: slice) -> list[slice]:
    """Of the first axis, what some chunk holds."""
    found = {row for c in stored.chunks for row in range(c.offsets[0], c.offsets[0] + c.sizes[0]) if row < rows.stop}
    return [rows] if len(found) == rows.stop else [slice(row, row + 1) for row in sorted(found)]


def furthest(first: Path, second: Path) -> tuple[float, float]:
    """Largest distance of two checkpoints' parameters, and of their optimizer states, relative to each tensor's largest element."""
    a, b = DistReader(first), DistReader(second)
    assert a.tensors.keys() == b.tensors.keys()
    worst = [0.0, 0.0]
    for key, stored in a.tensors.items():
        assert stored.shape == b.tensors[key].shape or "vocab" in key or "embed" in key or "output_layer" in key
        region = tuple(slice(0, min(pair)) for pair in zip(stored.shape, b.tensors[key].shape, strict=True))
        one, other = (torch.zeros([s.stop for s in region], dtype=stored.dtype) for _ in range(2))
        for rows in held(stored, region[0]):  # states of frozen layers are not there
            a.read(key, (rows, *region[1:]), one[rows])
            b.read(key, (rows, *region[1:]), other[rows])
        distance = float((one - other).abs().max() / one.abs().max().clamp_min(1e-12))
        of = int(key.startswith("optimizer."))
        worst[of] = max(worst[of], distance)
    assert any(key.startswith("optimizer.") for key in a.tensors)
    return worst[0], worst[1]


def test_what_cannot_be_loaded_or_saved_is_one_sentence(tmp_path: Path) -> None:
    one, other = make_tiny("qwen3", tmp_path / "one"), make_tiny("qwen2", tmp_path / "other")
    arguments = (str(one), str(other), str(tmp_path / "scratch"), free_port())
    (said,) = run_ranks(1, resume_jobs.complaints, *arguments)
    saved = tmp_path / "scratch" / "saved"
    assert said.pop("read") == "nothing"
    assert said.pop("saved twice") == f"UserError: {saved} exists already and is not overwritten."
    assert said.pop("of another model").startswith(f"UserError: {saved} is no checkpoint of this model: ")
    assert "it lacks optimizer.state.exp_avg.embedding" in said.pop("without an optimizer")
    assert said.pop("nowhere") == f"UserError: There is no checkpoint folder {saved / 'nowhere'}."
    full = tmp_path / "scratch" / "full"
    assert said.pop("a full disk") == f"RunError: {full} could not be written: File too large."
    assert not full.exists()
    assert said.pop("an altered file") == (
        f"UserError: {saved / '__0_0.distcp'} is damaged: its checksum is not the one it was written with."
    )
    assert said.pop("a truncated file").startswith(f"UserError: {saved / '__0_0.distcp'} is cut short: it has ")
    assert not said
