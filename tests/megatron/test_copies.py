"""What a checkpoint is written from while training goes on: what was there when it began, whoever is faster."""

import threading
from contextlib import closing

import pytest
import torch

from megarl.megatron.dist_checkpoint import _SMALL, Copies, Piece

LARGE = _SMALL // 4 + 3  # elements


def pieces(count: int) -> list[Piece]:
    return [Piece(f"p{n}", torch.full((LARGE,), float(n)), (0,), (LARGE,), True) for n in range(count)]


@pytest.mark.parametrize("written_before", [0, 1, 3, 4])
def test_what_changes_after_it_settled_is_written_as_it_was(written_before: int) -> None:
    copies, live = Copies(), pieces(4)
    seen: dict[str, float] = {}
    gone_on = threading.Event()
    begun = threading.Semaphore(0)

    def write() -> None:
        with closing(copies.of(live)) as source:
            begun.release()
            for number, piece in enumerate(source):
                if number == written_before:
                    begun.release()
                    gone_on.wait(30)  # in the middle of one: it must be waited for
                seen[piece.key] = float(piece.data.unique().item())
        begun.release()

    writer = threading.Thread(target=write)
    writer.start()
    begun.acquire()
    begun.acquire()
    if written_before < 4:
        threading.Timer(0.2, gone_on.set).start()
    copies.settle()
    for piece in live:
        piece.data.fill_(-1.0)
    writer.join(30)
    assert seen == {f"p{n}": float(n) for n in range(4)}


def test_memory_of_copies_is_used_again_and_nothing_is_copied_twice() -> None:
    copies, live = Copies(), pieces(2)
    with closing(copies.of(live)) as source:
        assert next(source).data.data_ptr() == live[0].data.data_ptr()  # where it lies
    # Closed in the middle, as by a disk that is full: nobody waits for it.
    for _ in range(2):
        left = copies.of(live)
        copies.settle()
        copies.settle()
        with closing(left):
            found = [piece.data for piece in left]
        assert not {data.data_ptr() for data in found} & {piece.data.data_ptr() for piece in live}
        assert {data.data_ptr() for data in found} == {kept.data_ptr() for kept in copies._kept.values()}


def test_what_is_small_is_copied_at_once() -> None:
    small = torch.arange(5.0)
    with closing(Copies().of([Piece("bias", small, (0,), (5,), True)])) as source:
        small.zero_()
        assert next(source).data.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]
