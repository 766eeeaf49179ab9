"""The command line: `python -m specnb`."""

from specnb.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
