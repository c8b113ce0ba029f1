"""`python -m perseus.run` is perseusrun."""

from perseus.run.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
