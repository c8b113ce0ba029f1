"""What `import horovod.runner` gives: the function run(). Stateless."""

from __future__ import annotations

from perseus.run import run

__all__ = ["run"]
