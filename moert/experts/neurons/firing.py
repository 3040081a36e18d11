"""What it takes to run a pack's experts neuron by neuron, put together, and the room that its parts get."""

from __future__ import annotations

from collections.abc import Iterable

from moert.experts.ahead import Lookahead
from moert.experts.cache.cache import ExpertCache
from moert.experts.demand import Listener
from moert.experts.drive.io import IoSettings
from moert.experts.neurons.executor import FiringExperts
from moert.experts.neurons.keeping import KEEPING
from moert.experts.neurons.sharing import Shares, room_for, shares
from moert.experts.neurons.slots import BlockCache
from moert.experts.neurons.store import ColumnReader, Pieces, RowStore
from moert.kernels.backend import Backend
from moert.pack.reader import Pack
from moert.stats import ExpertCounters, NeuronCounters


class Firing:
    """Rows of experts are cached as whole experts are, in a cache that the caller makes of `store`; columns in
    blocks."""

    def __init__(self, pack: Pack, counters: ExpertCounters, io: IoSettings, keeping: str) -> None:
        """`keeping`: a name of moert.experts.neurons.keeping. Raises PackError."""
        self.counters = NeuronCounters()
        self.pieces = Pieces(pack, counters, io)
        self.store = RowStore(self.pieces)
        spec, layers = pack.manifest.model, self.pieces.layers
        self.blocks = BlockCache(layers, ColumnReader(self.pieces), self.counters, KEEPING[keeping])
        self.nbytes = {key: self.store.nbytes(key) for keys in layers.values() for key in keys}
        """Of the rows of each expert."""
        top_k = spec.moe.router.top_k
        demand = {at: sum(sorted(self.nbytes[key] for key in keys)[-top_k:]) for at, keys in layers.items()}
        self._least = max(demand.values())
        self._token = sum(nbytes for at, nbytes in demand.items() if at.stack == "decoder")
        self._all, self._ffn = sum(self.nbytes.values()), spec.moe.ffn
        self._asked = top_k / spec.moe.n

    @property
    def token_bytes(self) -> int:
        """Room in which the rows that a token can ask for in all layers of the decoder stay, whatever fires."""
        return min(room_for(self._token, self.blocks.one_bytes, self._asked), self.all_bytes)

    @property
    def all_bytes(self) -> int:
        """What all rows and all blocks take."""
        return self._all + self.blocks.all_bytes

    def shares(self, room_bytes: int) -> Shares:
        columns = self.blocks
        return shares(room_bytes, self._all, self._least, columns.all_bytes, columns.one_bytes, self._asked)

    def runner(
        self, rows: ExpertCache, backend: Backend, ahead: Lookahead | None, listeners: Iterable[Listener]
    ) -> FiringExperts:
        """Reads the biases of all experts. Raises PackError."""
        biases = self.pieces.biases()
        return FiringExperts(self._ffn, rows, self.blocks, biases, backend, self.counters, ahead, listeners)
