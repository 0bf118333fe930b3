"""Order and sizes of the exchanges of any plan, in pure Python: nothing here needs a process or a tensor."""

from __future__ import annotations

import math
import random
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from itertools import pairwise

import pytest

from zellige_lightning.engine.counters import Counters
from zellige_lightning.engine.dry_run import _Walk
from zellige_lightning.engine.layout import BlockLayout, Rows
from zellige_lightning.placement import (
    Block,
    ParallelConfig,
    PlacementOption,
    RankSchedule,
    build_schedule,
    whole,
)
from zellige_lightning.placement.attention import AttentionGeometry
from zellige_lightning.placement.schedule import PASSES, shard

CONFIGS = [
    ParallelConfig(q, h, k)
    for q in (1, 2, 3, 4, 8)
    for h in (1, 2, 3, 4, 6, 12)
    for k in (1, 2, 3, 4, 8)
    if 1 < q * h * k <= 64
]
# kind, rank set, sequences of the block, how many exchanges of the block come before it
Operation = tuple[str, tuple[int, ...], tuple[int, ...], int]


def random_plan(rng: random.Random, world: int, most: int) -> tuple[list[PlacementOption], list[int]]:
    legal = [c for c in CONFIGS if c.degree <= world]
    options: list[PlacementOption] = []
    for _ in range(rng.randint(1, most)):
        if legal and rng.random() < 0.7:
            config = rng.choice(legal)
            fresh = PlacementOption(config, tuple(sorted(rng.sample(range(world), config.degree))))
        else:
            fresh = whole(rng.randrange(world))
        options.append(rng.choice([fresh, fresh, *options[-3:]]))
    return options, [rng.choice([1, 2, 3, 7, 40, 1000]) for _ in options]


def plans(count: int, most: int, largest: int = 64) -> Iterator[list[RankSchedule]]:
    """Schedules of all ranks, in worlds of 1 to `largest` ranks: as many of up to 8 as of 9 to 64."""
    for seed in range(count):
        rng = random.Random(seed)
        world = round(2 ** rng.uniform(0, math.log2(largest)))
        options, lengths = random_plan(rng, world, most)
        yield [build_schedule(options, lengths, rank, world) for rank in range(world)]


class Kinds(Counters):
    """Remembers the kinds of exchanges that a dry run counts, in their order."""

    def __init__(self) -> None:
        super().__init__()
        self.kinds: list[str] = []

    def sent(self, kind: str, by_link: Iterable[tuple[str, int]]) -> None:
        self.kinds.append(kind)


@cache
def kinds_of(config: ParallelConfig, which: str) -> list[str]:
    """The exchanges of a block in pass `which`, one after the other; the same for all members and lengths."""
    option, found = PlacementOption(config, tuple(range(config.degree))), Kinds()
    (block,) = build_schedule([option], [1], 0, config.degree).blocks
    _Walk(block, 0, AttentionGeometry(config.h, 1), None, found).run(which, most_chunks=1)
    return found.kinds


def started(operation: Operation) -> tuple[int, ...]:
    """The place of an exchange in the one order in which all ranks start theirs."""
    _, ranks, sequences, before = operation
    return -len(ranks), min(sequences), before


def operations(schedule: RankSchedule, which: str = "forward") -> list[Operation]:
    """The exchanges that a rank starts in a pass, one after the other."""
    found = [
        (kind, block.ranks, tuple(s.sequence for s in block.segments), before)
        for block in schedule.blocks
        if not block.config.is_whole
        for before, kind in enumerate(kinds_of(block.config, which))
    ]
    return sorted(found, key=started)


def members_agree(walked: list[list[Operation]]) -> bool:
    """Whether what any two ranks share comes in one order on both, and nobody is missing."""
    members: dict[Operation, int] = defaultdict(int)
    for rank_operations in walked:
        for operation in set(rank_operations):
            members[operation] += 1
    if any(count != len(operation[1]) for operation, count in members.items()):
        return False
    by_set: dict[tuple[int, ...], list[Operation]] = {}
    for rank_operations in walked:
        here: dict[tuple[int, ...], list[Operation]] = defaultdict(list)
        for operation in rank_operations:
            here[operation[1]].append(operation)
        if any(by_set.setdefault(ranks, order) != order for ranks, order in here.items()):
            return False
    return True


def is_acyclic(walked: list[list[Operation]]) -> bool:
    """Whether all exchanges can complete when each rank waits for one before it starts the next."""
    number: dict[Operation, int] = {}  # hashing an operation costs more than all that follows
    numbered = [[number.setdefault(operation, len(number)) for operation in one] for one in walked]
    after: list[set[int]] = [set() for _ in number]
    waits = [0] * len(number)
    for rank_operations in numbered:
        for first, then in pairwise(rank_operations):
            if then not in after[first]:
                after[first].add(then)
                waits[then] += 1
    everything = range(len(number))
    ready = deque(operation for operation in everything if not waits[operation])
    done = 0
    while ready:
        done += 1
        for then in after[ready.popleft()]:
            waits[then] -= 1
            if not waits[then]:
                ready.append(then)
    return done == len(everything)


def test_ten_thousand_plans_have_one_order_and_no_cycle() -> None:
    for number, schedules in enumerate(plans(count=10_000, most=12)):
        walked = [operations(schedule, PASSES[number % 2]) for schedule in schedules]
        assert members_agree(walked)
        assert is_acyclic(walked)


def test_a_cycle_and_a_disagreement_are_seen() -> None:
    """The checks above can fail: three pairs in a ring, each rank starting with another one."""
    a, b, c = (("hop", ranks, (i,), 0) for i, ranks in enumerate([(0, 1), (1, 2), (0, 2)]))
    assert not is_acyclic([[a, c], [b, a], [c, b]])
    assert is_acyclic([[a, c], [a, b], [b, c]])
    twice = ("hop", (0, 1), (7,), 0)
    assert not members_agree([[a, twice], [twice, a]])
    assert not members_agree([[a], []])


Table = Callable[[BlockLayout], tuple[Rows, Rows]]


def tables(block: Block) -> dict[str, Table]:
    """Each exchange of a block by name."""
    config = block.config
    found: dict[str, Table] = {}
    if config.h > 1:
        found |= {"scatter": BlockLayout.scatter_heads, "gather": BlockLayout.gather_heads}
    if config.q > 1:
        found |= {"gather_keys": BlockLayout.gather_keys, "reduce_keys": BlockLayout.reduce_keys}
    for hop in range(config.k if config.k > 1 else 0):  # the last one is that of the travelling gradients
        found[f"hop {hop}"] = lambda layout, hop=hop: layout.ring_hop(hop)  # type: ignore[misc]
    return found


def split_blocks(count: int, largest: int) -> Iterator[Block]:
    for schedules in plans(count, 8, largest):
        seen = set()
        for schedule in schedules:
            for block in schedule.blocks:
                key = block.ranks, tuple(s.sequence for s in block.segments)
                if not block.config.is_whole and key not in seen:
                    seen.add(key)
                    yield block


@pytest.mark.parametrize(("count", "largest"), [(400, 8), (40, 64)])
def test_what_one_sends_the_other_expects(count: int, largest: int) -> None:
    for block in split_blocks(count, largest):
        layouts = [BlockLayout(block, position) for position in range(block.config.degree)]
        for name, table in tables(block).items():
            sent, received = zip(*(table(layout) for layout in layouts), strict=True)
            assert list(zip(*sent, strict=True)) == list(received), (name, block)


@pytest.mark.parametrize(("count", "largest"), [(400, 8), (40, 64)])
def test_all_rows_take_part(count: int, largest: int) -> None:
    """Queries of all positions are all tokens once per head slice; the keys of a position are all tokens."""
    for block in split_blocks(count, largest):
        config, total = block.config, sum(s.num_tokens for s in block.segments)
        layouts = [BlockLayout(block, position) for position in range(config.degree)]
        assert sum(layout.rows[layout.position] for layout in layouts) == total
        assert sum(layout.query_rows for layout in layouts) == config.h * total
        for layout in layouts:
            assert sum(layout.query_lengths) == layout.query_rows
            assert sum(layout.key_rows(layout.ring_block(hop)) for hop in range(config.k)) == total
            assert sorted(layout.ring_block(hop) for hop in range(config.k)) == list(range(config.k))
            assert layout.ring_block(0) == layout.coordinates[1]
            iq, ik, ih = layout.coordinates
            assert (iq * config.k + ik) * config.h + ih == layout.position
            if config.q > 1:
                assert sum(layout.gather_keys()[1]) == layout.key_rows(ik)


def test_members_put_sequences_together() -> None:
    """Received rows come peer by peer; the pieces take every row once and leave each sequence contiguous."""
    for block in split_blocks(300, 8):
        config = block.config
        if config.q > 1 or config.k > 1:
            continue
        received = [
            (segment.sequence, token)
            for position in range(config.degree)
            for segment in block.segments
            for token in shard(segment.num_tokens, position, config.degree)
        ]
        pieces = BlockLayout(block, 0).member_pieces()
        assert [row for start, stop in pieces for row in received[start:stop]] == [
            (segment.sequence, token) for segment in block.segments for token in range(segment.num_tokens)
        ]
