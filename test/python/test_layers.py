"""The layer check accepts this tree and finds each kind of offence in a made-up one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / ".ci" / "check_layers.py"


def check(root: Path) -> tuple[int, str]:
    command = [sys.executable, str(SCRIPT), str(root)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    return done.returncode, done.stdout + done.stderr


def write(root: Path, path: str, text: str) -> None:
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(text, encoding="utf-8")


def test_this_tree_keeps_the_order() -> None:
    code, output = check(ROOT)
    assert code == 0, output


@pytest.mark.parametrize(
    ("path", "text", "rule"),
    [
        ("common/base/a.h", '#include "kernels/k.h"\n', "base may include nothing"),
        ("common/kernels/a.cc", '#  include "transport/t.h"', "kernels may include base"),
        ("common/bootstrap/a.cc", "#include <transport/t.h>\n", "bootstrap may include base, mpi"),
        ("common/transport/a.cc", '#include "collective/c.h"\n', "may include base, bootstrap"),
        ("common/collective/a.cc", '#include "../engine/e.h"\n', "collective may include"),
        ("common/codec/a.cc", '#include "collective/c.h"\n', "collective/wire_format.h"),
        ("common/engine/a.cc", '#include "perseus/perseus.h"\n', "engine may include"),
        ("common/engine/a.cc", '#include "api/new.h"\n', "engine may include"),
        ("common/odd/a.cc", '#include "base/b.h"\n', "no place in the order"),
        ("frameworks/tf/a.cc", '#include "base/b.h"\n', "only perseus/perseus.h"),
        ("patches/caffe/a.cpp", '#include "engine/e.h"\n', "only perseus/perseus.h"),
        ("common/base/a.cc", 'char* x = getenv("X");\n', "reads the environment"),
        ("frameworks/tf/a.cc", 'auto x = std::getenv("X");\n', "reads the environment"),
        ("perseus/torch/a.py", "from perseus.run import cli\n", "perseus.torch may import"),
        ("perseus/torch/a.py", "from ..run.cli import main\n", "perseus.torch may import"),
        ("perseus/torch/a.py", "from .. import run\n", "perseus.torch may import"),
        ("perseus/basics.py", "def f():\n    import perseus.torch\n", "perseus.run.bootstrap"),
        ("perseus/basics.py", "def f():\n    import torch\n", "may import torch"),
        ("perseus/run/a.py", "import torch.distributed as d\n", "may import torch"),
        ("perseus/odd/a.py", "x = 1\n", "no place in the order"),
    ],
)
def test_an_arrow_that_points_back_is_named(
    tmp_path: Path, path: str, text: str, rule: str
) -> None:
    for other in ("kernels/k.h", "transport/t.h", "collective/c.h", "engine/e.h", "base/b.h"):
        write(tmp_path, f"common/{other}", "#pragma once\n")
    write(tmp_path, "common/include/perseus/perseus.h", "#include <stddef.h>\n")
    write(tmp_path, "perseus/run/cli.py", "")
    assert check(tmp_path)[0] == 0
    write(tmp_path, path, text)
    code, output = check(tmp_path)
    assert code == 1
    assert rule in output
    assert f"{path}:{2 if text.startswith('def') else 1}:" in output
    assert "layers: 1 offences" in output


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("common/codec/a.cc", '#include "collective/wire_format.h"\n#include "codec/b.h"\n'),
        ("common/api/a.cc", '#include "perseus/perseus.h"\n#include "engine/e.h"\n'),
        ("common/base/config.cc", 'char* x = std::getenv("X");\n'),
        ("common/base/a.cc", '// getenv( is not for us\nauto text = "getenv(x)";\n'),
        ("frameworks/tf/a.cc", '#include "own.h"\n#include <perseus/perseus.h>\n#include <map>\n'),
        ("perseus/torch/a.py", "import torch\nfrom perseus import _core\nfrom ..basics import x\n"),
        ("perseus/bench/a.py", "import torch\nimport perseus.torch.horovod\n"),
    ],
)
def test_arrows_that_point_down_are_accepted(tmp_path: Path, path: str, text: str) -> None:
    write(tmp_path, "common/include/perseus/perseus.h", "")
    write(tmp_path, path, text)
    assert check(tmp_path) == (0, "layers: in order\n")


@pytest.mark.parametrize(
    ("text", "cyclic"),
    [
        ("from perseus.b import x\n", True),
        ("import perseus.b\n", True),
        ("from . import b\n", True),
        ("class A:\n    from perseus import b\n", True),
        ("try:\n    import perseus.b\nexcept ImportError:\n    pass\n", True),
        ("def f():\n    from perseus import b\n", False),
        ("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import perseus.b\n", False),
        ("import perseus\n", False),
    ],
)
def test_modules_that_import_each_other_are_named(tmp_path: Path, text: str, cyclic: bool) -> None:
    write(tmp_path, "perseus/__init__.py", "")
    write(tmp_path, "perseus/b.py", "from perseus.c import y\n")
    write(tmp_path, "perseus/c.py", "import perseus.a\n")
    write(tmp_path, "perseus/a.py", text)
    code, output = check(tmp_path)
    assert code == int(cyclic)
    cycle = "perseus.a -> perseus.b -> perseus.c -> perseus.a (modules import each other)"
    assert (cycle in output) == cyclic
