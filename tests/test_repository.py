"""What holds for every file of the repository."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CODE = sorted(
    path for folder in ("megarl", "tests", "benchmarks", "tools", "examples") for path in (ROOT / folder).rglob("*.py")
)
TEXT = sorted(
    path
    for path in [
        *CODE,
        *ROOT.glob("*"),
        *(p for f in ("docs", "configs", "requirements", ".ci") for p in (ROOT / f).rglob("*")),
    ]
    if path.is_file() and path.suffix in ("", ".lock", ".md", ".py", ".toml", ".yaml") and path.name != ".git"
)
LINES_OF_A_FILE, LINES_OF_A_FUNCTION = 600, 80
# A home or a workplace of one machine. Places that every Linux has, such as /tmp and /dev/shm, are no such thing.
LOCAL_PATH = re.compile(r"(?<![\w.:/}])/(?:home|root|Users|work|mnt|opt)/\w+")


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


def functions(tree: ast.AST) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]


def too_long(source: str) -> list[str]:
    """The limits that a file breaks."""
    broken = [f"{source.count(chr(10))} lines"] if source.count("\n") > LINES_OF_A_FILE else []
    for function in functions(ast.parse(source)):
        lines = (function.end_lineno or function.lineno) - function.lineno + 1
        if lines > LINES_OF_A_FUNCTION:
            broken.append(f"{function.name}: {lines} lines")
    return broken


def test_files_and_functions_stay_small() -> None:
    assert len(CODE) > 50
    assert {relative(path): broken for path in CODE if (broken := too_long(path.read_text()))} == {}


@pytest.mark.parametrize("lines", [79, 80])
def test_a_long_function_is_noticed(lines: int) -> None:
    source = "def f():\n" + "    pass\n" * lines
    assert too_long(source) == ([f"f: {lines + 1} lines"] if lines == 80 else [])


def test_no_path_of_one_machine() -> None:
    assert LOCAL_PATH.search("see " + "/home" + "/somebody/x")
    found = {relative(path): match[0] for path in TEXT if (match := LOCAL_PATH.search(path.read_text()))}
    assert found == {}


def test_every_config_says_what_machine_it_is_for() -> None:
    first = {relative(path): path.read_text().partition("\n")[0] for path in (ROOT / "configs").rglob("*.yaml")}
    assert first
    assert [name for name, line in first.items() if not line.startswith("# Machine: ")] == []


def pins(file: str) -> dict[str, str]:
    lines = [line.partition("#")[0].strip() for line in (ROOT / "requirements" / file).read_text().splitlines()]
    return dict(line.split("==") for line in lines if line)


def name_of(requirement: str) -> str:
    return re.split(r"[<>=!\[; ]", requirement)[0].lower().replace("_", "-")


def test_the_lock_pins_what_the_package_and_its_tests_need() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    locked = {name_of(name) for name in {**pins("cpu.lock"), **pins("dev.lock")}}
    assert {name_of(need) for need in project["dependencies"] + project["optional-dependencies"]["dev"]} <= locked
    assert f"sglang=={pins('cpu.lock')['sglang']}" in project["optional-dependencies"]["gpu"]


def test_the_lock_brings_no_cuda() -> None:
    heavy = re.compile(r"nvidia|cuda|triton|flash|sgl-kernel|sglang-kernel|transformer-engine")
    assert [name for name in pins("cpu.lock") if heavy.search(name_of(name))] == []


def test_links_in_the_documents_lead_somewhere() -> None:
    links = [
        (page, target)
        for page in [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]
        for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text())
    ]
    assert links
    assert [
        f"{relative(page)}: {to}" for page, to in links if "://" not in to and not (page.parent / to).exists()
    ] == []


def test_ci_runs_the_tests_of_the_makefile() -> None:
    script = ROOT / ".ci" / "run"
    assert script.read_text().splitlines()[-1] == "make test"
    assert script.stat().st_mode & 0o100
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert {"demo", "test", "test-all", "lint", "bench", "invariants", "clean"} <= set(targets)
