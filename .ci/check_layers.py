"""Fails when an arrow between layers points back.

Looks at C++ includes, Python imports and cycles among them, and getenv outside base/config.cc.
`python .ci/check_layers.py [ROOT]` prints one line per offence, `path:line: what (rule)`, and
exits 1 if there is any. The order is that of docs/architecture.md.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

# Folder of common/ -> folders it may include beside itself. Every folder may include base.
CXX_LAYERS: dict[str, set[str]] = {
    "include": set(),
    "glibc": set(),
    "base": set(),
    "kernels": set(),
    "net": {"kernels"},
    "topology": set(),
    "mpi": set(),  # the library, opened at run time
    "cuda": set(),  # the driver, likewise
    "nccl": set(),
    "bootstrap": {"mpi", "net"},
    "transport": {"bootstrap", "kernels", "net", "topology"},
    "collective": {"cuda", "kernels", "mpi", "nccl", "topology", "transport"},
    "codec": {"kernels"},  # and collective/wire_format.h, below
    "compression": {"codec", "kernels", "topology"},
    "progress": {"net"},
    "request": {"codec", "compression", "cuda"},
    "control": {"request", "transport"},
    "point_to_point": {"request", "topology", "transport"},
    "execution": {
        "codec",
        "collective",
        "compression",
        "cuda",
        "kernels",
        "request",
        "topology",
        "transport",
    },
    "observe": {"execution", "kernels", "progress", "request", "topology"},
    "engine": {
        "codec",
        "collective",
        "compression",
        "control",
        "cuda",
        "execution",
        "kernels",
        "nccl",
        "net",
        "observe",
        "point_to_point",
        "progress",
        "request",
        "topology",
        "transport",
    },
    "api": {
        "bootstrap",
        "compression",
        "cuda",
        "engine",
        "execution",
        "include",
        "kernels",
        "mpi",
        "nccl",
        "net",
        "topology",
        "transport",
    },
}
CXX_SINGLE_FILES: dict[str, set[str]] = {"codec": {"collective/wire_format.h"}}
# Behind the interface of collective/group.h, of which these layers see nothing else.
BEHIND_GROUP = re.compile(
    r"collective/(exchange|stepped_exchange|link_group|hierarchical_group|mpi/\w+|nccl/\w+)\.h|transport/transport\.h"
)
GROUP_USERS = {"execution", "observe"}
ADAPTER_ROOTS = ("frameworks", "patches")
C_ABI = "include/perseus/perseus.h"
ENVIRONMENT_READER = "base/config.cc"

# Part of perseus/ -> parts it may import beside itself. "" = the modules directly in perseus/.
PYTHON_LAYERS: dict[str, set[str]] = {
    # How a process starts: the launcher's, and below all others, since init() asks there.
    "run.bootstrap": set(),
    "": {"run.bootstrap"},
    # Horovod's own names that belong to no framework.
    "compat.common": {"", "gradients"},
    "gradients": {""},  # what the frameworks' gradients share
    "elastic": {"", "gradients"},
    "torch": {"", "gradients", "elastic", "compat.common", "run.bootstrap"},
    "tensorflow": {"", "gradients", "elastic", "compat.common", "run.bootstrap"},
    # Keras runs on either; what TensorFlow's users import stands above both.
    "keras": {"", "gradients", "elastic", "compat.common", "tensorflow", "torch"},
    "tensorflow.horovod": {"", "elastic", "compat.common", "tensorflow", "keras"},
    "tensorflow.keras": {"tensorflow.horovod"},
    "mxnet": {"", "gradients", "elastic", "compat.common"},
    "run": {"", "elastic", "run.bootstrap", "compat.common"},
    "report": {""},
    "bench": {"", "torch", "tensorflow", "tensorflow.horovod", "run", "run.bootstrap"},
    "compat": {
        "",
        "compat.common",
        "elastic",
        "torch",
        "tensorflow",
        "tensorflow.horovod",
        "keras",
        "mxnet",
        "run",
    },
}
# Modules that show a higher part under their package's name.
PYTHON_FACES: dict[str, str] = {"tensorflow/__init__.py": "tensorflow.horovod"}
# Framework -> parts of perseus/ that may import it.
FRAMEWORKS: dict[str, set[str]] = {
    "torch": {"torch", "keras", "bench"},
    "tensorflow": {"tensorflow", "tensorflow.horovod", "keras", "bench"},
    "keras": {"tensorflow", "keras", "bench"},
    "mxnet": {"mxnet", "bench"},
    "horovod": {"bench"},
}

INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]')
GETENV = re.compile(r"\b(?:secure_)?getenv\s*\(|\benviron\b")
COMMENT_OR_STRING = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"', re.DOTALL)


def cxx_files(folder: Path) -> list[Path]:
    """C and C++ sources under a folder, sorted."""
    suffixes = {".cc", ".h", ".c", ".cpp", ".cu", ".hpp"}
    return sorted(path for path in folder.rglob("*") if path.suffix in suffixes)


def without_comments(text: str) -> str:
    """The text with comments and strings blanked out, line numbers kept."""
    return COMMENT_OR_STRING.sub(lambda match: re.sub(r"[^\n]", " ", match.group()), text)


def included_file(common: Path, source: Path, name: str) -> str | None:
    """The path inside common/ that an include names, or None where it is no file of common/."""
    for folder in (source.parent, common, common / "include"):
        found = (folder / name).resolve()
        if found.is_file() and found.is_relative_to(common):
            return found.relative_to(common).as_posix()
    # A file that is not there (yet) still shows by its name where it would be.
    folder_name, slash, _ = name.partition("/")
    return name if slash and folder_name in CXX_LAYERS else None


def include_offence(common: Path, source: Path, name: str) -> str | None:
    """Why `source` may not include `name`, or None where it may."""
    target = included_file(common, source, name)
    if target is None:
        return None
    if not source.is_relative_to(common):
        return None if target == C_ABI else "adapters may include only perseus/perseus.h"
    layer, other = source.relative_to(common).parts[0], target.split("/")[0]
    if layer in GROUP_USERS and BEHIND_GROUP.fullmatch(target):
        return f"{layer} sees of groups collective/group.h alone"
    if layer not in CXX_LAYERS:
        return f"common/{layer}/ has no place in the order of layers"
    may = CXX_LAYERS[layer] | ({"base"} if layer not in ("base", "include", "glibc") else set())
    if other == layer or other in may or target in CXX_SINGLE_FILES.get(layer, set()):
        return None
    allowed = ", ".join(sorted(may | CXX_SINGLE_FILES.get(layer, set()))) or "nothing"
    return f"{layer} may include {allowed}"


def cxx_offences(root: Path) -> Iterator[str]:
    """Includes against the order, and getenv, in common/, frameworks/ and patches/."""
    common = root / "common"
    for folder in ("common", *ADAPTER_ROOTS):
        for source in cxx_files(root / folder):
            shown = source.relative_to(root).as_posix()
            text = source.read_text(encoding="utf-8")
            for number, line in enumerate(text.splitlines(), 1):
                match = INCLUDE.match(line)
                why = include_offence(common, source, match.group(2)) if match else None
                if why:
                    yield f"{shown}:{number}: {line.strip()} ({why})"
            if shown == f"common/{ENVIRONMENT_READER}":
                continue
            for number, line in enumerate(without_comments(text).splitlines(), 1):
                if GETENV.search(line):
                    rule = f"only {ENVIRONMENT_READER} reads the environment"
                    yield f"{shown}:{number}: {line.strip()} ({rule})"


def imported_modules(
    package: tuple[str, ...], nodes: Iterable[ast.AST]
) -> Iterator[tuple[int, str]]:
    """(line, absolute name) of every import among these nodes of a module of `package`."""
    for node in nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            stem = ".".join([*base, *([node.module] if node.module else [])])
            # `from perseus import run` names a part in its list.
            for alias in node.names:
                yield node.lineno, f"{stem}.{alias.name}"


def part_of(python: Path, names: tuple[str, ...] | list[str]) -> str:
    """The part of perseus/ that a dotted name below it belongs to."""
    if ".".join(names[:2]) in PYTHON_LAYERS:
        return ".".join(names[:2])
    first = names[0] if names else ""
    return first if first in PYTHON_LAYERS or (python / first).is_dir() else ""


def shown_part(part: str) -> str:
    return f"perseus.{part}" if part else "perseus/*.py"


def import_offence(python: Path, part: str, module: str) -> str | None:
    """Why a module of `part` may not import `module`, or None where it may."""
    first, *rest = module.split(".")
    if first in FRAMEWORKS and part not in FRAMEWORKS[first]:
        return f"only perseus/{{{', '.join(sorted(FRAMEWORKS[first]))}}} may import {first}"
    if first != "perseus":
        return None
    other = part_of(python, rest)
    if other == part or other in PYTHON_LAYERS[part]:
        return None
    allowed = ", ".join(shown_part(name) for name in sorted(PYTHON_LAYERS[part]))
    return f"{shown_part(part)} may import {allowed or 'only each other'}"


def python_offences(root: Path) -> Iterator[str]:
    """Imports against the order in perseus/."""
    python = root / "perseus"
    for source in sorted(python.rglob("*.py")):
        relative = source.relative_to(python)
        if relative.parts[0] == "examples":
            continue
        part = PYTHON_FACES.get(relative.as_posix()) or part_of(python, relative.parts[:-1])
        shown = source.relative_to(root).as_posix()
        if part not in PYTHON_LAYERS:
            yield f"{shown}:1: perseus.{part} has no place in the order of layers"
            continue
        tree = ast.parse(source.read_text(encoding="utf-8"), shown)
        lines: dict[int, str] = {}
        for number, module in imported_modules(("perseus", *relative.parts[:-1]), ast.walk(tree)):
            why = import_offence(python, part, module)
            if why:
                lines.setdefault(number, f"{shown}:{number}: import of {module} ({why})")
        yield from lines.values()


def run_on_import(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes that importing a module executes: no bodies of functions, nothing for checkers."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(child, ast.If) and ast.unparse(child.test).endswith("TYPE_CHECKING"):
            continue
        yield child
        yield from run_on_import(child)


def import_graph(root: Path) -> dict[str, dict[str, str]]:
    """Module of perseus/ -> module that it imports while it is imported itself -> path:line.

    A module's own packages are left out: they are being imported before it, whatever it says.
    """
    sources = {
        ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__"): path
        for path in sorted((root / "perseus").rglob("*.py"))
    }
    graph: dict[str, dict[str, str]] = {}
    for name, path in sources.items():
        shown = path.relative_to(root).as_posix()
        tree = ast.parse(path.read_text(encoding="utf-8"), shown)
        package = path.relative_to(root).parts[:-1]
        targets = graph.setdefault(name, {})
        for number, imported in imported_modules(package, run_on_import(tree)):
            parts = imported.split(".")
            for end in range(1, len(parts) + 1):
                target = ".".join(parts[:end])
                if target in sources and not f"{name}.".startswith(f"{target}."):
                    targets.setdefault(target, f"{shown}:{number}")
    return graph


def import_cycle(graph: dict[str, dict[str, str]]) -> list[str]:
    """The modules of one cycle, the first one again at its end; [] where there is none."""
    done: set[str] = set()
    path: list[str] = []

    def visit(module: str) -> list[str]:
        if module in path:
            return [*path[path.index(module) :], module]
        if module in done:
            return []
        path.append(module)
        for target in graph[module]:
            if cycle := visit(target):
                return cycle
        done.add(path.pop())
        return []

    return next((cycle for module in graph if (cycle := visit(module))), [])


def cycle_offences(root: Path) -> Iterator[str]:
    """Modules of perseus/ that import each other, one line per cycle."""
    graph = import_graph(root)
    while cycle := import_cycle(graph):
        yield f"{graph[cycle[0]].pop(cycle[1])}: {' -> '.join(cycle)} (modules import each other)"


def main(root: Path) -> int:
    root = root.resolve()
    offences = [*cxx_offences(root), *python_offences(root), *cycle_offences(root)]
    for line in offences:
        print(line)
    print(f"layers: {len(offences)} offences" if offences else "layers: in order")
    return 1 if offences else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parent.parent)))
