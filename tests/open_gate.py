"""A gate of sessions that lets everything through: memory is not what is tested."""

from __future__ import annotations

from moert.models.footprint import Loads


class OpenGate:
    """See moert.engine.session.Gate."""

    def check(self, loads: Loads, beside: Loads = ()) -> None:
        pass

    def together(self, running: Loads, waiting: Loads) -> int:
        return len(waiting)

    def before(self, loads: Loads) -> None:
        pass

    after = before

    def aside(self, nbytes: int, purpose: str) -> None:
        pass

    def passed(self) -> None:
        pass

    idle = passed
