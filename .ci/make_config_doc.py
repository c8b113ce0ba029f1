"""Writes docs/config.md from the core's table of variables, read through the C ABI.

`python .ci/make_config_doc.py FILE` writes the file; without FILE the text goes to standard output.
Needs perseus/libperseus.so, which `make build` makes, and nothing else.
"""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path
from typing import NamedTuple

LIBRARY = Path(__file__).resolve().parent.parent / "perseus" / "libperseus.so"

HEAD = """\
# Configuration

<!-- Made by `make docs` from the table in common/base/config.cc: change it there. -->

Every setting is an environment variable. Set it before `perseusrun`, which passes it on to every
rank, on this host and on others. A variable that several products know under different names has
aliases: the name itself wins, then the first alias that is set. An empty value means unset. If a
value cannot be read, the start fails with an error that names the variable and the value:

```
[config] PERSEUS_ALLREDUCE_STREAMS='40': expected a whole number 1..12
```

Perseus warns of a name that differs only slightly from one of these:

```
[config] Unknown variable PERSEUS_ALREDUCE_DTYPE; did you mean PERSEUS_ALLREDUCE_DTYPE?
```

Yes/no variables take 1, true, on, yes and 0, false, off, no.
"""

TAIL = """\
## Also read

Perseus reads these variables outside of the table. HOROVOD_DYNAMIC_PROCESS_SETS=1 lets scripts
add and remove process sets after init(), as `init(process_sets="dynamic")` does.
HOROVOD_ELASTIC_TIMEOUT is the number of seconds that perseusrun waits for enough slots in an
elastic job without `--elastic-timeout`; default 600 ([elastic.md](elastic.md)). PERSEUS_SECRET is
the job's secret, of at least 16 bytes, if PERSEUS_SECRET_FILE is unset; perseusrun makes one for
each job and ignores both ([security.md](security.md)).
"""


class Variable(NamedTuple):
    """One line of the table, as text."""

    name: str
    aliases: str
    type: str
    default: str
    allowed: str
    help: str


class _Description(ctypes.Structure):
    """struct perseus_config_variable of perseus.h."""

    _fields_ = (
        ("struct_size", ctypes.c_size_t),
        ("name", ctypes.c_char_p),
        ("aliases", ctypes.c_char_p),
        ("type", ctypes.c_char_p),
        ("default_value", ctypes.c_char_p),
        ("allowed", ctypes.c_char_p),
        ("help", ctypes.c_char_p),
    )


def variables() -> list[Variable]:
    """The core's table, in its order."""
    library = ctypes.CDLL(str(LIBRARY))
    table = []
    for index in range(library.perseus_config_count()):
        entry = _Description(struct_size=ctypes.sizeof(_Description))
        code = library.perseus_config_describe(index, ctypes.byref(entry))
        if code != 0:
            raise SystemExit(f"perseus_config_describe({index}) gave code {code}")
        fields = (entry.name, entry.aliases, entry.type, entry.default_value)
        table.append(Variable(*((f or b"").decode() for f in (*fields, entry.allowed, entry.help))))
    return table


def values(variable: Variable) -> str:
    """What may be given, in a few words."""
    if variable.type == "choice":
        return ", ".join(f"`{choice}`" for choice in variable.allowed.split("|"))
    kinds = {"int": "whole number", "float": "number", "bool": "`0`, `1`", "string": "text"}
    low, dots, high = variable.allowed.partition("..")
    return kinds[variable.type] + (f" {low} to {high}" if dots else "")


def document(table: list[Variable]) -> str:
    """The whole of docs/config.md."""
    lines = [HEAD]
    for variable in table:
        lines.append(f"## {variable.name}\n")
        lines.append(f"{variable.help}\n")
        default = f"`{variable.default}`" if variable.default else "unset"
        lines.append(f"- Values: {values(variable)}. Default: {default}.")
        if variable.aliases:
            names = ", ".join(f"`{alias}`" for alias in variable.aliases.split(","))
            lines.append(f"- Also read from: {names}.")
        lines.append("")
    return "\n".join([*lines, TAIL])


if __name__ == "__main__":
    text = document(variables())
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(text, encoding="utf-8")
    else:
        sys.stdout.write(text)
