"""How gradients can travel: what docs/accuracy.md has a row for. Immutable."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

# Every rank is a host of its own: what goes between hosts goes between all.
_HOSTS = {"LIGHT_2D_ALLREDUCE": "1", "LIGHT_INTRA_SIZE": "1"}


@dataclass(frozen=True)
class Choice:
    """variables: what a user sets for it. wrapper, options: the function of hvd, its arguments."""

    name: str
    variables: dict[str, str] = field(default_factory=dict)
    wrapper: str = "DistributedOptimizer"
    options: dict[str, Any] = field(default_factory=dict)

    def environment(self) -> dict[str, str]:
        """Return the variables of a run."""
        return {**_HOSTS, **self.variables}

    def wrapping(self) -> str:
        """Return the worker's argument that says how to wrap an optimizer."""
        return json.dumps([self.wrapper, self.options])


EXACT = Choice("exact", {"PERSEUS_ALLREDUCE_DTYPE": "1"})

_TOP_K = {"LIGHT_TOPK_ALLREDUCE": "1", "LIGHT_TOPK_THRESHOLD": "8192"}

CHOICES: dict[str, Choice] = {
    choice.name: choice
    for choice in (
        EXACT,
        Choice("default"),
        Choice("int8", {"PERSEUS_ALLREDUCE_CODEC": "int8"}),
        Choice("int4", {"PERSEUS_ALLREDUCE_CODEC": "int4"}),
        Choice("int2", {"PERSEUS_ALLREDUCE_CODEC": "int2"}),
        # On these links it would leave everything exact: so slow a link makes it choose.
        Choice("auto", {"PERSEUS_ALLREDUCE_CODEC": "auto", "PERSEUS_LINK_GBIT": "0.3"}),
        Choice("topk:0.01", _TOP_K),
        Choice("topk:0.01, no warm-up", {**_TOP_K, "LIGHT_TOPK_WARMUP_STEPS": "0"}),
        Choice("topk:0.01, float16", {**_TOP_K, "LIGHT_TOPK_FP16": "1"}),
        Choice("topk:0.01, corrected", {**_TOP_K, "LIGHT_TOPK_MOMENTUM_CORRECTION": "1"}),
        Choice("topk:0.1", {**_TOP_K, "LIGHT_TOPK_RATIO": "0.1"}),
        Choice("powersgd:4", {"PERSEUS_ALLREDUCE_CODEC": "powersgd"}),
        Choice(
            "powersgd:4, no warm-up",
            {"PERSEUS_ALLREDUCE_CODEC": "powersgd", "PERSEUS_POWERSGD_WARMUP_STEPS": "0"},
        ),
        *(Choice(f"rotate:{n}", {"PERSEUS_DOWNSAMPLE_N_ELEMENTS": str(n)}) for n in (2, 4, 8)),
    )
}

# Hosts that step on their own have rows of their own: they are not a choice between codecs.
LOCAL_STEPS: dict[str, Choice] = {
    choice.name: choice
    for choice in (
        Choice("LocalSGD, K 8", wrapper="LocalSGD", options={"every": 8}),
        Choice("DiLoCo, K 8", wrapper="DiLoCo", options={"every": 8}),
        Choice("DiLoCo, K 32, F 4", wrapper="DiLoCo", options={"every": 32, "fragments": 4}),
    )
}

ALL = {**CHOICES, **LOCAL_STEPS}
