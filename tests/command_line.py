"""The command line of moert, run in the process of a test."""

from __future__ import annotations

import io
import json
import sys

import pytest

from moert.command import cli, console


class Moert:
    """Runs the command line in this process; `out` and `err` hold what it printed."""

    def __init__(self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
        self._capsys, self._monkeypatch = capsys, monkeypatch
        self.out = self.err = ""
        monkeypatch.setattr(console, "left_behind", lambda: False)  # another test's work does not end this process

    def __call__(self, *arguments: object, stdin: str | None = None) -> int:
        if stdin is not None:
            self._monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        with pytest.raises(SystemExit) as end:
            cli.main([str(argument) for argument in arguments])
        self.out, self.err = self._capsys.readouterr()
        return int(end.value.code or 0)

    def refuses(self, *arguments: object, stdin: str | None = None) -> str:
        """The one line that a refusal prints."""
        code = self(*arguments, stdin=stdin)
        assert code == 2
        assert self.err.startswith("moert: ")
        assert self.err.count("\n") == 1
        if "--json" in arguments:
            error = json.loads(self.out)["error"]
            assert (error["code"], f"moert: {error['message']}\n") == (2, self.err)
        else:
            assert self.out == ""
        return self.err
