"""Files of a pack that something has happened to."""

from __future__ import annotations

from hypothesis import strategies as st


def damaged(body: bytes, data: st.DataObject) -> bytes:
    """One to three small changes: a bit, bytes that are gone or there twice, or other text."""
    changed = bytearray(body)
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(changed) - 1))
        change = data.draw(st.sampled_from(["flip", "drop", "repeat", "text"]))
        if change == "flip":
            changed[at] ^= 1 << data.draw(st.integers(0, 7))
        elif change == "drop":
            del changed[at : at + data.draw(st.sampled_from([1, 2, 8, 64]))]
        elif change == "repeat":
            changed[at:at] = changed[at : at + 8]
        else:
            changed[at : at + 1] = data.draw(st.sampled_from([b"0", b"9", b"-", b'"', b"]", b"\xff"]))
    return bytes(changed)
