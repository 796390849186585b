"""Small operations of SGLang's run on one thread; what they give and everything around them stays as it was.

That SGLang goes by it is seen in `test_attention.py`, in the process that has loaded SGLang."""

import pytest
import torch

from megarl.cpu import threads


@pytest.fixture
def two():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(("numbers", "within"), [(0, 1), (threads.SMALL, 1), (threads.SMALL + 1, 2)])
def test_one_thread_for_few_numbers_and_afterwards_as_before(two, numbers, within):
    with pytest.raises(KeyError), threads.one_thread(numbers):
        assert torch.get_num_threads() == within
        raise KeyError
    assert torch.get_num_threads() == 2
