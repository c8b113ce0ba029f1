"""The examples for frameworks on top of torch.distributed: on Perseus they train as on gloo."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ddp_scripts import EXAMPLES, TORCHRUN, read_until, run_script, started, without_perseus

EQUAL = "the ranks' weights are equal"
SCRIPTS = {
    "lightning_ddp.py": ("pytorch_lightning", ()),
    "huggingface_trainer.py": ("transformers", TORCHRUN),
    "keras_torch_distribution.py": ("keras.src.backend.torch.distribution_lib", TORCHRUN),
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_trains_as_on_gloo(name, tmp_path, monkeypatch):
    package, launcher = SCRIPTS[name]
    monkeypatch.setenv("KERAS_BACKEND", "torch")
    pytest.importorskip(package)
    script = EXAMPLES / name
    output = run_script(launcher, script)
    assert output.count("this script runs on Perseus") == 1
    assert EQUAL in output
    with started(launcher, without_perseus(script, tmp_path)) as process:
        reference = read_until(process, EQUAL)  # on gloo, ranks may not end by themselves
    assert "this script runs on Perseus" not in reference
    assert _loss(output, "perseus") == pytest.approx(_loss(reference, "gloo"), abs=1e-5)


@pytest.mark.parametrize("name", ["lightning_ddp.py", "huggingface_trainer.py"])
def test_libraries_that_read_torchs_variables_early_find_their_ranks_under_perseusrun(name):
    """Without these, each rank would train by itself, or Lightning start ranks of its own."""
    pytest.importorskip(SCRIPTS[name][0])
    output = run_script(("-m", "perseus.run", "-np", "3", sys.executable), EXAMPLES / name)
    assert output.count("this script runs on Perseus") == 1
    assert output.count(EQUAL) == 1
    assert len(re.findall(r"backend perseus, loss [\d.]+", output)) == 1


# Two hosts of one rank each, as far as variables tell.
_HOSTS = """for prefix in PERSEUS HOROVOD; do
    export ${prefix}_LOCAL_RANK=0 ${prefix}_LOCAL_SIZE=1
    export ${prefix}_CROSS_RANK=$PERSEUS_RANK ${prefix}_CROSS_SIZE=2
done
exec "$@"
"""


def test_lightning_counts_the_ranks_of_several_hosts(tmp_path):
    pytest.importorskip("pytorch_lightning")
    hosts = tmp_path / "hosts.sh"
    hosts.write_text(_HOSTS)
    launcher = ("-m", "perseus.run", "-np", "2", "sh", str(hosts), sys.executable)
    output = run_script(launcher, EXAMPLES / "lightning_ddp.py")
    assert output.count(EQUAL) == 1
    assert output.count("MEMBER: 2/2") == 1


def test_lightning_refuses_more_devices_than_ranks(tmp_path):
    """It would wait for the others for ever."""
    pytest.importorskip("pytorch_lightning")
    script = tmp_path / "train.py"
    text = (EXAMPLES / "lightning_ddp.py").read_text()
    script.write_text(text.replace("devices=devices", "devices=4"))
    launcher = ("-m", "perseus.run", "-np", "2", sys.executable)
    with started(launcher, script) as process:
        output = process.stdout.read()
        assert process.wait() != 0
    assert "(4 * 1) does not match the world size (2)" in output


_IGNITE = """
import perseus
import ignite.distributed as idist
import torch


def train(local_rank):
    torch.manual_seed(42)
    model = idist.auto_model(torch.nn.Linear(3, 1, bias=False))
    data = torch.arange(3.0) + idist.get_rank()
    model(data).sum().backward()
    (gradient,) = [parameter.grad.tolist() for parameter in model.parameters()]
    print(f"{idist.backend()} {idist.get_rank()} {local_rank} {gradient}\\n", end="", flush=True)
    idist.new_group([0])
    assert idist.backend() == "gloo"


with idist.Parallel(backend="gloo") as parallel:
    parallel.run(train)
"""


@pytest.mark.parametrize("launcher", [TORCHRUN, ("-m", "perseus.run", "-np", "2", sys.executable)])
def test_ignite_finds_its_ranks_and_wraps_models(launcher, tmp_path):
    """It knows gloo by name only, and sets variables for one rank where there are none."""
    pytest.importorskip("ignite")
    script = tmp_path / "train.py"
    script.write_text(_IGNITE)
    output = run_script(launcher, script)
    assert output.count("this script runs on Perseus") == 1
    for rank in range(2):
        assert f"gloo {rank} {rank} [[0.5, 1.5, 2.5]]" in output


def _loss(output: str, backend: str) -> float:
    (loss,) = re.findall(rf"^backend {backend}, loss ([\d.]+)$", output, re.MULTILINE)
    return float(loss)
