"""What perseus-bench --advise makes of speeds that were measured, and the command itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from perseus.bench.advice import Advice, advise, show
from perseus.compression import EXACT, FLOAT16, INT2, INT4, INT8

_SHAPES = [("large", (1000, 1000)), ("small", (100,)), ("other", (500, 1000))]


@dataclass
class _Speeds:
    """Seconds per byte of each codec, and a latency; auto takes int2 for all."""

    exact: float
    measurement: int = 1
    groups: int = 2
    latency_s: float = 0.001

    @property
    def seconds_per_byte(self) -> float:
        return self.exact

    def estimate(self, codec: int, bytes: int) -> float:
        share = {EXACT: 1.0, FLOAT16: 0.5, INT8: 0.25, INT4: 0.125, INT2: 0.075}[codec]
        return self.latency_s + share * self.exact * bytes

    def choose(self, bytes: int) -> int:
        return INT2


def test_exchanges_cost_what_the_model_says_for_tensors_of_one_codec_together() -> None:
    found = advise("m", _SHAPES, _Speeds(1e-6), None)
    assert (found.bytes, found.tensors, found.hosts) == (6_000_400, 3, 2)
    exact, half, int8, int4, int2, auto = found.settings
    assert exact.exchange_s == pytest.approx(0.001 + 6.0004)
    assert half.exchange_s == pytest.approx(0.001 + 3.0002)
    assert int8.exchange_s == pytest.approx(0.001 + 1.5001)
    assert int4.exchange_s == pytest.approx(0.001 + 0.75005)
    assert auto.exchange_s == int2.exchange_s == pytest.approx(0.001 + 0.45003)
    assert {setting.step_s for setting in found.settings} == {None}
    assert found.best == 5, "int4 and int2 are not for every optimizer"
    assert found.gbit == pytest.approx(0.008)


@pytest.mark.parametrize(
    ("compute", "best", "step"), [(30.0, 0, 30.0), (5.0, 1, 5.0), (0.003, 5, 0.45103 + 0.001)]
)
def test_the_most_accurate_setting_that_computation_hides_is_best(
    compute: float, best: int, step: float
) -> None:
    found = advise("m", _SHAPES, _Speeds(1e-6), compute)
    assert found.best == best
    assert found.settings[best].step_s == pytest.approx(step)
    exact = found.settings[0]
    assert exact.step_s == pytest.approx(compute / 3 + max(2 / 3 * compute, exact.exchange_s))
    assert Advice.from_json(found.to_json()) == found
    text = show(found)
    assert text.count("->") == 1
    assert f"-> {found.settings[best].text}" in text
    with_sgd = "equivalent with SGD only"
    assert [setting.accuracy for setting in found.settings] == [
        "exact", "equivalent", "equivalent", with_sgd, with_sgd, "equivalent",
    ]  # fmt: skip
    assert text.count("accuracy equivalent") == 5


def test_on_one_host_there_is_nothing_to_set() -> None:
    found = advise("m", _SHAPES, _Speeds(0, measurement=0, groups=1), 1.0)
    assert (found.settings, found.gbit) == ([], None)
    assert "nothing to set" in show(found)


def _command(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "perseus.bench", "--advise", *arguments],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_the_command_measures_and_advises(tmp_path: Path) -> None:
    file = tmp_path / "advice.json"
    apart = {"LIGHT_2D_ALLREDUCE": "1", "LIGHT_INTRA_SIZE": "1", "PERSEUS_LINK_GBIT": "0.01"}
    arguments = ("--model", "resnet50,gpt2", "--compute", "0.1", "--json", str(file))
    found = _command(*arguments, **apart)
    assert found.returncode == 0, found.stderr
    assert "-> PERSEUS_ALLREDUCE_CODEC=auto" in found.stdout
    resnet50, gpt2 = (json.loads(line) for line in file.read_text().splitlines())
    assert (resnet50["model"], gpt2["model"]) == ("resnet50", "gpt2")
    assert (gpt2["hosts"], gpt2["compute_s"]) == (2, 0.1)
    assert gpt2["gbit"] == pytest.approx(0.01)
    assert resnet50["settings"][0]["exchange_s"] == pytest.approx(resnet50["bytes"] * 8e-7, rel=0.1)


def test_without_a_choice_no_step_is_computed() -> None:
    found = _command()
    assert found.returncode == 0, found.stderr
    assert found.stdout.count("all ranks share one host's memory: there is nothing to set") == 4
    assert "computes" not in found.stdout


def test_what_does_not_go_with_advice_is_refused() -> None:
    found = _command("memory")
    assert found.returncode == 2
    assert "--advise takes models" in found.stderr
