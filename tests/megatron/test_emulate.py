"""Emulated float8: scales, rounding errors, what is summed over what, memory of delayed scales, split tensors, a whole model."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.megatron.precision import RECIPES, PrecisionSettings
from megarl.models.tiny import make_tiny
from tests.distributed import free_port, run_ranks
from tests.megatron.harness import random_batch

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
# Largest relative error of rounding to 3 (2) bits after the leading one, and the smallest number that has them all.
ERROR = {E4M3: (2.0**-4, 2.0**-6), E5M2: (2.0**-3, 2.0**-14)}
TALL, WIDE = 150, 140  # not multiples of any block


def wide_range(rows: int = TALL, columns: int = WIDE, seed: int = 0) -> torch.Tensor:
    """Magnitudes over many powers of two, a block of zeros, a row of zeros."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, columns, generator=g) * torch.randn(rows, columns, generator=g).mul(2).exp()
    x[128:, 128:] = 0.0
    x[3] = 0.0
    return x


def settings(recipe: str, **more: Any) -> PrecisionSettings:
    return PrecisionSettings("float32", fp8=recipe, fp8_backend="emulate", **more)


def rounding(recipe: str, **more: Any) -> Any:
    from megarl.megatron.emulate import Delayed, Rounding

    delayed = {}
    if recipe == "delayed":
        options = {"history": 3, "use": "max", "margin": 0} | more
        delayed = {k: Delayed(d, **options) for k, d in (("input", E4M3), ("weight", E4M3), ("gradient", E5M2))}
    return Rounding(recipe, E4M3, E5M2, (), delayed)


def product(x: torch.Tensor, weight: torch.Tensor, how: Any) -> torch.Tensor:
    from megarl.megatron.emulate import _Product

    return _Product.apply(x, weight, how, True)


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_every_float8_number_stays_itself(dtype: torch.dtype) -> None:
    from megarl.megatron.emulate import quantize

    numbers = torch.arange(256, dtype=torch.uint8).view(dtype).float()
    numbers = numbers[numbers.isfinite()]
    assert len(numbers) >= 246
    for scale in (1.0, 0.25, 3.0):
        assert torch.equal(quantize(numbers / scale, scale, dtype), numbers / scale)


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_beyond_the_format_is_its_largest_number_and_nan_is_nan(dtype: torch.dtype) -> None:
    from megarl.megatron.emulate import quantize

    most = torch.finfo(dtype).max
    got = quantize(torch.tensor([1e9, -torch.inf, torch.nan, 0.0]), 1.0, dtype)
    assert got[:2].tolist() == [most, -most] and got[2].isnan() and got[3] == 0.0


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("amax", [1e-30, 3e-5, 0.7, 1.0, 448.0, 5e4, 1e30])
def test_scales_bring_the_largest_magnitude_to_the_largest_number(amax: float, dtype: torch.dtype) -> None:
    from megarl.megatron.emulate import scale_of

    most = torch.finfo(dtype).max
    value = torch.tensor(amax)
    assert float(scale_of(value, dtype)) == pytest.approx(most / amax, rel=1e-6)
    assert float(scale_of(value, dtype, margin=2)) == pytest.approx(most / amax / 4, rel=1e-6)
    power = float(scale_of(value, dtype, power_of_two=True))
    assert torch.frexp(torch.tensor(power)).mantissa == 0.5  # a power of two
    assert power * amax <= most * (1 + 1e-6) < 2 * power * amax * (1 + 2e-6)


@pytest.mark.parametrize("power_of_two", [False, True])
def test_nothing_to_scale_by(power_of_two: bool) -> None:
    from megarl.megatron.emulate import scale_of

    amax = torch.tensor([0.0, torch.inf, torch.nan, 1e-44])
    scale = scale_of(amax, E4M3, power_of_two=power_of_two)
    assert scale[:3].tolist() == [1.0] * 3 and scale.isfinite().all() and scale[3] > 1e30


@pytest.mark.parametrize("block", [(1, 32), (32, 1), (1, 128), (128, 1), (128, 128)])
def test_blocks_have_their_own_scales(block: tuple[int, int]) -> None:
    """Against a loop over the blocks; powers of two, edges and blocks of zeros included."""
    from megarl.megatron.emulate import quantize, quantize_blocks

    x = wide_range()
    want = torch.full_like(x, torch.nan)
    for row in range(0, TALL, block[0]):
        for column in range(0, WIDE, block[1]):
            here = (slice(row, row + block[0]), slice(column, column + block[1]))
            scale = 1.0
            if amax := float(x[here].abs().max()):
                while scale * 2 * amax <= 448:
                    scale *= 2
                while scale * amax > 448:
                    scale /= 2
            want[here] = quantize(x[here], scale, E4M3)
    got = quantize_blocks(x, block, E4M3)
    assert torch.equal(got, want) and not got[128:, 128:].any() and not got[3].any()
    assert not quantize_blocks(torch.zeros(5, 7), block, E4M3).any()
    assert quantize_blocks(torch.zeros(0, 7), block, E4M3).shape == (0, 7)


@pytest.mark.parametrize("kind", ["input", "weight", "gradient"])
@pytest.mark.parametrize("sums_over", [0, 1])
@pytest.mark.parametrize("recipe", ["tensorwise", "blockwise", "mxfp8"])
def test_errors_are_those_of_the_format(recipe: str, sums_over: int, kind: str) -> None:
    """Relative where a number has all its bits, absolute below; a recipe of smaller blocks leaves fewer numbers below."""
    how, x = rounding(recipe), wide_range()
    dtype = how.dtype(kind)
    got = how.rounded(x, kind, how.tensor_scale(x, kind, remember=True), sums_over)
    relative, normal = ERROR[dtype]
    across = 1 if sums_over == 1 else 0
    amax = x.abs().max() if recipe == "tensorwise" else x.abs().amax(dim=across, keepdim=True)
    # a block's largest number is at most its row's: this is the coarsest scale that it can have, and a power of two costs 2
    floor = 2 * normal * amax / torch.finfo(dtype).max
    if recipe == "blockwise" and kind == "weight":
        floor = 2 * normal * x.abs().max() / torch.finfo(dtype).max
    error = (got - x).abs()
    assert (error <= (x.abs() * relative).maximum(floor * relative)).all()
    assert error.max() > 0.0 and not got[3].any()
    big = x.abs() > floor
    assert (error[big] / x.abs()[big]).max() > relative / 2  # and no finer


def test_smaller_blocks_lose_fewer_numbers() -> None:
    x = wide_range()
    lost = {}
    for recipe in ("tensorwise", "blockwise", "mxfp8"):
        how = rounding(recipe)
        got = how.rounded(x, "input", how.tensor_scale(x, "input", remember=True), 1)
        lost[recipe] = int(((got == 0) & (x != 0)).sum())
    assert lost["tensorwise"] > lost["blockwise"] > lost["mxfp8"]


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_three_products(recipe: str) -> None:
    """Each is that of inputs rounded along the dimension it sums over; the rounding is as above."""
    how, g = rounding(recipe), torch.Generator().manual_seed(1)
    x, weight = wide_range(50, WIDE).requires_grad_(), torch.randn(TALL, WIDE, generator=g).requires_grad_()
    if recipe == "delayed":
        product(x, weight, how).backward(torch.randn(50, TALL, generator=g))  # so that there is something to remember
        x.grad = weight.grad = None
    seen = {kind: state.scale(x) for kind, state in how.delayed.items()}
    grad = torch.randn(50, TALL, generator=g).mul(1e-3)
    y = product(x, weight, how)
    y.backward(grad)

    def rounded(v: torch.Tensor, kind: str, sums_over: int) -> torch.Tensor:
        fresh = rounding(recipe if recipe != "delayed" else "tensorwise")
        scale = seen[kind] if recipe == "delayed" else fresh.tensor_scale(v, kind, remember=True)
        return fresh.rounded(v.detach(), kind, scale, sums_over)

    torch.testing.assert_close(y, rounded(x, "input", 1) @ rounded(weight, "weight", 1).t())
    torch.testing.assert_close(x.grad, rounded(grad, "gradient", 1) @ rounded(weight, "weight", 0))
    torch.testing.assert_close(weight.grad, rounded(grad, "gradient", 0).t() @ rounded(x, "input", 0))
    exact = x @ weight.t()
    assert 1e-3 < (y - exact).norm() / exact.norm() < 0.06
    assert x.grad[4].any() and weight.grad.any()


def test_only_what_needs_a_gradient_gets_one() -> None:
    x, weight = wide_range(20, 30).requires_grad_(), torch.randn(40, 30)
    product(x, weight, rounding("mxfp8")).sum().backward()
    assert x.grad.any() and weight.grad is None


def test_delayed_scales_are_those_of_earlier_passes() -> None:
    from megarl.megatron.emulate import Delayed

    for use, want in (("max", [1.0, 64.0, 64.0, 64.0, 224.0]), ("most_recent", [1.0, 64.0, 448.0, 224.0, 224.0])):
        state, scales = Delayed(E4M3, 3, use, 0), []
        for amax in (7.0, 1.0, 2.0, 2.0, 2.0):
            scales.append(float(state.scale(torch.ones(1))))
            state.saw(torch.tensor(amax))
        assert scales == want  # a history of three has forgotten the 7
        assert state.amaxes.tolist() == [2.0, 2.0, 2.0]
    assert float(Delayed(E4M3, 3, "max", 1, torch.tensor([7.0])).scale(torch.ones(1))) == 32.0


def test_no_tokens() -> None:
    from megarl.megatron.emulate import _forward

    for recipe in RECIPES:
        x, weight = torch.zeros(0, 30, requires_grad=True), torch.randn(40, 30, requires_grad=True)
        y = product(x, weight, rounding(recipe))
        y.sum().backward()
        assert y.shape == (0, 40) and not weight.grad.any()
        module = torch.nn.Module()  # an expert that no token chose
        assert _forward(module, rounding(recipe))(input=x[:, None], weight=weight).shape == (0, 1, 40)


def _linear(kind: str, sequence: bool) -> Any:
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.transformer_config import TransformerConfig

    world = torch.distributed.get_world_size()
    config = TransformerConfig(
        num_layers=2, hidden_size=64, num_attention_heads=4, use_cpu_initialization=True, perform_initialization=False,
        tensor_model_parallel_size=world, sequence_parallel=sequence,
    )  # fmt: skip
    common = {"config": config, "init_method": None, "bias": False, "skip_bias_add": True}
    if kind == "column":
        return ColumnParallelLinear(WIDE, TALL, gather_output=False, **common)
    return RowParallelLinear(WIDE, TALL, input_is_parallel=True, **common)


def _split_module(rank: int, kind: str, sequence: bool, recipe: str) -> dict[str, float]:
    """A linear module over two ranks against the whole of it: outputs and both gradients, relative."""
    from megarl.megatron.emulate import emulate_fp8

    module = _linear(kind, sequence)
    holder = torch.nn.Module()
    layer = torch.nn.Module()
    layer.layer_number, layer.linear = 1, module
    holder.layers = torch.nn.ModuleList([layer])
    emulation = emulate_fp8(holder, settings(recipe, fp8_history=4))
    whole, x = rounding(recipe, history=4), wide_range(60, WIDE)[:, None]
    weight = wide_range(TALL, WIDE, seed=1)  # its largest numbers lie in one rank's part
    g = torch.Generator().manual_seed(2)
    worst = {"y": 0.0, "x": 0.0, "w": 0.0}
    for _ in range(3):
        grad = torch.randn(60, 1, TALL, generator=g)
        x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
        y = product(x[:, 0], weight, whole)
        y.backward(grad[:, 0])
        tokens = slice(30 * rank, 30 * rank + 30) if sequence else slice(None)
        rows, columns = slice(75 * rank, 75 * rank + 75), slice(70 * rank, 70 * rank + 70)
        own = weight[rows] if kind == "column" else weight[:, columns]
        module.weight.data.copy_(own.detach())
        module.weight.grad = None
        here = (x[tokens] if kind == "column" else x[:, :, columns]).detach().requires_grad_()
        got, _ = module(here)
        got.backward(grad[:, :, rows] if kind == "column" else grad[tokens])
        want_y = y[:, rows] if kind == "column" else y[tokens]
        want_x = x.grad[tokens] if kind == "column" else x.grad[:, :, columns]
        want_w = weight.grad[rows] if kind == "column" else weight.grad[:, columns]
        for name, found, want in (
            ("y", got[:, 0], want_y),
            ("x", here.grad, want_x),
            ("w", module.weight.grad, want_w),
        ):
            worst[name] = max(worst[name], float((found - want).abs().max() / want.abs().max()))
        x = x * 3.0
    assert emulation.label.endswith("(emulated)")
    return worst


def _model(folder: str, place: Any, recipe: str | None, **more: Any) -> Any:
    from megarl.megatron.emulate import emulate_fp8
    from megarl.megatron.engine import EngineSettings, MegatronEngine

    engine = MegatronEngine(Path(folder), place, EngineSettings("bfloat16", micro_batch_tokens=60))
    emulation = None
    if recipe is not None:
        chosen = dataclasses.replace(settings(recipe, **more), dtype="bfloat16")
        emulation = emulate_fp8(engine.chunks[0], chosen)
    scores = engine.log_probs(random_batch(engine.map.dims.vocab), temperature=1.0)
    return scores["log_probs"], emulation


def _whole_models(folder: str, place: Any) -> dict[str, Any]:
    plain, _ = _model(folder, place, None)
    found: dict[str, Any] = {"plain": plain}
    for recipe in RECIPES:
        log_probs, emulation = _model(folder, place, recipe)
        found[recipe] = (log_probs, emulation.label, sorted(emulation.modules))
    _, emulation = _model(folder, place, "mxfp8", first_layers_bf16=1, last_layers_bf16=1)
    found["middle"] = sorted(emulation.modules)
    log_probs, emulation = _model(folder, place, "mxfp8", first_layers_bf16=3)
    found["none"] = (log_probs, sorted(emulation.modules))
    return found


def _two_ranks(rank: int, world: int, port: int, folder: str, other: int) -> dict[Any, Any]:
    from megarl.megatron import parallel

    torch.set_num_threads(1)
    place = parallel.start(rank, world, "127.0.0.1", port, tensor=2, pipeline=1, seed=1, timeout=60)
    found: dict[Any, Any] = {
        (kind, sequence, recipe): _split_module(rank, kind, sequence, recipe)
        for kind in ("column", "row")
        for sequence in (False, True)
        for recipe in ("tensorwise", "delayed")
    }
    parallel.stop()
    place = parallel.start(rank, world, "127.0.0.1", other, tensor=1, pipeline=1, seed=1, timeout=60)
    found["models"] = _whole_models(folder, place) if rank == 0 else None
    torch.distributed.barrier()
    parallel.stop()
    return found


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[Any, Any]]:
    folder = make_tiny("qwen3", tmp_path_factory.mktemp("emulate") / "model", num_hidden_layers=3)
    return run_ranks(2, _two_ranks, str(folder), free_port())


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed"])
@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("kind", ["column", "row"])
def test_the_scale_of_a_split_tensor_is_that_of_the_whole(
    ranks: list[dict], kind: str, sequence: bool, recipe: str
) -> None:
    for rank in ranks:
        assert all(distance < 1e-5 for distance in rank[kind, sequence, recipe].values()), rank[kind, sequence, recipe]


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_whole_model_is_near_its_bfloat16(ranks: list[dict], recipe: str) -> None:
    models = ranks[0]["models"]
    log_probs, label, modules = models[recipe]
    assert label.endswith("(emulated)") and recipe in label
    parts = ("self_attention.linear_qkv", "self_attention.linear_proj", "mlp.linear_fc1", "mlp.linear_fc2")
    names = {f"decoder.layers.{layer}.{part}" for layer in range(3) for part in parts}
    assert {name.removeprefix("module.") for name in modules} == names
    distance = (log_probs - models["plain"]).abs()
    assert log_probs.isfinite().all() and 1e-3 < distance.mean() < 0.5


def test_first_and_last_layers_stay_in_bfloat16(ranks: list[dict]) -> None:
    models = ranks[0]["models"]
    assert len(models["middle"]) == 4 and all("layers.1." in name for name in models["middle"])
    log_probs, modules = models["none"]
    assert modules == [] and torch.equal(log_probs, models["plain"])


def test_emulation_only_of_what_is_to_be_emulated() -> None:
    from megarl.megatron.emulate import emulate_fp8

    with pytest.raises(ValueError, match="needs settings with fp8_backend=emulate, and these are bfloat16"):
        emulate_fp8(torch.nn.Linear(2, 2), PrecisionSettings())
    layer = torch.nn.Linear(2, 2)
    layer.layer_number = 1
    with pytest.raises(ValueError, match="needs layers of Megatron's local spec"):
        emulate_fp8(torch.nn.Sequential(layer), settings("mxfp8"))


def test_the_memory_of_delayed_scales_is_saved_and_loaded() -> None:
    from megarl.megatron.emulate import Emulation

    one, other = (Emulation("", {"layers.0.linear": rounding("delayed")}) for _ in range(2))
    assert one.state() == {}
    x, weight = wide_range(20, 30).requires_grad_(), torch.randn(40, 30, requires_grad=True)
    product(x, weight, one.modules["layers.0.linear"]).sum().backward()
    saved = one.state()
    assert sorted(saved) == [f"layers.0.linear.{kind}" for kind in ("gradient", "input", "weight")]
    other.load_state(saved)
    same = [product(x, weight, e.modules["layers.0.linear"]) for e in (one, other)]
    assert torch.equal(*same) and not torch.equal(same[0], product(x, weight, rounding("delayed")))


def test_passes_without_gradients_leave_later_scales_alone() -> None:
    from megarl.megatron.emulate import _forward

    module = torch.nn.Module()
    how = rounding("delayed")
    forward = _forward(module, how)
    x, weight = wide_range(20, 30)[:, None], torch.randn(40, 30, requires_grad=True)
    with torch.no_grad():
        forward(input=x, weight=weight)
    forward(input=x, weight=weight)
    assert how.delayed["input"].amaxes.tolist() == [float(x.abs().max())]  # once
    module.eval()
    forward(input=x, weight=weight)
    assert len(how.delayed["input"].amaxes) == 1
