"""`python -m specnb`."""

from specnb.demo import main

if __name__ == "__main__":
    raise SystemExit(main())
