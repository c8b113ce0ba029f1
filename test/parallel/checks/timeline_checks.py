"""Timelines of all ranks: recorded in parts, valid at any moment, read by the report."""

from __future__ import annotations

import functools
import json
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from patterns import shared_folder, values, world_with

import perseus.torch.horovod as hvd
from perseus.report.analysis import steps, waiting
from perseus.report.trace import Trace, read_all

Events = list[dict[str, Any]]
STEPS = 6


def _recorded_by_all():
    return world_with(HOROVOD_TIMELINE="DYNAMIC", PERSEUS_TIMELINE_ALL_RANKS=1)


def _file(folder: Path, name: str, rank: int) -> Path:
    return folder / (f"{name}.rank{rank}.json" if rank else f"{name}.json")


def _read(path: Path, goes_on: bool = False) -> Events:
    """The events. Only a file that is being written may be met in the middle of that."""
    deadline = time.monotonic() + (60 if goes_on else 0)
    while True:
        try:
            return json.loads(path.read_text())
        except json.JSONDecodeError:
            if time.monotonic() >= deadline:
                raise


def _reduced(events: Events) -> set[str]:
    found = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    return {name for name in found if name.startswith("allreduce.")}


def _work(name: str) -> None:
    total = hvd.allreduce(values((7,), torch.float32, hvd.rank()), op=hvd.Sum, name=name)
    parts = [values((7,), torch.float32, rank) for rank in range(hvd.size())]
    assert torch.equal(total, torch.stack(parts).sum(dim=0))


def check_recordings_start_and_stop_and_are_valid_at_any_moment() -> None:
    with _recorded_by_all():
        folder, rank = Path(shared_folder()), hvd.rank()
        _work("before")
        hvd.start_timeline(folder / "a.json", mark_cycles=True)
        _work("test_allreduce")
        mine = _file(folder, "a", rank)
        deadline = time.monotonic() + 60
        while "allreduce.test_allreduce" not in _reduced(events := _read(mine, True)):
            assert time.monotonic() < deadline
        kinds = {event["name"] for event in events}
        assert {"NEGOTIATE_ALLREDUCE", "ALLREDUCE", "SHM_ALLREDUCE", "CYCLE_START"} <= kinds, kinds
        job = events[0]["args"]
        assert "start_time_since_epoch_in_micros" in job
        assert (job["rank"], job["size"]) == (rank, hvd.size())
        worlds = hvd.allgather_object(job["world"])
        assert worlds[0].isdigit() and len(set(worlds)) == 1, worlds
        hvd.barrier()
        hvd.stop_timeline()
        _work("after")
        hvd.start_timeline(str(folder / "b.json"))
        _work("again")
        hvd.stop_timeline()
        hvd.barrier()
        assert _reduced(_read(mine)) == {"allreduce.test_allreduce"}
        assert _reduced(_read(_file(folder, "b", rank))) == {"allreduce.again"}
        everyone = {_file(folder, name, r) for name in "ab" for r in range(hvd.size())}
        assert set(folder.iterdir()) == everyone


def check_every_trace_says_who_came_last() -> None:
    with _recorded_by_all():
        folder, rank, size = Path(shared_folder()), hvd.rank(), hvd.size()
        hvd.start_timeline(folder / "late.json")
        for late in range(size):
            # Whoever leaves the barrier knows that the others have submitted theirs.
            if rank != late:
                handle = hvd.allreduce_async(torch.ones(3), name=f"late.{late}")
            hvd.barrier()
            if rank == late:
                handle = hvd.allreduce_async(torch.ones(3), name=f"late.{late}")
            hvd.synchronize(handle)
        hvd.stop_timeline()
        events = _read(_file(folder, "late", rank))
    rows = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    said = {
        rows[event["pid"]]: event["args"].get("last_rank")
        for event in events
        if event["name"] == "NEGOTIATE_ALLREDUCE"
    }
    assert said == {f"allreduce.late.{late}": late for late in range(size)}, said


@functools.cache
def _training() -> Path:
    """The folder with a training's traces, which the end of the world has closed."""
    with _recorded_by_all():
        folder = Path(shared_folder())
        hvd.start_timeline(folder / "train.json", mark_cycles=True)
        model = torch.nn.Sequential(
            torch.nn.Linear(20, 30), torch.nn.ReLU(), torch.nn.Linear(30, 5)
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        for _ in range(STEPS):
            optimizer.zero_grad()
            model(torch.full((4, 20), float(hvd.rank()))).square().mean().backward()
            optimizer.step()
    return folder


def _traces() -> list[Trace]:
    return read_all([_file(_training(), "train", rank) for rank in range(hvd.size())])


def check_the_report_finds_the_steps_of_the_training() -> None:
    traces = _traces()
    assert [trace.rank for trace in traces] == list(range(hvd.size()))
    for trace in traces:
        assert trace.size == hvd.size() and len(steps(trace)) == STEPS
        assert {bucket.transport for bucket in trace.buckets} == {"shm"}
        assert {bucket.ranks for bucket in trace.buckets} == {hvd.size()}
        assert trace.dropped == trace.never_agreed == 0
        gradients = [o for o in trace.operations if o.kind == "ALLREDUCE"]
        assert sorted(o.bytes for o in gradients) == sorted([2400, 120, 600, 20] * STEPS)
    assert waiting(traces).operations == 4 * STEPS + 4  # and four parameters were broadcast


def check_the_report_makes_its_page() -> None:
    traces = _traces()  # of everyone's training
    if hvd.rank() == 0 and find_spec("matplotlib"):
        from perseus.report.page import make_page

        assert make_page(traces).count("data:image/png") == 4


def check_spans_of_a_row_nest_and_the_outer_one_comes_first() -> None:
    rows: dict[tuple[int, int], list[tuple[int, int, int]]] = {}
    for place, event in enumerate(_read(_file(_training(), "train", hvd.rank()))):
        if event["ph"] == "X":
            assert event["tid"] != 0, "to Perfetto that is the pid, which may be another row's tid"
            begin, duration = round(event["ts"] * 1000), round(event["dur"] * 1000)
            row = rows.setdefault((event["pid"], event["tid"]), [])
            row.append((begin, -duration, place))
    assert len(rows) > 4
    for row in rows.values():
        around: list[tuple[int, int]] = []
        for begin, minus_duration, place in sorted(row):
            while around and around[-1][0] <= begin:
                around.pop()
            end = begin - minus_duration
            if around:
                assert end <= around[-1][0] and place > around[-1][1]
            around.append((end, place))
