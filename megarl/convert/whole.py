"""Whether the files of a source are those that were written: its weights, and what lies beside them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Event

from megarl.bridge import torch_dist_write
from megarl.bridge.hf_io import companions
from megarl.bridge.raw_io import reading
from megarl.errors import UserError

Look = Callable[
    [Callable[[], bool]], str | None
]  # given what says that nobody wants the answer: a sentence of what is wrong


@contextmanager
def looking(*looks: Look) -> Iterator[None]:
    """Runs `looks`, a thread each, beside the block. Raises UserError at its end where one has found something, be it that the block
    failed of what is wrong, too."""
    left = Event()
    with ThreadPoolExecutor(max(1, len(looks))) as pool:
        answers = [pool.submit(look, left.is_set) for look in looks]
        try:
            try:
                yield
            except UserError as error:
                if said := _first(answers):
                    raise UserError(said) from error
                raise
            if said := _first(answers):
                raise UserError(said)
        finally:
            left.set()


def _first(answers: list[Future[str | None]]) -> str | None:
    return next((said for answer in answers if (said := answer.result())), None)


def altered(folder: Path, stop: Callable[[], bool]) -> str | None:
    """Looks at all files of a checkpoint that have a checksum."""
    return torch_dist_write.altered(folder, stop=stop)


def compare_texts(first: Path, second: Path, differences: list[str], notes: list[str]) -> None:
    """Tokenizer, chat template and generation config of two folders, a sentence for each that differs. Where one has nothing of the
    kind, as a bare checkpoint, that is a note."""
    ours, theirs = companions(first), companions(second)
    if bool(ours) != bool(theirs):
        notes.append(f"{second if ours else first} has no tokenizer, so there was none to compare")
    for name in dict.fromkeys([*ours, *theirs]):
        paths = [folder / name for folder, names in ((first, ours), (second, theirs)) if name in names]
        contents = [_content(path) for path in paths]
        same = len(paths) == 2 and contents[0] == contents[1]
        looked = list(zip(paths, contents, strict=True))[: 1 if same else 2]
        if damaged := [path for path, content in looked if not _is_whole(path, content)]:
            differences += [f"{path} is damaged: it is no JSON" for path in damaged]
        elif len(paths) == 1 and ours and theirs:
            differences.append(f"{first if name in theirs else second} has no {name}")
        elif len(paths) == 2 and not same and not _say_the_same(name, *contents):
            differences.append(f"{name} differs")


def _content(path: Path) -> bytes:
    with reading(path):
        return path.read_bytes()


def _is_whole(path: Path, content: bytes) -> bool:
    """As far as a text tells by itself."""
    try:
        return path.suffix != ".json" or json.loads(content) is not None
    except (ValueError, RecursionError):
        return False


def _say_the_same(name: str, one: bytes, other: bytes) -> bool:
    """Whole texts that are JSON, be it written otherwise."""
    return name.endswith(".json") and bool(json.loads(one) == json.loads(other))
