"""What `import horovod` gives: the version whose interface Perseus has, and run(). Stateless."""

from __future__ import annotations

from perseus.run import run

__all__ = ["__version__", "run"]

__version__ = "0.28.1"
