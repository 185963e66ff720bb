"""The command `pliant`, and `python -m pliant`. Nothing slow is imported before Ctrl-C ends in one line."""

import sys
from typing import NoReturn


def main() -> NoReturn:
    """Run the command line."""
    try:
        from pliant import cli
    except KeyboardInterrupt:
        print("stopped; nothing was done yet")
        sys.exit(130)
    cli.main()


if __name__ == "__main__":
    main()
