"""Who routes and who listens in a run: the model's own routers, and nobody. Packages beside the core derive from it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from moert.experts.ahead import Lookahead
from moert.experts.policy import Listener
from moert.experts.predictors import Prediction, Predictor
from moert.models.model import Foresees, Reroute
from moert.pack.model_spec import LayerKey


class Routing:
    """The model's own routers decide. `predictor` names experts to be read ahead; None: nothing is read ahead."""

    name: str | None = None
    """Of the routers in place of the model's own; None: there are none."""
    nbytes = 0
    """Upper bound of the memory that it takes."""
    request_bytes: Callable[[int, int], int] | None = None
    """Returns the bytes that it keeps of a prompt of some tokens and some new ones."""
    further: Callable[[LayerKey], Prediction] | None = None
    """Returns the experts that a layer of the present pass will demand, before the first layer runs."""
    reroute: Reroute | None = None
    """Returns the router in place of the model's own."""

    def __init__(self, predictor: Predictor | None = None) -> None:
        self.predictor = predictor
        self.listeners: Sequence[Listener] = ()
        """Called with each demand."""
        self.notes: Sequence[str] = ()
        """For the user, of answers that are not the model's own."""

    def before_passes(self, ahead: Lookahead | None) -> Foresees | None:
        """Returns the listener before each pass, for the benefit of `ahead`."""
        return None

    def close(self) -> None:
        """Ends its threads."""
