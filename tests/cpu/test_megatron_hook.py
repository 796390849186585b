"""The import hook runs the real Megatron-core on a machine without CUDA, and cannot be entered where CUDA is."""

import ast
import subprocess
import sys
import textwrap

import pytest
import torch

from megarl.cpu import megatron_hook, process_env


def run(code: str) -> subprocess.CompletedProcess[str]:
    """A fresh interpreter: the hook is about what was imported before."""
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(code)],
        check=False,
        capture_output=True,
        text=True,
        timeout=180,
    )


def rewritten(code: str) -> str:
    return ast.unparse(ast.fix_missing_locations(megatron_hook._Retarget().visit(ast.parse(code))))


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("torch.empty(2, device='cuda')", "torch.empty(2, device='cpu')"),
        ("torch.device('cuda:0')", "torch.device('cpu')"),
        ("torch.device(f'cuda:{rank}')", "torch.device('cpu')"),
        ("t.type() == 'torch.cuda.BFloat16Tensor'", "t.type() == 'torch.BFloat16Tensor'"),
        ("torch.cuda.current_device()", "__megarl_cuda__.current_device()"),
        ("x.cuda(non_blocking=True)", "x.cpu()"),
        ("torch.tensor([1], pin_memory=True).cuda()", "torch.tensor([1]).cpu()"),
        ("f'on cuda: {rank}'", "f'on cuda: {rank}'"),  # a message, not a device
        ("other.cuda.thing", "other.cuda.thing"),
    ],
)
def test_rewrites(source, expected):
    assert rewritten(source) == ast.unparse(ast.parse(expected))


def test_real_megatron_trains_a_step():
    done = run(
        """
        from megarl.cpu import enter_megatron
        assert enter_megatron() and enter_megatron()
        import os, torch, torch.distributed as dist
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        from megatron.core import parallel_state, tensor_parallel
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
        from megatron.core.models.gpt.gpt_model import GPTModel
        from megatron.core.transformer import TransformerConfig
        parallel_state.initialize_model_parallel(create_gloo_process_groups=True)
        tensor_parallel.model_parallel_cuda_manual_seed(1)
        config = TransformerConfig(num_layers=2, hidden_size=24, num_attention_heads=2, attention_dropout=0.0, hidden_dropout=0.0)
        model = GPTModel(config, get_gpt_layer_local_spec(), vocab_size=40, max_sequence_length=16)
        ids = torch.arange(10)[None]
        mask = torch.ones(1, 1, 10, 10, dtype=torch.bool).triu(1)
        loss = model(ids, ids, mask, labels=(ids + 1) % 40).mean()
        loss.backward()
        assert all(p.grad is not None and p.device.type == "cpu" for p in model.parameters())
        assert not hasattr(torch.cuda, "__megarl_cuda__") and torch.cuda.__name__ == "torch.cuda"
        print("loss", loss.item())
        """
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.startswith("loss 3.") or done.stdout.startswith("loss 4."), done.stdout


def test_too_late_is_an_error():
    done = run(
        """
        import sys, types
        sys.modules["megatron.core"] = types.ModuleType("megatron.core")
        from megarl.cpu import enter_megatron
        enter_megatron()
        """
    )
    assert done.returncode != 0
    assert "before the first import of megatron.core" in done.stderr


def test_nothing_happens_where_cuda_is(monkeypatch):
    from megarl import cpu

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    before, path = list(sys.meta_path), list(sys.path)
    assert cpu.enter_megatron() is False
    megatron_hook.install()
    assert cpu.enter_sglang() is False
    assert sys.meta_path == before and sys.path == path


def test_process_env_sets_threads_of_a_new_process():
    import os

    done = subprocess.run(
        [sys.executable, "-c", "import torch; print(torch.get_num_threads())"],
        env={**os.environ, **process_env(1)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "1"
