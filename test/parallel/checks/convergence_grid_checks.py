"""Every codec with several seeds, on average; convergence_checks has one."""

from __future__ import annotations

from convergence import LOSSY, SEEDS, Workload, digits, limits, text


def _expect_all_to_learn(workload: Workload) -> None:
    for way in LOSSY:
        losses = [workload(way, seed).loss for seed in range(SEEDS)]
        mean = sum(losses) / SEEDS
        assert mean <= limits(workload, way), f"{way.name}: {losses}"


def check_digits_are_learned() -> None:
    _expect_all_to_learn(digits)


def check_text_is_learned() -> None:
    _expect_all_to_learn(text)
