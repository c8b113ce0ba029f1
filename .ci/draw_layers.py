"""Draws the layers of common/ from its includes, as a Mermaid diagram in docs/architecture.md.

`python .ci/draw_layers.py` writes the diagram between its two markers; with `--check` it only
says whether the page is up to date, and exits 1 if it is not. Arrows that follow from others are
left out, and so are `base` and `kernels`, which everything may include.
"""

from __future__ import annotations

import sys
from pathlib import Path

from check_layers import ADAPTER_ROOTS, INCLUDE, cxx_files, included_file

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "architecture.md"
BEGIN, END = "<!-- layers: made by .ci/draw_layers.py -->", "<!-- end of layers -->"
EVERYWHERE = {"base", "kernels", "glibc"}
ABI = "include"


def includes() -> dict[str, set[str]]:
    """Folder → the other folders of common/ that its files include."""
    common = ROOT / "common"
    found: dict[str, set[str]] = {}
    for root in ("common", *ADAPTER_ROOTS):
        for source in cxx_files(ROOT / root):
            names = source.relative_to(ROOT).parts
            layer = names[1] if root == "common" else root
            for line in source.read_text(encoding="utf-8").splitlines():
                match = INCLUDE.match(line)
                target = included_file(common, source, match.group(2)) if match else None
                other = target.split("/")[0] if target else layer
                if other != layer and not {layer, other} & EVERYWHERE:
                    found.setdefault(layer, set()).add(other)
                    found.setdefault(other, set())
    # codec/ implements an interface that collective/ declares: the one file that it may include.
    found["codec"].discard("collective")
    return found


def reachable(arrows: dict[str, set[str]], start: str) -> set[str]:
    """Every layer that arrows lead to from `start`."""
    seen: set[str] = set()
    open_layers = [start]
    while open_layers:
        for layer in arrows[open_layers.pop()] - seen:
            seen.add(layer)
            open_layers.append(layer)
    return seen


def reduced(arrows: dict[str, set[str]]) -> dict[str, set[str]]:
    """The arrows without those that follow from others."""
    return {
        layer: others - {far for via in others for far in reachable(arrows, via)}
        for layer, others in arrows.items()
    }


def diagram() -> str:
    """The Mermaid text, the same for the same includes."""
    lines = ["```mermaid", "flowchart TD"]
    shown = {ABI: "include/perseus/perseus.h (C ABI)"}
    arrows = reduced(includes())
    lines += [f'    {layer}["{shown.get(layer, layer)}"]' for layer in sorted(arrows)]
    lines += [
        f"    {layer} --> {other}" for layer in sorted(arrows) for other in sorted(arrows[layer])
    ]
    return "\n".join([*lines, "```"])


def main(check: bool) -> int:
    page = PAGE.read_text(encoding="utf-8")
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    drawn = f"{before}{BEGIN}\n{diagram()}\n{END}{after}"
    if check:
        print("layers: drawn as they are" if drawn == page else "layers: run .ci/draw_layers.py")
        return int(drawn != page)
    PAGE.write_text(drawn, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main("--check" in sys.argv[1:]))
