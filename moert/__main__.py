"""Where the command moert begins, before anything is loaded: Ctrl-C ends it without a traceback from the start."""

from __future__ import annotations

import signal


def main() -> None:
    """While Python loads the command line, Ctrl-C ends the process as the system does it; from then on, with 130."""
    handled = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # not where the caller had it ignored
    if handled:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from moert.command import cli

    try:
        if handled:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        cli.main()
    except KeyboardInterrupt:
        raise SystemExit(130) from None


if __name__ == "__main__":
    main()
