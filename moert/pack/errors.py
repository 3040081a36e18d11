"""The errors of a pack: one class for each way to be wrong. Every message names the fault and the remedy."""

from __future__ import annotations


class Error(Exception):
    """The base of all errors that a user can mend, of both programs. The message is one line that names the fault and
    the remedy."""


class PackError(Error):
    """A pack can't be read or written. The message is one line, fit to be shown to a user."""


class ManifestMissing(PackError):
    """There is no manifest.json: not a pack, or a conversion that was cut short."""


class ManifestInvalid(PackError):
    """manifest.json is not JSON, lacks a field, or holds a value of the wrong type or range."""


class FormatTooNew(PackError):
    """The pack was written in a later major version of the format."""


class UnsafePath(PackError):
    """A path is absolute, climbs out of the pack with '..', or is a link that leads out of it."""


class FileMissing(PackError):
    """A file that the manifest names is not there."""


class FileTruncated(PackError):
    """A file is shorter or longer than the manifest says."""


class HeaderInvalid(PackError):
    """The header inside a file contradicts the layout that the manifest implies."""


class ChatInvalid(PackError):
    """chat.json is not JSON, lacks a field, or holds a value of the wrong type or size."""


class HashMismatch(PackError):
    """The bytes of a file are not those that the manifest records."""


class SizeOverflow(PackError):
    """A size in the manifest is larger than any real file could be."""


class WriteFailed(PackError):
    """The pack could not be written: disk full, no permission, target in the way."""
