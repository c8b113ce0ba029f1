"""Which ranks share a host, from what every rank knows of itself."""

from __future__ import annotations

import pytest

from perseus.process_sets import ranks_by_host


@pytest.mark.parametrize(
    "hosts",
    [
        [[0, 1, 2]],
        [[0, 1], [2, 3]],
        [[0, 2], [1, 3]],
        [[0], [1, 2, 3], [4, 5]],
        [[0, 1, 2], [3], [4, 5]],
    ],
)
def test_ranks_by_host(hosts):
    places = {}
    for index, ranks in enumerate(hosts):
        for local, rank in enumerate(ranks):
            cross = sum(len(others) > local for others in hosts[:index])
            places[rank] = (local, len(ranks), cross)
    assert ranks_by_host([places[rank] for rank in sorted(places)]) == hosts
