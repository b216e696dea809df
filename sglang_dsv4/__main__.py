"""`python -m sglang_dsv4` is the command `sglang-dsv4`."""

import sys

from sglang_dsv4.cli import main

if __name__ == "__main__":
    sys.exit(main())
