"""Fails when a formatter or a script has cut a comment, a docstring or a message in two.

Looks at Python and C++ sources for the traces of such a cut: a docstring with the quotes of two
string literals inside it, the dashes of a section's title on a line of their own, a comment behind
a closing bracket, and a line that was too long and whose last words stand alone on the next one.
`python .ci/check_comments.py [ROOT]` prints one line per offence, `path:line: what (remedy)`, and
exits 1 if there is any.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

FOLDERS = (".ci", "benchmarks", "common", "examples", "frameworks", "perseus", "test")
# Made by a build; their originals are checked.
COPIES = {("perseus", name) for name in ("examples", "include", "patches", "sources")}
CXX = {".cc", ".h", ".c", ".cpp"}
# Columns that the formatters allow (pyproject.toml, .clang-format).
PYTHON_COLUMNS, CXX_COLUMNS = 100, 120

# The end of one string literal and the start of the next, inside a docstring. A closing quote in
# a sentence has no space before it.
QUOTES = re.compile(r' "\n\s*"\S')
COMMENT = re.compile(r"(?P<lead>\s*(?://|#|\*|/\*\*?))(?: (?P<text>.*))?$")
TITLE = re.compile(r"\s*(?:#|//|/\*) ?-{3,} .*[^-\s]\s*$")
DASHES = re.compile(r"\s*(?:#|//|\*|/\*)? ?-{8,}\s*(?:\*/)?$")
TITLE_AND_DASHES, CLOSING = re.compile(r"\s*/\* ?-{3,} .*-$"), re.compile(r"\s*\*/$")
BEHIND_BRACKET = re.compile(r"\s*[)\]}]+,?\s+# (?!fmt:|type:|noqa|ruff:|mypy:|pragma)")
LITERAL = re.compile(r'(?P<lead>\s*[fbr]?)"(?P<text>(?:[^"\\]|\\.)*)"(?P<rest>.*)$')
LAST_LITERAL = re.compile(r'"((?:[^"\\]|\\.)*)"$')


def first_word(text: str) -> str:
    """The first word of a text, or "" if it starts with a space."""
    return text.split(" ", 1)[0]


def is_remainder(before: str, words: str, after: str, columns: int, indent: int) -> bool:
    """Whether `words` on a line of their own are what did not fit at the end of the line `before`.

    before: the whole line; words and after: the text of the next two lines, indented by `indent`.
    """
    return (
        len(before) + 1 + len(first_word(words)) >= columns
        and len(words) < columns // 3
        and indent + len(words) + len(first_word(after)) < columns - columns // 4
    )


def cut_comments(lines: list[str], columns: int) -> Iterator[int]:
    """Numbers of comment lines that hold only the remainder of the line above."""
    for number in range(1, len(lines) - 1):
        above, here, below = (COMMENT.match(line) for line in lines[number - 1 : number + 2])
        if not (above and here and below) or here["lead"].lstrip() != below["lead"].lstrip():
            continue
        if above["lead"].lstrip() == "//" and here["lead"].lstrip() != "//":
            continue  # a comment, then #include
        words, after = (here["text"] or "").strip(), (below["text"] or "").strip()
        if re.search(r"[\w,]$", words) and re.match(r"[a-z(\"'`]", after):
            indent = len(here["lead"]) + 1
            if is_remainder(lines[number - 1].rstrip(), words, after, columns, indent):
                yield number + 1


def cut_literals(lines: list[str], columns: int) -> Iterator[int]:
    """Numbers of lines with a string literal that is only the remainder of the one above."""
    for number in range(1, len(lines) - 1):
        above, line = lines[number - 1].rstrip(), lines[number].rstrip()
        previous, here, below = LAST_LITERAL.search(above), LITERAL.match(line), None
        if here and not here["rest"]:
            below = LITERAL.match(lines[number + 1])
        if not (previous and here and below) or not here["text"].endswith(" "):
            continue
        if previous[1].endswith("\\n") or here["text"].startswith((" ", "|")):
            continue
        indent = len(here["lead"]) + 2
        words, after = here["text"].rstrip(), below["text"]
        if words[-1:] != "|" and is_remainder(above, words, after, columns, indent):
            yield number + 1


def docstrings(tree: ast.AST) -> Iterator[ast.Constant]:
    """Every docstring of a module."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(tree):
        if isinstance(node, kinds) and node.body and isinstance(node.body[0], ast.Expr):
            value = node.body[0].value
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                yield value


def cut_docstrings(tree: ast.AST, lines: list[str]) -> Iterator[tuple[int, str]]:
    """(line number, what) for docstrings with a trace of a cut."""
    for node in docstrings(tree):
        assert isinstance(node.value, str)
        found = QUOTES.search(node.value)
        if found:
            yield node.lineno + node.value.count("\n", 0, found.start()), "quotes in a docstring"
        text = lines[node.lineno - 1 : node.end_lineno]
        # As comments of the same width, of which cut_comments knows what a remainder is.
        commented = [re.sub(r"^(\s*)(\S)", r"\1# \2", line) for line in text]
        for number in cut_comments(commented, PYTHON_COLUMNS + 2):
            yield node.lineno + number - 1, "the end of the line above, cut off"


def offences(path: Path) -> Iterator[tuple[int, str]]:
    """(line number, what and remedy) for one file."""
    text = path.read_text(encoding="utf-8")
    lines = text.splitlines()
    columns = CXX_COLUMNS if path.suffix in CXX else PYTHON_COLUMNS
    for number, (line, below) in enumerate(pairwise(lines), 1):
        if TITLE.match(line) and DASHES.match(below):
            yield number + 1, "the dashes of a section's title (put them behind the title)"
        if TITLE_AND_DASHES.match(line) and CLOSING.match(below):
            yield number + 1, "the end of a section's title (leave out some of its dashes)"
    for number in (*cut_comments(lines, columns), *cut_literals(lines, columns)):
        yield number, "the end of the line above, cut off (fill the lines again)"
    if path.suffix == ".py":
        for number, line in enumerate(lines, 1):
            if BEHIND_BRACKET.match(line):
                yield number, "a comment behind a closing bracket (put it above the statement)"
        for number, what in cut_docstrings(ast.parse(text, str(path)), lines):
            yield number, f"{what} (make it one summary line, a blank line and the rest)"


def sources(root: Path) -> Iterator[Path]:
    """Python and C++ files of the project, sorted."""
    yield from sorted(root.glob("*.py"))
    for folder in FOLDERS:
        for path in sorted((root / folder).rglob("*")):
            copied = path.relative_to(root).parts[:2] in COPIES
            if path.suffix in CXX | {".py"} and path.is_file() and not copied:
                yield path


def main(root: Path) -> int:
    root = root.resolve()
    count = 0
    for path in sources(root):
        for number, what in sorted(offences(path)):
            count += 1
            print(f"{path.relative_to(root).as_posix()}:{number}: {what}")
    print(f"comments: {count} offences" if count else "comments: whole")
    return 1 if count else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parent.parent)))
