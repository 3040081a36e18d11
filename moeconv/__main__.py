"""The start of the command moeconv, before anything is loaded: Ctrl-C ends it without a traceback from here on."""

from __future__ import annotations

import signal

LEAST = (192_000_000, 1_000_000_000)  # see moert.pack.messages.Least


def main() -> None:
    """Runs the command. While Python loads it, Ctrl-C ends the process as the system does; from then on, with status
    130."""
    handled = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # not where the caller had it ignored
    if handled:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from moert.pack.messages import Least, begins_not, refusal, short_of_memory

    if (reason := refusal(Least(*LEAST))) is not None:
        begins_not("moeconv", reason)
    try:
        from moeconv.command import cli

        if handled:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        cli.main()
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    except (ImportError, MemoryError) as error:
        if not short_of_memory(error):
            raise
        begins_not("moeconv", "the system gives too little memory to begin with: raise the limit (ulimit -v)")


if __name__ == "__main__":
    main()
