"""Which of a pack's preferences fits the room that experts have. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from moert.errors import SettingInvalid
from moert.pack.manifest import Preference
from moert.wording import said

AUTO_ROUTING, EXACT_ROUTING = "auto", "exact"
HASH_ROUTING = "hash"
"""The pack's hash function takes the place of the routers."""


def check_routing(wanted: str) -> None:
    """Raises SettingInvalid for what can be the routing of no pack."""
    if wanted not in (AUTO_ROUTING, EXACT_ROUTING, HASH_ROUTING):
        _share(wanted)


def preference_for(wanted: str, known: Sequence[Preference], share: float) -> Preference | None:
    """`wanted` is AUTO_ROUTING, EXACT_ROUTING, HASH_ROUTING, or the share of the experts that one is made for ("25%").
    None: the routers prefer nothing.

    AUTO_ROUTING takes that made for the largest share that is no more than `share`, which is what there is room for, or
    the smallest, and exact routing where there is room for all. Raises SettingInvalid for a share that none is for.
    """
    if wanted in (EXACT_ROUTING, HASH_ROUTING) or (wanted == AUTO_ROUTING and (not known or share >= 1)):
        return None
    if wanted == AUTO_ROUTING:
        return next((one for one in reversed(known) if one.share <= share), known[0])
    asked = _share(wanted)
    for one in known:
        if abs(one.share - asked) < 1e-6:
            return one
    shares = ", ".join(share_text(one.share) for one in known) or "none (moeconv quantize --resident makes some)"
    raise SettingInvalid("routing", f"{wanted!r} is not in this pack: it has {EXACT_ROUTING}, and for shares {shares}")


def preference_note(preference: Preference) -> str:
    """What a user should know of answers that come of it."""
    loss = "" if preference.heldout is None else f", held-out loss {100 * preference.heldout.loss:.1f}%"
    return (
        f"routing prefers experts that were used lately, for room for {share_text(preference.share)} of them{loss}: "
        f"{said('routing', EXACT_ROUTING)} turns that off"
    )


def share_text(share: float) -> str:
    """25%"""
    return f"{100 * share:g}%"


def _share(wanted: str) -> float:
    try:
        share = float(wanted.removesuffix("%")) / 100
    except ValueError:
        share = 0.0
    if not wanted.endswith("%") or not 0 < share < 1:
        raise SettingInvalid(
            "routing",
            f"{wanted!r} should be {AUTO_ROUTING}, {EXACT_ROUTING}, {HASH_ROUTING}, or a share of the experts such as "
            "25%",
        )
    return share
