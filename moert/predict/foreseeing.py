"""A pack's hash function at work, and what that takes."""

from __future__ import annotations

from functools import partial

from moert.kernels.backend import Backend
from moert.pack.hash import HASH, HashFunction
from moert.pack.reader import Pack
from moert.predict.foresight import Foresight
from moert.predict.network import network_bytes, recalled_bytes


class Foreseeing:
    """`routes_to`: where it `routes`, which is to take the place of the routers, how many experts a token goes to."""

    def __init__(self, pack: Pack, function: HashFunction, backend: Backend, routes: bool) -> None:
        spec, self._routed = pack.manifest.model, function.routed
        usual = spec.moe.router.top_k
        self.routes_to = (usual if self._routed is None else self._routed.top_k) if routes else None
        self.foresight = Foresight(function, spec, backend, self.routes_to or usual, routes)
        self.nbytes = network_bytes(pack.manifest.files[HASH].nbytes)
        """Upper bound of what its weights take."""
        self._other: Backend | None = None
        self.request_bytes = partial(recalled_bytes, function)

    def work_beforehand(self, backend: Backend) -> None:
        """Another thread works on prompts that wait, with a backend of its own, which is closed with this."""
        self._other, self.foresight.before = backend, self.foresight.beforehand(backend)

    def close(self) -> None:
        self.foresight.needed, self.foresight.told = (
            (lambda: False),
            (lambda stack, tokens: None),
        )  # nobody asks any more
        if self.foresight.before is not None:
            self.foresight.before.close()
            self.foresight.before = None
        if self._other is not None:
            self._other.close()
            self._other = None

    def notes(self) -> list[str]:
        """What a user should know of answers that come of it."""
        if self.routes_to is None:
            return []
        loss = "what that loses was not measured"
        if self._routed is not None:
            loss = f"held-out loss {100 * self._routed.loss:.1f}%, that of the widths included"
        return [f"the hash function takes the place of the routers: {loss}"]
