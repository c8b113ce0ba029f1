"""Scripts may choose a locale with a decimal comma: settings and files keep their points."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

_COMMA = """comment_char %
escape_char /
LC_NUMERIC
decimal_point "<U002C>"
thousands_sep "<U002E>"
grouping 3;3
END LC_NUMERIC
"""
_SCRIPT = """
import locale, sys
locale.setlocale(locale.LC_ALL, "comma")
assert locale.str(1.5) == "1,5"
import perseus.arrays as hvd
hvd.init()
hvd.shutdown()
assert locale.str(1.5) == "1,5", "the script's locale is its own"
"""


@pytest.fixture
def comma(tmp_path: Path) -> dict[str, str]:
    """The environment of a machine that has this locale."""
    if shutil.which("localedef") is None:
        pytest.skip("localedef, of Debian's package libc-bin, is missing: the locale is NOT tested")
    (tmp_path / "source").write_text(_COMMA)
    subprocess.run(
        ["localedef", "-c", "-i", tmp_path / "source", tmp_path / "comma"],
        capture_output=True,  # it warns of the categories that are left out
        check=False,
    )
    assert (tmp_path / "comma" / "LC_NUMERIC").exists()
    return {**os.environ, "LOCPATH": str(tmp_path)}


def test_a_decimal_comma_changes_neither_settings_nor_files(
    comma: dict[str, str], tmp_path: Path
) -> None:
    """LIGHT_TOPK_RATIO's default is 0.01, and the tuner's log has seconds."""
    log = tmp_path / "tuned.csv"
    log.write_text(
        "step,bucket_bytes,streams,nccl_percent,seconds,score,chosen\n3,1000000,2,0,0.25,20.5,1\n"
    )
    environment = {**comma, "PERSEUS_TUNER_REPLAY": str(log), "LIGHT_TOPK_RATIO": "0.25"}
    ran = subprocess.run(
        [sys.executable, "-c", _SCRIPT], env=environment, capture_output=True, text=True
    )
    assert (ran.returncode, ran.stderr) == (0, "")
