"""Every codec trains as exact gradients do, or worse by as much as docs/algorithms.md says."""

from __future__ import annotations

from convergence import EXACT, LOSSY, Workload, digits, limits, text

# Of the three exact ones, the one in the middle.
SEED = 2


def _expect_all_to_learn(workload: Workload) -> None:
    results = {way.name: (workload(way, SEED).loss, limits(workload, way)) for way in LOSSY}
    late = {name: (loss, limit) for name, (loss, limit) in results.items() if not loss <= limit}
    assert not late, f"final loss and its limit: {late}; exact: {workload(EXACT, SEED).loss}"


def check_digits_are_learned() -> None:
    _expect_all_to_learn(digits)


def check_text_is_learned() -> None:
    _expect_all_to_learn(text)
