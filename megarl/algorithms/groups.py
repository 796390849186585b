"""Statistics within groups of samples: unequal, interleaved, in any order, named by anything hashable."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence, Set
from itertools import count
from typing import Any

import numpy as np
import torch
from torch import Tensor

SINGLETONS = ("zero", "score")
ULPS = 4  # of the largest |value|: what summing the same numbers in another order makes of them
_UFUNCS = {"sum": np.add, "min": np.minimum, "max": np.maximum}
_SIMPLE = {str, bytes, int, bool, type(None)}  # names that need no second look


class Groups:
    """B samples in groups. Reductions give each sample the value of its group, as a (B,) tensor; what sums does so in float64,
    for a group may be large, and B numbers cost nothing.

    group_B: the group's name of each sample; a tensor of one number is as good as the number. NaN names nothing.
    counts_B: bool; a sample that does not count influences nobody's statistics.
    size_B: how many of the sample's group count; named_B: how many there are of it.
    """

    def __init__(self, group_B: Sequence[Hashable] | Tensor | np.ndarray[tuple[int], np.dtype], counts_B: Tensor):
        self.names, numbers_B = _numbered(group_B)
        if len(self.names) != len(counts_B):
            raise ValueError(f"group_B names {len(self.names)} samples, the rewards are for {len(counts_B)}")
        device = counts_B.device
        self.counts_B = counts_B
        self._all_count = bool(counts_B.all())
        # Sorted runs and a segmented reduction: unlike scattered adds, the result is the same every time on a GPU.
        # Sixteen bits are sorted by counting, in a tenth of the time.
        lengths_G = np.bincount(numbers_B)
        short_B = numbers_B.astype(np.uint16) if len(lengths_G) <= 2**16 else numbers_B
        self._order_B = torch.from_numpy(np.argsort(short_B, kind="stable")).to(device)
        self._lengths_G = torch.from_numpy(lengths_G).to(device)
        self._starts_G = torch.from_numpy(lengths_G.cumsum() - lengths_G).to(device)
        self._index_B = torch.from_numpy(numbers_B).to(device)
        self.named_B = self._lengths_G.index_select(0, self._index_B)
        self.size_B = self.reduce(counts_B.double(), "sum", 0.0)
        self.alone_B = self.size_B == 1

    @classmethod
    def all_in_one(cls, counts_B: Tensor) -> Groups:
        """The whole batch as one group."""
        return cls([None] * len(counts_B), counts_B)

    def sum(self, values_B: Tensor) -> Tensor:
        return self.reduce(self._counted(values_B.double(), 0.0), "sum", 0.0)

    def mean(self, values_B: Tensor) -> Tensor:
        return self.sum(values_B) / self.size_B.clamp(min=1)

    def min(self, values_B: Tensor) -> Tensor:
        """0 in a group where nothing counts."""
        return self._extreme(values_B, "min", float("inf"))

    def max(self, values_B: Tensor) -> Tensor:
        """0 in a group where nothing counts."""
        return self._extreme(values_B, "max", float("-inf"))

    def centred(self, values_B: Tensor, weight_B: Tensor | None = None) -> Tensor:
        """Values less their group's mean, which may be weighted. Exactly 0 in a group of equal values: the mean is
        taken of the distance to the smallest, which is then exactly 0, where a mean of the values would leave
        rounding noise."""
        above_B = values_B.double() - self.min(values_B)
        if weight_B is None:
            return above_B - self.mean(above_B)
        total_B = self.sum(weight_B)
        return above_B - self.sum(weight_B * above_B) / torch.where(total_B > 0, total_B, 1.0)

    def std_of_centred(self, centred_B: Tensor) -> Tensor:
        """Unbiased (n - 1) standard deviation of values that are centred already; 0 in a group of one. In units of
        the largest, so that no square overflows or vanishes."""
        largest_B = self.max(centred_B.abs())
        unit_B = torch.where(largest_B > 0, largest_B, 1.0)
        return unit_B * (self.sum((centred_B / unit_B).square()) / (self.size_B - 1).clamp(min=1)).sqrt()

    def equal(self, values_B: Tensor) -> Tensor:
        """Bool: all values of the group are the same; true in a group of one."""
        return self.max(values_B) == self.min(values_B)

    def rounding(self, values_B: Tensor) -> Tensor:
        """The difference that means nothing: a few units in the last place of the group's largest |value|, in the precision
        that the values have."""
        return ULPS * torch.finfo(values_B.dtype).eps * self.max(values_B.abs()).double()

    def levelled(self, values_B: Tensor) -> Tensor:
        """The values; those of a group that differ by rounding alone are all its smallest. Equal answers can have 1.29999995
        and 1.30000007 for 1.3, where its parts are added in another order, and a division by the standard deviation would
        make an advantage of that."""
        least_B, most_B = self.min(values_B), self.max(values_B)
        largest_B = torch.maximum(-least_B, most_B).double()
        return torch.where(
            most_B.double() - least_B <= ULPS * torch.finfo(values_B.dtype).eps * largest_B, least_B, values_B
        )

    def where_alone(self, singleton: str, score_B: Tensor, advantage_B: Tensor) -> Tensor:
        """The advantage; where a sample is alone in its group, 0 (singleton "zero") or its raw score ("score"). 0 where it does
        not count."""
        if singleton not in SINGLETONS:
            raise ValueError(f"singleton is {singleton!r}; it may be 'zero' or 'score'")
        lone_B = score_B if singleton == "score" else torch.zeros_like(score_B)
        return self._counted(torch.where(self.alone_B, lone_B, advantage_B), 0.0)

    def reduce(self, values: Tensor, how: str, initial: float) -> Tensor:
        """ "sum", "min" or "max" over each group along the first of any dimensions, whether samples count or not."""
        if not len(values):
            return values
        if not values.is_floating_point():
            values = values.double()
        in_order = values.index_select(0, self._order_B)
        plain = in_order.device.type == "cpu" and not in_order.requires_grad
        if plain and in_order.dtype in (torch.float32, torch.float64):  # half torch's time for small groups
            with np.errstate(all="ignore"):  # what is not finite shows in the result
                of_groups = torch.from_numpy(_UFUNCS[how].reduceat(in_order.numpy(), self._starts_G.numpy()))
        else:
            of_groups = torch.segment_reduce(in_order, how, lengths=self._lengths_G, initial=initial)
        return of_groups.index_select(0, self._index_B)

    def _counted(self, values_B: Tensor, neutral: float) -> Tensor:
        return values_B if self._all_count else torch.where(self.counts_B, values_B, neutral)

    def _extreme(self, values_B: Tensor, how: str, neutral: float) -> Tensor:
        extreme_B = self.reduce(self._counted(values_B, neutral), how, neutral)
        return extreme_B if self._all_count else torch.where(self.size_B > 0, extreme_B, 0.0)

    def blocks(self, samples: int) -> Iterator[Tensor]:
        """Samples as numbers (G, N): whole groups of one size N, as many as `samples` allow, at least one. All blocks together
        hold every sample once, whether it counts or not."""
        for size in self._lengths_G.unique().tolist():
            starts_G = self._starts_G[self._lengths_G == size]
            places_GN = starts_G[:, None] + torch.arange(size, device=starts_G.device)
            yield from self._order_B[places_GN].split(max(1, samples // size))

    def rank(self, values_B: Tensor) -> tuple[Tensor, Tensor]:
        """Each sample's place in its group from the smallest value up, 0 first, and the order that sorts the batch by
        group and then by value. Samples that do not count come last in their group."""
        by_value_B = self._counted(values_B, float("inf")).argsort(stable=True)
        order_B = by_value_B[self._index_B[by_value_B].argsort(stable=True)]
        places_B = torch.arange(len(order_B), device=order_B.device)
        rank_B = torch.empty_like(order_B)
        rank_B[order_B] = places_B - self._starts_G[self._index_B[order_B]]
        return rank_B, order_B

    def sum_above(self, values_B: Tensor, order_B: Tensor) -> Tensor:
        """The sum over those that come later in the group, in the order that `rank` gave."""
        index_B, sorted_B = self._index_B[order_B], self._counted(values_B, 0.0)[order_B]
        sum_B = torch.zeros_like(sorted_B)
        sum_B[:-1] = torch.where(index_B[:-1] == index_B[1:], sorted_B[1:], 0.0)
        reach, longest = 1, int(self._lengths_G.max()) if len(sorted_B) else 0
        while reach < longest:  # in steps of 1, 2, 4 ... samples
            further_B = torch.where(index_B[:-reach] == index_B[reach:], sum_B[reach:], 0.0)
            sum_B = torch.cat((sum_B[:-reach] + further_B, sum_B[-reach:]))
            reach *= 2
        result_B = torch.empty_like(sum_B)
        result_B[order_B] = sum_B
        return result_B


def per_std(values_B: Tensor, std_B: Tensor, eps: float) -> Tensor:
    """values / (std + eps); 0 where the std is 0, for then nothing differs, whatever eps is; NaN where it is not finite: what is
    too far apart must not pass for equal."""
    scaled_B = values_B / (std_B + eps) + 0 * std_B  # 0 times inf is NaN
    return torch.where(std_B == 0, 0.0, scaled_B)


def _numbered(group_B: Any) -> tuple[list[Hashable], np.ndarray[tuple[int], np.dtype[np.int64]]]:
    """One name a sample, and the number of its group: new names are given the next one, from 0. ValueError on what is no
    list of names."""
    try:
        names = group_B.tolist() if isinstance(group_B, Tensor | np.ndarray) else list(group_B)
    except TypeError:
        names = None
    if isinstance(group_B, Mapping | Set):  # no order
        names = None
    if not isinstance(names, list):  # a tensor of no dimension holds one number
        raise ValueError(f"group_B is {group_B!r}; it must be a list of names, one a sample")
    try:
        numbers, numbers_B = _count(names)
        if not _SIMPLE.issuperset(map(type, numbers)):
            plain = {name: _plain(name) for name in numbers}
            names = [plain[name] for name in names]
            _, numbers_B = _count(names)
        return names, numbers_B
    except TypeError as error:
        raise ValueError(f"group_B holds what cannot name a group: {error}") from error


def _count(names: Sequence[Hashable]) -> tuple[Mapping[Hashable, int], np.ndarray[tuple[int], np.dtype[np.int64]]]:
    """Hashing is Python's work: one pass, in C."""
    numbers: defaultdict[Hashable, int] = defaultdict(count().__next__)
    return numbers, np.fromiter(map(numbers.__getitem__, names), np.int64, len(names))


def _plain(name: Any) -> Hashable:
    """A tensor is equal to itself alone, and NaN not even to itself: each sample would be a group of its own."""
    if isinstance(name, Tensor):
        if name.numel() != 1:
            raise ValueError(f"group_B holds a tensor of shape {tuple(name.shape)}; a name is one number")
        name = name.item()
    if isinstance(name, tuple | frozenset):
        return type(name)(map(_plain, name))
    if name != name:
        raise ValueError("group_B holds NaN, which cannot name a group: it is not equal to itself")
    return name
