"""Bytes on their way into files, past the page cache where there is a disk, and looked at on the way."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megarl.bridge import out_file, raw_io
from megarl.bridge.out_file import BlockFile, Blocks
from megarl.bridge.raw_io import Files, Run, raw
from megarl.errors import UserError

SIZE = 3 << 12  # of a block, so that a file has many
CONTENT = bytes(torch.randint(0, 256, (90_007,), generator=torch.Generator().manual_seed(1), dtype=torch.uint8).numpy())


@pytest.fixture(params=["a disk", "no disk", "in memory"])
def durable(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    monkeypatch.setattr(out_file, "_on_a_disk", lambda folder: request.param == "a disk")
    return request.param != "in memory"


@pytest.fixture
def source(tmp_path: Path) -> Run:
    (tmp_path / "source").write_bytes(CONTENT)
    return Run(tmp_path / "source", Files(), 0, len(CONTENT))


@pytest.mark.parametrize("before", [0, 1, 4, SIZE - 6, SIZE, 2 * SIZE + 4090])
@pytest.mark.parametrize("start", [0, 3, 4096])
def test_what_is_written_stands_there_and_was_looked_at(
    before: int, start: int, durable: bool, source: Run, tmp_path: Path
) -> None:
    """At any place, from any place; elements that begin where none may are shown whole all the same."""
    seen: list[torch.Tensor] = []
    file = BlockFile(tmp_path / "target", Blocks(SIZE, 3), durable=durable)
    assert file.write(CONTENT[:before]) == before
    file.copy([source._replace(start=start, length=80_000)], torch.float32, lambda piece: seen.append(piece.clone()))
    assert file.tell() == before + 80_000
    file.seek(before + 80_003)
    file.write(torch.arange(5, dtype=torch.int16).numpy().data)
    file.end()
    file.close()
    middle = CONTENT[start : start + 80_000]
    want = CONTENT[:before] + middle + bytes(3) + bytes(torch.arange(5, dtype=torch.int16).view(torch.uint8).numpy())
    assert (tmp_path / "target").read_bytes() == want
    assert bytes(torch.cat(seen).view(torch.uint8).numpy()) == middle


def test_one_file_after_another_from_the_same_blocks(durable: bool, tmp_path: Path) -> None:
    blocks = Blocks(SIZE, 2)
    for number in range(5):
        file = BlockFile(tmp_path / str(number), blocks, durable=durable)
        file.write(CONTENT[number:])
        if number != 3:  # one that is given up
            file.end()
        file.close()
    assert all((tmp_path / str(number)).read_bytes() == CONTENT[number:] for number in (0, 1, 2, 4))
    (tmp_path / "0").unlink()
    empty = BlockFile(tmp_path / "0", blocks, durable=durable)
    empty.end()
    empty.close()
    assert (tmp_path / "0").read_bytes() == b""


def test_there_is_no_way_back(durable: bool, tmp_path: Path) -> None:
    file = BlockFile(tmp_path / "target", Blocks(SIZE, 2), durable=durable)
    file.write(b"four")
    with pytest.raises(ValueError, match="byte 3 was written before"):
        file.seek(3)
    file.close()


def test_a_run_beyond_the_end_is_one_sentence(source: Run, tmp_path: Path) -> None:
    file = BlockFile(tmp_path / "target", Blocks(SIZE, 2), durable=False)
    with pytest.raises(UserError, match="source is cut short"):
        file.copy([source._replace(start=90_000, length=8)], torch.float32, len)
    file.close()


def test_a_disk_that_takes_no_more_is_told(durable: bool) -> None:
    """Of blocks that the thread writes, and of the last one."""
    for count in (20 * SIZE, 5):
        file = BlockFile(Path("/dev/full"), Blocks(SIZE, 2), durable=durable)
        with pytest.raises(OSError, match="No space left"):
            file.write(bytes(count))
            file.end()
        file.close()


def test_of_more_files_than_may_be_open_the_latest_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(raw_io, "MOST_OPEN", 3)
    files, out = Files(), torch.empty(2, dtype=torch.uint8)
    runs = [Run(tmp_path / str(number), files, 4, 3) for number in range(5)]
    for number, run in enumerate(runs):
        run.path.write_bytes(bytes(range(number, number + 7)))
    handles = [files.open(run.path) for run in (*runs[:3], runs[0], *runs[3:])]
    assert [handle.closed for handle in handles] == [False, True, True, False, False, False]
    for number, run in enumerate(runs):
        assert run.fill(raw(out), 1) and out.tolist() == [number + 5, number + 6]
        assert not run.fill(raw(out), 2)


def test_strides_of_axes_of_length_1_do_not_count() -> None:
    assert bytes(raw(torch.arange(6.0).view(3, 2)[2:, :1])) == torch.tensor(4.0).numpy().tobytes()
