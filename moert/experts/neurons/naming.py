"""What it takes to run of a pack's experts only the neurons that its predictor names, put together."""

from __future__ import annotations

from collections.abc import Iterable

from moert.errors import PredictorMissing, SettingInvalid
from moert.experts.ahead import Lookahead
from moert.experts.cache.cache import ExpertCache
from moert.experts.demand import Listener
from moert.experts.drive.io import IoSettings
from moert.experts.neurons.keeping import KEEPING
from moert.experts.neurons.predicted import PredictedExperts
from moert.experts.neurons.scores import Scores
from moert.experts.neurons.sharing import Shares, all_to_blocks
from moert.experts.neurons.slots import BlockCache
from moert.experts.neurons.store import BlockReader, Pieces, RowStore
from moert.kernels.backend import Backend
from moert.pack.predictor import PREDICTOR, NeuronPredictor, load_predictor
from moert.pack.reader import Pack
from moert.stats import ExpertCounters, NeuronCounters
from moert.wording import said

EXACT, PREDICTED = "exact", "predicted"
NEURONS = (EXACT, PREDICTED)
"""Which neurons of an expert count: all, or those that the pack's predictor names."""


class Naming:
    """Whole blocks are cached, and no expert: all room is for blocks. See Firing, in whose place this stands."""

    def __init__(
        self, pack: Pack, counters: ExpertCounters, io: IoSettings, keeping: str, predictor: NeuronPredictor,
        backend: Backend,
    ) -> None:  # fmt: skip
        """`keeping`: a name of moert.experts.neurons.keeping. Raises PackError."""
        self.counters = NeuronCounters()
        self.pieces = Pieces(pack, counters, io)
        self.store = RowStore(self.pieces)
        """Of a cache without room."""
        self.blocks = BlockCache(self.pieces.layers, BlockReader(self.pieces), self.counters, KEEPING[keeping])
        self.nbytes = dict.fromkeys(self.pieces.layouts, 0)
        """What that cache has of each expert."""
        self.token_part, self.all_bytes = predictor.kept.blocks, self.blocks.all_bytes
        """Of its experts' blocks, what a token asks for; and what all of all take."""
        self._asked, self._ffn, self._scores = counters, pack.manifest.model.moe.ffn, Scores(predictor, backend)

    def shares(self, room_bytes: int) -> Shares:
        return all_to_blocks(room_bytes, self.blocks.all_bytes, self.blocks.one_bytes)

    def runner(
        self, rows: ExpertCache, backend: Backend, ahead: Lookahead | None, listeners: Iterable[Listener]
    ) -> PredictedExperts:
        """Reads the biases of all experts. Raises PackError."""
        assert ahead is None, "there are no whole experts to read ahead"
        counters = self._asked, self.counters
        return PredictedExperts(
            self._ffn, self.pieces.layouts, self._scores, self.blocks, self.pieces.biases(), backend, counters,
            listeners,
        )  # fmt: skip


def check_neurons(pack: Pack, neurons: str) -> None:
    """Raises SettingInvalid or PredictorMissing where the pack lacks what it takes to run so."""
    if neurons != PREDICTED:
        return
    if not pack.has_neurons:
        raise SettingInvalid(
            "neurons",
            f"{PREDICTED!r} needs experts in blocks of neurons, and the pack at {pack.root} has them whole: convert "
            f"the model again with moeconv quantize --layout neuron, or use {said('neurons', EXACT)}",
        )
    if PREDICTOR not in pack.manifest.files:
        raise PredictorMissing(
            f"{said('neurons', PREDICTED)} needs a predictor of neurons, and the pack at {pack.root} has no "
            f"{PREDICTOR} (moeconv train-neurons adds it); or use {said('neurons', EXACT)}"
        )


def predictor_of(pack: Pack, neurons: str) -> NeuronPredictor | None:
    """None where all neurons count. Raises PackError, SettingInvalid or PredictorMissing."""
    check_neurons(pack, neurons)
    return load_predictor(pack) if neurons == PREDICTED else None


def fidelity(predictor: NeuronPredictor) -> str:
    """What a user should know of answers that come of it."""
    loss, cost = predictor.loss, "what that loses was not measured"
    if loss is not None:
        between = f"[{100 * loss.low:.1f}%, {100 * loss.high:.1f}%]"
        cost = f"held-out loss {100 * loss.loss:.1f}% {between}, that of the widths included"
    return f"only neurons that the pack's predictor names are read and computed: {cost}"
