"""`python -m rlcompute`: the command line without an installed console script."""

from rlcompute.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
