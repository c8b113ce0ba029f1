"""`import perseus` above a script for torch.distributed: what runs on Perseus, and what is said."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
from importlib.util import find_spec

import pytest

torch = pytest.importorskip("torch")

from perseus.torch.distributed.redirect import choose

pytestmark = pytest.mark.shared
SAID = "[perseus] torch.distributed: this script runs on Perseus"
GROUP = """
import torch, torch.distributed as dist
from torch.distributed import init_process_group
for times in range(2):
    init_process_group({asked}store=dist.HashStore(), rank=0, world_size=1)
    print(dist.get_backend(), dist.get_backend(dist.new_group(backend="gloo")))
    dist.destroy_process_group()
"""


def run(program: str, *options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *options, "-c", program],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
        env={**os.environ, "GLOO_SOCKET_IFNAME": "lo", **environment},
    )


@pytest.mark.parametrize(
    ("first", "asked"),
    [
        ("import perseus, torch", '"gloo", '),
        ("import torch.distributed, perseus", '"gloo", '),
        ("from torch.distributed import init_process_group; import perseus", ""),
        pytest.param("import perseus", 'backend="nccl", ', marks=pytest.mark.full),
        ("import perseus", 'backend="cpu:gloo,cuda:nccl", '),
        ("import perseus.torch.distributed as d; d.init_tiacc_training()", '"gloo", '),
    ],
)
def test_gloo_nccl_and_no_backend_become_perseus_and_rank_0_says_so_once(first, asked):
    done = run(first + GROUP.format(asked=asked))
    assert done.stdout.split() == ["perseus"] * 4
    assert done.stderr.count(SAID) == 1


@pytest.mark.parametrize(
    "first",
    [
        "import torch",
        "import perseus.torch.horovod as hvd; hvd.init()",
        pytest.param(
            "import perseus; from perseus import basics; basics.init()", marks=pytest.mark.full
        ),
        "import perseus.torch.distributed",
    ],
)
def test_other_scripts_keep_what_they_ask_for(first):
    done = run(first + GROUP.format(asked='"gloo", '))
    assert done.stdout.split() == ["gloo"] * 4
    assert "[perseus]" not in done.stderr


def test_the_import_loads_no_framework_and_torchs_errors_stay():
    program = """
import sys, perseus
assert not {"torch", "tensorflow", "mxnet", "keras", "perseus._core"} & set(sys.modules)
import torch.distributed as dist
try:
    dist.init_process_group("no such backend", store=dist.HashStore(), rank=0, world_size=1)
except Exception as error:
    print(repr(error))
"""
    assert "no such backend" in run(program).stdout


def test_an_import_after_the_process_group_says_that_it_is_too_late():
    program = """
import torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
import perseus
print(dist.get_backend())
"""
    done = run(program)
    assert done.stdout.split() == ["gloo"]
    assert "the process group was there before `import perseus`, and stays" in done.stderr


OF_SRUN = {"SLURM_PROCID": "0", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2"}


@pytest.mark.parametrize("launcher", [{}, OF_SRUN], ids=["no launcher", "srun"])
def test_a_rank_that_the_script_gives_is_no_launchers(launcher):
    """As in torch's tutorials, whose script starts its ranks itself."""
    program = """
import datetime, os, socket, perseus, torch, torch.distributed as dist
limit = datetime.timedelta(seconds=60)
try:
    dist.init_process_group("gloo", rank=1, world_size=2, timeout=limit / 60)
except ValueError as error:
    print("MASTER_ADDR expected" in str(error), flush=True)
kept = socket.socket()  # so that no other program is given the port before the store has it
kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
kept.bind(("127.0.0.1", 0))
os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(kept.getsockname()[1]))
rank = 0 if (child := os.fork()) else 1
dist.init_process_group("gloo", rank=rank, world_size=2, timeout=limit)
tensor = torch.arange(3.0) + rank
dist.all_reduce(tensor)
names = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"} & set(os.environ)
found = [tensor.tolist(), dist.get_node_local_rank(fallback_rank=rank), sorted(names)]
os.write(1, f"{rank} {dist.get_backend()} {found}\\n".encode())  # in one piece
dist.destroy_process_group()
if child:
    os.waitpid(child, 0)
"""
    lines = run(program, **launcher).stdout.splitlines()
    assert lines[0] == "True"
    assert sorted(lines[1:]) == [f"{rank} perseus [[1.0, 3.0, 5.0], {rank}, []]" for rank in (0, 1)]


@pytest.mark.parametrize(
    ("asked", "backend", "said"),
    [
        ('"gloo", ', "gloo", '"gloo" stays, because torch 2.5.1 is older than 2.13'),
        ("", "undefined", "PyTorch's own backend stays, because torch 2.5.1 is older than 2.13"),
    ],
)
def test_a_torch_that_is_too_old_keeps_its_backend_and_rank_0_says_so_once(asked, backend, said):
    """It lacks what the backend itself imports."""
    first = """
import os, sys, perseus, torch, torch.distributed
torch.__version__ = "2.5.1"
del torch._C._distributed_c10d.ErrorType
sys.modules["perseus.torch"] = None
os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
"""
    from_environment = GROUP.replace("store=dist.HashStore(), rank=0, world_size=1", "")
    done = run(first + from_environment.format(asked=asked))
    assert done.stdout.split() == [backend, "gloo"] * 2
    assert done.stderr.count("[perseus]") == done.stderr.count(said) == 1


@pytest.mark.parametrize(
    ("asked", "accelerator", "version", "backend", "said"),
    [
        ("undefined", None, (2, 13), "perseus", 'in place of PyTorch\'s own backend'),
        ("cpu:gloo,cuda:nccl", None, (2, 15), "perseus", "runs on Perseus"),
        ("perseus", "cuda", (2, 15), "perseus", ""),
        ("cpu:perseus,cuda:nccl", "cuda", (2, 15), "cpu:perseus,cuda:nccl", ""),
        ("undefined", "cuda", (2, 15), "cpu:perseus,cuda:nccl", 'cuda tensors.* through "nccl"'),
        ("nccl", "cuda", (2, 14), "cpu:perseus,cuda:nccl", 'asks for "perseus" by name'),
        ("gloo", "cuda", (2, 14), "perseus", 'in place of "gloo"'),
        ("gloo", "cuda", (2, 13), "perseus", 'in place of "gloo"'),
        ("cuda:gloo", "cuda", (2, 14), "perseus", 'in place of "cuda:gloo"'),
        ("cpu:gloo", "cuda", (2, 14), "cpu:perseus", 'in place of "cpu:gloo"'),
        ("cpu:gloo", None, (2, 14), "perseus", 'in place of "cpu:gloo"'),
        ("gloo", "rocm", (2, 14), "cpu:perseus,cuda:gloo", 'cuda tensors through "gloo"$'),
        ("gloo", "rocm", (2, 13), "gloo", '"gloo" stays for cuda tensors'),
        ("gloo", "xpu", (2, 14), "cpu:perseus,xpu:gloo", 'xpu tensors through "gloo"$'),
        ("cpu:gloo,cuda:nccl", "cuda", (2, 14), "cpu:perseus,cuda:nccl", 'through "nccl"'),
        ("nccl", "cuda", (2, 13), "nccl", "only torch 2.14 and later"),
        ("mpi", None, (2, 15), "mpi", "in place|gloo and nccl only"),
        ("xpu:xccl", "xpu", (2, 15), "xpu:xccl", "gloo and nccl only"),
    ],
)  # fmt: skip
def test_what_cannot_be_redirected_is_said(asked, accelerator, version, backend, said):
    nvidia = accelerator == "cuda"
    accelerator = "cuda" if accelerator == "rocm" else accelerator
    choice = choose(asked, accelerator, "nccl", beside=version >= (2, 14), nvidia=nvidia)
    assert choice.backend == backend
    assert bool(choice.said) == bool(said)
    assert re.search(said, choice.said)


SCRIPT = """
import argparse, os
import torch, torch.distributed as dist
parser = argparse.ArgumentParser()
parser.add_argument("--local-rank", "--local_rank", type=int)
parser.add_argument("word")
given = parser.parse_args()
dist.init_process_group()
tensor = torch.arange(3.0) + dist.get_rank()
dist.all_reduce(tensor)
local = [given.local_rank, int(os.environ["LOCAL_RANK"])]
said = f"rank {dist.get_rank()} {dist.get_backend()} {tensor.tolist()} {local} {given.word}"
os.write(1, f"{said}\\n".encode())  # in one piece: another rank writes, too
dist.destroy_process_group()
"""
LAUNCH = [sys.executable, "-m", "perseus.torch.distributed.launch", "--master-port", "0"]
RENDEZVOUS = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
PERSEUSRUN = [sys.executable, "-m", "perseus.run", "-np", "2"]
PYTHON_ON_PERSEUS = [sys.executable, "-m", "perseus.compat.ddp"]


def launch(command: list[str], folder, script=SCRIPT, says=1, **environment: str) -> str:
    (folder / "train.py").write_text(script)
    done = subprocess.run(
        command,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
    )
    assert done.returncode == 0, done.stderr
    assert (done.stdout + done.stderr).count(SAID) == says
    return done.stdout


@pytest.mark.parametrize(
    ("flags", "passed"),
    [
        (["--nproc_per_node", "2", "train.py"], True),
        (["--nproc-per-node=2", "--use_env", "-m", "train"], False),
    ],
)
def test_our_launch_module_takes_torchs_flags(flags, passed, tmp_path):
    said = launch([*LAUNCH, *RENDEZVOUS, *flags, "words"], tmp_path)
    for rank in range(2):
        local = [rank if passed else None, rank]
        assert f"rank {rank} perseus [1.0, 3.0, 5.0] {local} words" in said


def test_perseusruns_ranks_need_no_launcher_of_torch(tmp_path):
    said = launch([*PERSEUSRUN, *PYTHON_ON_PERSEUS, "train.py", "words"], tmp_path)
    for rank in range(2):
        assert f"rank {rank} perseus [1.0, 3.0, 5.0] [None, {rank}] words" in said


@pytest.mark.parametrize("first", ["", "import perseus; "])
def test_perseusruns_ranks_may_name_the_backend(first, tmp_path):
    named = SCRIPT.replace("init_process_group()", 'init_process_group("perseus")')
    assert named != SCRIPT
    script = f"{first}import perseus.torch.distributed\n{named}"
    said = launch([*PERSEUSRUN, sys.executable, "train.py", "words"], tmp_path, script, says=0)
    for rank in range(2):
        assert f"rank {rank} perseus [1.0, 3.0, 5.0] [None, {rank}] words" in said


@pytest.mark.skipif(shutil.which("mpirun") is None, reason="no mpirun beside this Python")
@pytest.mark.parametrize("meets", ["by mpi4py", "by the launcher"])
def test_mpiruns_ranks_are_taken_where_torchs_variables_are_not_to_count(meets, tmp_path):
    """Those of the launcher's own space must not believe these variables, either."""
    wrong = {"RANK": "0", "WORLD_SIZE": "1", "PERSEUS_USE_DDP_LAUNCHER": "0"}
    if meets == "by the launcher":
        (tmp_path / "sitecustomize.py").write_text("import sys; sys.modules['mpi4py'] = None")
        wrong["PYTHONPATH"] = str(tmp_path)
    elif find_spec("mpi4py") is None:
        pytest.skip("this Python has no mpi4py")
    mpirun = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-np", "2"]
    again = "dist.init_process_group()\ndist.all_reduce(tensor)\ndist.destroy_process_group()\n"
    command = [*mpirun, *PYTHON_ON_PERSEUS, "train.py", "words"]
    said = launch(command, tmp_path, SCRIPT + again, **wrong)
    for rank in range(2):
        assert f"rank {rank} perseus [1.0, 3.0, 5.0] [None, {rank}] words" in said


LOOKS_FIRST = """
import os, perseus, torch, torch.distributed as dist
def looks_first():
    if int(os.environ.get("RANK", -1)) == -1:
        return "alone"
    dist.init_process_group({given})
    tensor = torch.arange(3.0) + dist.get_rank()
    dist.all_reduce(tensor)
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")
    return dist.get_backend(), tensor.tolist(), [os.environ[name] for name in names]
os.write(1, f"{{looks_first()}}\\n".encode())  # in one piece: another rank writes, too
"""
GIVEN = (
    '"gloo", init_method="env://", rank=int(os.environ["RANK"]), '
    'world_size=int(os.environ["WORLD_SIZE"])'
)
MPIRUN = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-np", "2"]


@pytest.mark.parametrize("given", ['"gloo"', GIVEN], ids=["env", "numbers given"])
@pytest.mark.parametrize("launcher", ["perseusrun", "mpirun"])
def test_a_script_that_looks_for_its_rank_first_finds_it(launcher, given, tmp_path):
    """As nanoGPT, timm and torchvision's references do: else each rank would train alone."""
    if launcher == "mpirun" and shutil.which("mpirun") is None:
        pytest.skip("no mpirun beside this Python")
    command = [*(PERSEUSRUN if launcher == "perseusrun" else MPIRUN), sys.executable, "train.py"]
    said = launch(command, tmp_path, LOOKS_FIRST.format(given=given))
    for rank in "01":
        assert str(("perseus", [1.0, 3.0, 5.0], [rank, "2", rank, "2", "0"])) in said


@pytest.mark.parametrize("looks", ["itself", "as a library"])
def test_a_script_may_say_itself_where_rank_0_is(looks, tmp_path):
    """As one that reads Slurm's variables: then no launcher has to let ranks meet."""
    kept = socket.socket()  # so that no other program is given the port before the store has it
    kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    kept.bind(("127.0.0.1", 0))
    port = kept.getsockname()[1]
    sets = f"import os; os.environ.update(MASTER_ADDR='127.0.0.1', MASTER_PORT='{port}')"
    program = LOOKS_FIRST.format(given='"gloo"').replace(', "GROUP_RANK"', "")
    unable = {"PERSEUS_RENDEZVOUS_ADDR": "192.0.2.1", "HOROVOD_START_TIMEOUT": "1"}
    script = f"{sets}\nos.environ.update({unable})\n"
    if looks == "as a library":
        script += "import perseus, torch\nassert perseus.ddp._fill_environment()\n"
    script += program
    with kept:
        said = launch([*PERSEUSRUN, sys.executable, "train.py"], tmp_path, script)
    for rank in "01":
        assert str(("perseus", [1.0, 3.0, 5.0], [rank, "2", rank, "2"])) in said


@pytest.mark.parametrize(
    "other",
    [
        "import perseus.torch as hvd",
        "import torch, perseus, perseus.torch.horovod as hvd",
        "import perseus, torch; import perseus.torch as hvd",
        "import torch; print('RANK' in os.environ); import horovod.torch as hvd",
    ],
)
def test_scripts_for_other_interfaces_are_shown_no_rank(other, tmp_path):
    script = (
        "import os\nos.environ['LOCAL_RANK'] = '7'  # as a wrapper of the script may\n"
        f"{other}\nhvd.init()\n"
        "names = [name for name in ('RANK', 'WORLD_SIZE') if name in os.environ]\n"
        "names += [os.environ['LOCAL_RANK']]\n"
        "os.write(1, f'{hvd.rank()} of {hvd.size()} {names}\\n'.encode())"
    )
    flags = ["--horovod"] if "import horovod" in other else []
    said = launch([*PERSEUSRUN, *flags, sys.executable, "train.py"], tmp_path, script, says=0)
    assert all(f"{rank} of 2 ['7']" in said for rank in range(2)) and "True" not in said


COMPOSER = """
import torch.distributed as dist
def initialize_dist(device, timeout=300.0):
    if dist.is_initialized():
        if dist.get_backend() != device:
            raise RuntimeError(f"the backend is {dist.get_backend()}, not {device}")
        return
    dist.init_process_group(device, store=dist.HashStore(), rank=0, world_size=1)
"""


def test_composer_takes_a_group_that_has_the_place_of_the_one_it_asks_for(tmp_path):
    """Its Trainer asks for a group again, and compares names."""
    package = tmp_path / "composer" / "utils"
    package.mkdir(parents=True)
    (package / "dist.py").write_text(COMPOSER)
    program = """
import perseus
from composer.utils import dist as composer
composer.initialize_dist("gloo")
composer.initialize_dist("gloo")
print(composer.dist.get_backend())
composer.dist.destroy_process_group()
composer.initialize_dist("gloo")
print(composer.dist.get_backend())
"""
    assert run(program, PYTHONPATH=str(tmp_path)).stdout.split() == ["perseus", "perseus"]
