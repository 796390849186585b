"""The stand-ins answer for GPU packages in the process that installed them, and only there."""

import subprocess
import sys
import textwrap


def run(code):
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(code)],
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_decorators_types_errors_and_kernels():
    done = run(
        """
        from megarl.cpu import enter_sglang
        assert enter_sglang() and enter_sglang()
        import triton, triton.language as tl
        from triton.language.extra.cuda import libdevice
        from triton.runtime.errors import OutOfResources

        @triton.autotune(configs=[triton.Config({"B": 2}, num_warps=4)], key=["n"])
        @triton.jit
        def kernel(x, B: tl.constexpr):
            return x

        @libdevice.something
        def decorated():
            return 5

        assert decorated() == 5 and issubclass(OutOfResources, Exception)
        assert triton.cdiv(7, 2) == 4 and triton.next_power_of_2(5) == 8
        from torch.utils._triton import has_triton
        assert not has_triton()
        for launch in (lambda: kernel[(1,)](3), lambda: kernel(3)):
            try:
                launch()
            except RuntimeError as error:
                assert "kernel is a GPU kernel" in str(error)
            else:
                raise SystemExit("a kernel ran")
        import sgl_kernel, torch
        table = torch.zeros(3, 8, dtype=torch.int32)
        sgl_kernel.assign_req_to_token_pool_cpu(
            torch.tensor([2, 0]), table, torch.tensor([1, 0]), torch.tensor([3, 2]), torch.tensor([7, 8, 9, 5]), 8
        )
        assert table.tolist() == [[9, 5, 0, 0, 0, 0, 0, 0], [0] * 8, [0, 7, 8, 0, 0, 0, 0, 0]]
        try:
            sgl_kernel.silu_and_mul(1, 2)
        except RuntimeError as error:
            assert "sgl_kernel.silu_and_mul" in str(error)
        else:
            raise SystemExit("a kernel ran")
        print("ok")
        """
    )
    assert done.stdout.strip() == "ok", done.stderr[-2000:]


def test_too_late_is_an_error():
    done = run(
        """
        import sys, types
        sys.modules["sglang"] = types.ModuleType("sglang")
        from megarl.cpu import enter_sglang
        enter_sglang()
        """
    )
    assert "before the first import of sglang" in done.stderr


def test_nothing_lies_on_the_path():
    done = run("import megarl.cpu, importlib.util as u; print(u.find_spec('sgl_kernel'))")
    assert done.stdout.strip() == "None"
