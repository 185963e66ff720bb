"""The command `pliant`, and `python -m pliant`. From here on, Ctrl-C ends in one line."""

import os
import signal
from typing import Any, NoReturn


def main() -> NoReturn:
    """Run the command line."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # a shell lets background jobs ignore it
        signal.signal(signal.SIGINT, _stop)
    from pliant import cli

    cli.main()


def _stop(*_: Any) -> NoReturn:
    """End at once: an import may swallow a KeyboardInterrupt, or turn it into another error."""
    os.write(1, b"stopped; nothing was done yet\n")
    os._exit(130)


if __name__ == "__main__":
    main()
