"""Compares the codec auto with every codec that it may choose, over rates, models and hosts.

python benchmarks/auto_grid.py --rates 100mbit,1gbit,10gbit --models resnet50 --hosts 2,4

It prints a Markdown table: milliseconds for a model's gradients, medians of contenders that take
turns in one run. auto should be within 2 % of the better of exact and float16, and within 5 % of
the fastest.
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
import tempfile
from pathlib import Path

_EXACT, _HALF, _AUTO = "none", "fp16", "auto"
_CODECS = [_HALF, "int8", "int4", "int2", _AUTO]
_COLUMNS = [_EXACT, *_CODECS]
_LIMITS = 1.02, 1.05  # against the better of exact and float16, and against the fastest


def main() -> int:
    """Measure, print the table, and return 1 if auto is too slow anywhere, 2 if a cell failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rates", default="100mbit,1gbit,10gbit,25gbit", help="of each link")
    parser.add_argument("--models", default="resnet50,vgg16,bert-base,gpt2")
    parser.add_argument("--hosts", default="2,4", help="numbers of virtual hosts of one rank")
    parser.add_argument("--seconds", default="20", help="for each cell, all codecs together")
    given = parser.parse_args()
    print(f"| hosts | rate | model | {' | '.join(_COLUMNS)} | auto / better of two | / fastest |")
    print("|---" * (len(_COLUMNS) + 5) + "|", flush=True)
    cells = itertools.product(
        given.hosts.split(","), given.rates.split(","), given.models.split(",")
    )
    try:
        fine = [_cell(hosts, rate, model, given.seconds) for hosts, rate, model in cells]
    except RuntimeError as error:
        print(f"auto_grid: {error}", file=sys.stderr)
        return 2
    return 0 if all(fine) else 1


def _cell(hosts: str, rate: str, model: str, seconds: str) -> bool:
    times = measure(hosts, rate, model, seconds)
    ratios = (
        times[_AUTO] / min(times[_EXACT], times[_HALF]),
        times[_AUTO] / min(times.values()),
    )
    shown = " | ".join(f"{1000 * times[codec]:.3g}" for codec in _COLUMNS)
    print(
        f"| {hosts} | {rate} | {model} | {shown} | {ratios[0]:.2f} | {ratios[1]:.2f} |", flush=True
    )
    return all(ratio <= limit for ratio, limit in zip(ratios, _LIMITS, strict=True))


def measure(hosts: str, rate: str, model: str, seconds: str) -> dict[str, float]:
    """Return the seconds of each column. Raises RuntimeError if perseus-bench failed or a result
    was wrong."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "records.jsonl"
        command = [
            *("perseus-bench", "gradients", "--model", model, "--codec", ",".join(_CODECS)),
            *("--peer", "", "-np", hosts, "--hosts", hosts, "--rate", rate),
            *("--seconds", seconds, "--json", str(path), "--timeout", "1800"),
        ]
        status = subprocess.run(command, check=False, stdout=subprocess.DEVNULL).returncode
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    records = [json.loads(line) for line in lines]
    wrong = [record["codec"] for record in records if not record["verified"]]
    if wrong or status != 0:
        what = f"wrong results with {wrong}" if wrong else f"it ended with status {status}"
        raise RuntimeError(f"{' '.join(command)}: {what}")
    return {record["codec"]: record["median_s"] for record in records}


if __name__ == "__main__":
    sys.exit(main())
