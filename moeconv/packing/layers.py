"""A pack's own model, layer by layer: for packs whose experts do not fit memory as numbers that text runs through."""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import sha256

from moeconv.measure.passes import Origin, Passes, Room
from moeconv.packing.packed import backbone_weights, described
from moeconv.progress import Progress
from moert.pack.codec import F32
from moert.pack.model_spec import ExpertKey
from moert.pack.reader import MANIFEST, Pack, projection_weights


class PackedLayers(Passes):
    """Raises ConversionError for a pack whose family this program does not know, or a PackError."""

    def __init__(self, pack: Pack, room: Room, show: Progress) -> None:
        self.pack = pack
        family, description = described(pack)
        origin = Origin(pack.root, family, description, backbone_weights(pack), self._expert, self._biases)
        super().__init__(origin, room, show)

    @property
    def weights_digest(self) -> str:
        return sha256((self.pack.root / MANIFEST).read_bytes()).hexdigest()

    def _expert(self, key: ExpertKey) -> Mapping[str, F32]:
        projections = self.pack.projections(key, self.pack.read_expert(key))
        return {name: projection_weights(projection) for name, projection in projections.items()}

    def _biases(self, key: ExpertKey) -> Mapping[str, F32]:
        return self.pack.biases(key, self.pack.read_expert(key))
