"""Where the command moert begins, before anything is loaded: Ctrl-C ends it without a traceback from the start."""

from __future__ import annotations

import signal

LEAST = (32_000_000, 160_000_000)  # see moert.pack.messages.Least


def main() -> None:
    """Runs the command line. While Python loads it, Ctrl-C ends the process as the system does it; from then on, with
    130."""
    handled = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # not where the caller had it ignored
    if handled:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from moert.pack.messages import Least, begins_not, refusal, short_of_memory

    if (reason := refusal(Least(*LEAST))) is not None:
        begins_not("moert", reason)
    try:
        from moert.command import cli

        if handled:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        cli.main()
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    except (ImportError, MemoryError) as error:
        if not short_of_memory(error):
            raise
        begins_not("moert", "the system gives too little memory to begin with: raise the limit (ulimit -v)")


if __name__ == "__main__":
    main()
