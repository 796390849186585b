"""What this machine has, and what is used in place of what it lacks. Looks, never fails.

A package that is there but broken would take this process down with it, so everything that must be imported to be
known is imported in a process of its own.
"""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

from megarl import __version__

IMPORT_SECONDS = 120
_TORCH_FACTS = """
import json, torch
cuda = torch.cuda.is_available()
print(json.dumps({
    "version": torch.__version__, "built_for": torch.version.cuda,
    "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if cuda else [],
    "threads": torch.get_num_threads(),
}))
"""


class Row(NamedTuple):
    """One line of the table."""

    what: str
    found: str
    note: str = ""


class Package(NamedTuple):
    """A package that matters: how it is named on the registry and in code, and what its absence means."""

    title: str
    distributions: tuple[str, ...]
    module: str
    absent: str
    probe: bool = False  # import it to see whether it works: only those that megarl can do without


REQUIRED = "needed: install megarl's requirements"
PACKAGES = (
    Package("megatron-core", ("megatron-core",), "megatron.core", REQUIRED),
    Package("Ray", ("ray",), "ray", REQUIRED),
    Package("transformers", ("transformers",), "transformers", REQUIRED),
    Package("SGLang", ("sglang",), "sglang", "needed to sample: only rollout.replay works without it"),
    Package(
        "SGLang kernels",
        ("sgl-kernel", "sglang-kernel"),
        "sgl_kernel",
        "megarl's CPU stand-ins; a GPU needs them",
        True,
    ),
    Package(
        "Transformer Engine",
        ("transformer-engine", "transformer_engine_torch"),
        "transformer_engine.pytorch",
        "megatron-core's local layers with PyTorch's attention; no fp8",
        True,
    ),
    Package("apex", ("apex",), "apex", "PyTorch's AdamW and gradient arithmetic", True),
    Package("flash-attn", ("flash-attn",), "flash_attn", "PyTorch's scaled_dot_product_attention", True),
)


def report() -> str:
    """The whole table as text."""
    sections: list[tuple[str, Callable[[], list[Row]]]] = [
        ("Software", _software),
        ("Accelerators", _accelerators),
        ("CPU", _cpu),
        ("Memory and disk", _places),
    ]
    lines: list[str] = []
    for title, look in sections:
        try:
            rows = look()
        except Exception as error:  # noqa: BLE001 a machine stranger than foreseen still gets the rest of its report
            rows = [Row(title.lower(), "unknown", f"{type(error).__name__}: {error}")]
        lines += ["", title, *_table(rows)]
    return "\n".join(lines[1:])


def _table(rows: list[Row]) -> list[str]:
    wide = [max(len(row[column]) for row in rows) for column in range(2)]
    return [f"  {row.what:{wide[0]}}  {row.found:{wide[1]}}  {row.note}".rstrip() for row in rows]


def _software() -> list[Row]:
    rows = [Row("megarl", __version__, str(Path(__file__).parent)), Row("Python", platform.python_version())]
    return rows + [_package(package) for package in PACKAGES]


def _package(package: Package) -> Row:
    if not _has(package.module):
        return Row(package.title, "not found", _instead(package))
    version = next((found for name in package.distributions if (found := _version(name))), "found")
    if package.probe and (trouble := _import_trouble(package.module)):
        return Row(package.title, version, f"does not import ({trouble}); used: {package.absent}")
    return Row(package.title, version)


def _instead(package: Package) -> str:
    return package.absent if package.absent.startswith("needed") else f"used: {package.absent}"


def _has(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, AttributeError, ValueError):  # a parent that is absent or breaks when it is imported
        return False


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _python(code: str) -> tuple[str, str]:
    """What a piece of Python prints, and the last line of its complaint if it failed."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, check=False, text=True, timeout=IMPORT_SECONDS
        )
    except subprocess.TimeoutExpired:
        return "", f"no answer in {IMPORT_SECONDS} s"
    except OSError as error:
        return "", str(error)
    if done.returncode == 0:
        return done.stdout, ""
    return "", (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]


def _import_trouble(module: str) -> str:
    return _python(f"import {module}")[1]


def _accelerators() -> list[Row]:
    if not _has("torch"):
        return [Row("PyTorch", "not found", REQUIRED)]
    text, trouble = _python(_TORCH_FACTS)
    if trouble:
        return [Row("PyTorch", _version("torch") or "found", f"does not import: {trouble}")]
    facts = json.loads(text.strip().splitlines()[-1])
    rows = [Row("PyTorch", facts["version"], f"{facts['threads']} threads")]
    built = f"PyTorch is built for CUDA {facts['built_for']}" if facts["built_for"] else "PyTorch is built without CUDA"
    if not facts["gpus"]:
        driver = "" if shutil.which("nvidia-smi") is None else "; there is an NVIDIA driver: mind the PyTorch build"
        return [*rows, Row("CUDA", "not found", f"{built}{driver}; used: CPU and gloo")]
    names = sorted(set(facts["gpus"]))
    return [*rows, Row("CUDA", f"{len(facts['gpus'])} GPUs", f"{', '.join(names)}; {built}")]


def _cpu() -> list[Row]:
    text = _read("/proc/cpuinfo")
    flags = _field(text, "flags|Features").split()
    model = _field(text, "model name") or platform.processor() or platform.machine()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    rows = [Row("processor", model), Row("cores", str(cores), _core_limit(cores))]
    for name, flag, without in (
        ("AMX bfloat16", "amx_bf16", "bfloat16 has no tile unit here: measure float32 too"),
        ("AVX-512 bfloat16", "avx512_bf16", "bfloat16 is emulated: model.dtype=float32 may be faster"),
    ):
        rows.append(Row(name, "found") if flag in flags else Row(name, "not found", without))
    return rows


def _field(text: str, name: str) -> str:
    """The first `name : value` of /proc/cpuinfo."""
    found = re.search(rf"^(?:{name})\s*:\s*(.*)$", text, re.MULTILINE)
    return found[1].strip() if found else ""


def _core_limit(cores: int) -> str:
    quota = _read("/sys/fs/cgroup/cpu.max").split()
    if len(quota) == 2 and quota[0] != "max" and (share := int(quota[0]) / int(quota[1])) < cores:
        return f"limited to {share:g} cores by the container"
    return ""


def _places() -> list[Row]:
    found = re.search(r"^MemAvailable:\s*(\d+) kB", _read("/proc/meminfo"), re.MULTILINE)
    total = re.search(r"^MemTotal:\s*(\d+) kB", _read("/proc/meminfo"), re.MULTILINE)
    limit = _read("/sys/fs/cgroup/memory.max").strip()
    rows = []
    if found and total:
        note = f"limited to {_size(int(limit))} by the container" if limit.isdigit() else ""
        rows.append(Row("memory", f"{_size(1024 * int(found[1]))} free of {_size(1024 * int(total[1]))}", note))
    rows.append(_disk("/dev/shm", Path("/dev/shm"), "weights and Ray's objects move through it", 1 << 30))
    cache = Path(os.environ.get("MEGARL_CACHE") or Path.home() / ".cache" / "megarl").expanduser()
    made = sorted(path.name for path in cache.iterdir() if path.is_dir()) if cache.is_dir() else []
    rows.append(_disk("cache", cache, f"{cache}: {', '.join(made) or 'empty'} (elsewhere: MEGARL_CACHE)", 1 << 30))
    rows.append(_disk("this folder", Path.cwd(), str(Path.cwd()), 1 << 30))
    return rows


def _disk(what: str, folder: Path, note: str, wanted: int) -> Row:
    existing = next(place for place in (folder, *folder.parents) if place.exists())
    if what == "/dev/shm" and existing != folder:
        return Row(what, "not found", note)
    usage = shutil.disk_usage(existing)
    if not os.access(existing, os.W_OK):
        note = f"not writable; {note}"
    elif usage.free < wanted:
        note = f"low; {note}"
    return Row(what, f"{_size(usage.free)} free of {_size(usage.total)}", note)


def _size(count: int) -> str:
    return f"{count / 2**30:.1f} GiB"


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
