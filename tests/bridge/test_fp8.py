"""Float8 by blocks, against every number that e4m3 has; whole and in regions; read back as it was written."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from megarl.bridge import fp8
from megarl.bridge.model_map import ModelMap
from megarl.bridge.quantised import FIELD, QuantisedReader
from megarl.models.tiny import tiny_config

ALL = torch.arange(256, dtype=torch.uint8).view(fp8.DTYPE).double()
E4M3 = ALL[ALL.isfinite()].unique()  # ascending; the two zeros are one
SHAPE = (300, 517)  # 3 x 5 blocks, the last ones cut to 44 rows and 5 columns


def matrix(kind: str) -> Tensor:
    """Of float32, block by block of another size."""
    w = torch.randn(SHAPE, generator=torch.Generator().manual_seed(3))
    if kind == "tiny":  # below the smallest normal number, too
        return w * torch.logspace(-45, -30, SHAPE[1])
    if kind == "huge":
        return (w * torch.logspace(30, 38, SHAPE[1])).clamp(-3.4e38, 3.4e38)
    w[128:256, 128:256] = 0
    w[256:, 512:] = 0
    w[:128, :128] *= torch.logspace(-6, 3, 128)  # far apart in a block
    return w


def halves(quotients: Tensor) -> Tensor:
    """float64: half the step between the two numbers of e4m3 around each."""
    upper = torch.searchsorted(E4M3, quotients.contiguous()).clamp(1, len(E4M3) - 1)
    return (E4M3[upper] - E4M3[upper - 1]) / 2


def whole(w: Tensor) -> tuple[Tensor, Tensor]:
    touched, found = fp8.magnitudes(w, (0, 0))
    assert touched == tuple(slice(0, count) for count in fp8.blocks(w.shape))
    scales = fp8.scales_of(found)
    return fp8.quantise(w, (0, 0), scales), scales


def spread(scales: Tensor, shape: tuple[int, int]) -> Tensor:
    return scales.repeat_interleave(128, 0).repeat_interleave(128, 1)[: shape[0], : shape[1]]


@pytest.mark.parametrize("kind", ["plain", "tiny", "huge"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_number_becomes_the_nearest_that_there_is(kind: str, dtype: torch.dtype) -> None:
    w = matrix(kind).to(dtype)
    numbers, scales = whole(w)
    assert numbers.dtype == fp8.DTYPE and scales.dtype == torch.float32 and scales.shape == (3, 5)
    for row, column in ((r, c) for r in range(3) for c in range(5)):
        block = w[row * 128 : (row + 1) * 128, column * 128 : (column + 1) * 128].double()
        largest = block.abs().max()
        want = max(float(largest) / 448, 2.0**-126) if largest else 1.0
        assert float(scales[row, column]) == pytest.approx(want, rel=2e-7)
    # float64 from here on; a quotient's own rounding may decide where two numbers are equally near
    exact, got = w.double() / spread(scales, SHAPE).double(), numbers.double()
    assert got.isfinite().all() and got.abs().max() == 448
    assert ((got - exact).abs() <= halves(exact) * (1 + 1e-6)).all()
    back = got * spread(scales, SHAPE).double()
    assert ((back - w.double()).abs() <= halves(exact) * (1 + 1e-6) * spread(scales, SHAPE).double()).all()
    assert (got[w == 0] == 0).all()


def test_ties_go_to_the_even_one() -> None:
    """Beside a number that makes the scale 1."""
    middles = (E4M3[1:] + E4M3[:-1]) / 2
    w = torch.zeros(4, 128)
    w[:2].view(-1)[: len(middles)] = middles.float()
    w[2, 0] = 448
    numbers, scales = whole(w)
    assert scales.item() == 1
    codes = numbers[:2].view(-1)[: len(middles)].view(torch.uint8)
    assert (codes % 2 == 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_regions_have_the_bytes_of_the_whole(dtype: torch.dtype) -> None:
    """Whatever cuts them: magnitudes go together by their maximum, and every block is one region's to answer for."""
    w = matrix("plain").to(dtype)
    numbers, scales = whole(w)
    rows, columns = (0, 37, 128, 129, 300), (0, 1, 256, 400, 514, 517)
    regions = [(slice(*r), slice(*c)) for r in pairwise(rows) for c in pairwise(columns)]
    found, owners = torch.zeros(3, 5), torch.zeros(3, 5)
    for region in regions:
        where, magnitudes = fp8.magnitudes(w[region], [part.start for part in region])
        found[where] = found[where].maximum(magnitudes)
        owners[fp8.owned_scales(region)] += 1
    assert torch.equal(fp8.scales_of(found), scales) and (owners == 1).all()
    for region in regions:
        part = fp8.quantise(w[region], [part.start for part in region], scales)
        assert torch.equal(part.view(torch.uint8), numbers[region].view(torch.uint8))


def test_a_large_matrix_is_done_in_bands(monkeypatch: pytest.MonkeyPatch) -> None:
    w = matrix("plain")
    numbers, scales = whole(w)
    monkeypatch.setattr(fp8, "_AT_ONCE", 1)
    again, same = whole(w)
    assert torch.equal(same, scales) and torch.equal(again.view(torch.uint8), numbers.view(torch.uint8))
    part = fp8.quantise(w[100:290, 7:], (100, 7), scales)
    assert torch.equal(part.view(torch.uint8), numbers[100:290, 7:].view(torch.uint8))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_shows_in_its_block(value: float) -> None:
    w = matrix("plain")
    w[200, 130] = value
    _, found = fp8.magnitudes(w, (0, 0))
    assert found.isfinite().sum() == 14 and found[1, 1] == float("inf")


def test_it_is_read_as_the_bridge_reads_published_ones(tmp_path: Path) -> None:
    w = matrix("plain").bfloat16()
    numbers, scales = whole(w)
    name = "model.layers.0.mlp.up_proj.weight"
    save_file({name: numbers, fp8.scales_name(name): scales}, tmp_path / "model.safetensors")
    config = json.loads(json.dumps({FIELD: fp8.CONFIG}))
    got = QuantisedReader(tmp_path, config).get(name)
    back = numbers.float() * spread(scales, SHAPE)
    assert torch.equal(got, back.bfloat16())


def test_linear_layers_are_quantised_and_nothing_else() -> None:
    model = ModelMap.from_hf(tiny_config("qwen3-moe", mlp_only_layers=[1]))
    kinds = {name.split(".", 3)[-1] if ".layers." in name else name for name in fp8.quantised(model)}
    projections = {f"self_attn.{x}_proj.weight" for x in "qkvo"}
    mlp = [f"{x}_proj.weight" for x in ("gate", "up", "down")]
    assert kinds == projections | {f"mlp.{x}" for x in mlp} | {f"mlp.experts.{e}.{x}" for e in range(10) for x in mlp}
    biased = fp8.quantised(ModelMap.from_hf(tiny_config("qwen2")))  # its output layer is its embedding
    assert len(biased) == 4 * 7 and all(len(shape) == 2 for shape in biased.values())
