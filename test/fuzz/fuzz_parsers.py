#!/usr/bin/env python
"""Has atheris, which is libFuzzer for Python, attack a parser of test/parsers.py.

    test/fuzz/fuzz_parsers.py --target=hostfile -max_total_time=60 NEW_INPUTS INPUTS …

libFuzzer takes the other arguments. To merge inputs, it starts this file again with all of them.
"""

from __future__ import annotations

import sys
from pathlib import Path

import atheris

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

# json in Python, because coverage cannot guide the search through its C code; imported once more.
sys.modules["_json"] = None  # type: ignore[assignment]
for name in [name for name in sys.modules if name.partition(".")[0] == "json"]:
    del sys.modules[name]
with atheris.instrument_imports(include=["perseus", "json", "yaml", "http.server"]):
    import yaml  # noqa: F401 - config_file does so only when it is called
    from parsers import TARGETS

_FLAG = "--target="

if __name__ == "__main__":
    (name,) = [each.removeprefix(_FLAG) for each in sys.argv if each.startswith(_FLAG)]
    atheris.Setup(sys.argv, TARGETS[name])
    atheris.Fuzz()
