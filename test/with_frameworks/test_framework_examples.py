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


def _loss(output: str, backend: str) -> float:
    (loss,) = re.findall(rf"^backend {backend}, loss ([\d.]+)$", output, re.MULTILINE)
    return float(loss)
