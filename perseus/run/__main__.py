"""`python -m perseus.run` runs perseusrun."""

from perseus.run.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
