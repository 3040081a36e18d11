"""The errors of a pack: one class for each way to be wrong. Every message names the fault and the remedy."""

from __future__ import annotations


class Error(Exception):
    """The base of all errors that a user can mend, of both programs. The message is one line that names the fault and
    the remedy."""


class PackError(Error):
    """A pack can't be read or written. Copy it again, or convert the model again."""


class ManifestMissing(PackError):
    """There is no manifest.json: not a pack, or a conversion that was cut short. Give the folder that `moeconv
    quantize` wrote; after a conversion that stopped, run its command again."""


class ManifestInvalid(PackError):
    """manifest.json, or another JSON file of a conversion, is not JSON, lacks a field, or holds a value of the wrong
    type or range. Copy the pack again, or convert the model again; nobody should edit these files."""


class FormatTooNew(PackError):
    """The pack was written in a later version of the format. Upgrade moert, or convert the model again with this
    version."""


class UnsafePath(PackError):
    """A path is absolute, climbs out of the pack with '..', or is a link that leads out of it. Copy the files
    themselves into the pack, not links to them; do not use such a pack of a stranger."""


class FileMissing(PackError):
    """A file that the manifest names is not there, or can't be read. Copy the pack again as a whole, and see who may
    read the file."""


class FileTruncated(PackError):
    """A file is shorter or longer than the manifest says. Copy the pack again; its disk may have been full."""


class HeaderInvalid(PackError):
    """The header inside a file contradicts the layout that the manifest implies. Copy the pack again; if the same is
    said again, convert the model again, or make the file anew with the command that wrote it."""


class ChatInvalid(PackError):
    """chat.json is not JSON, lacks a field, or holds a value of the wrong type or size. Convert the model again, or
    name a chat template by `--tune template`."""


class HashMismatch(PackError):
    """The bytes of a file are not those that the manifest records: a copy or a disk has changed them. Copy the file
    again from a pack that `moeconv verify` finds whole."""


class SizeOverflow(PackError):
    """A size in the manifest is larger than any real file could be: the pack is damaged or means harm. Copy it again
    from where it was made."""


class WriteFailed(PackError):
    """The pack could not be written: disk full, no permission, target in the way. Make room, or choose another place;
    the same command goes on where it ended."""
