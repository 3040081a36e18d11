"""Settings of which some can be said and the others stay."""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar

from moert.errors import SettingInvalid

_Settings = TypeVar("_Settings", bound="Adjustable")


class Adjustable:
    """For a frozen dataclass."""

    def but(self: _Settings, **changes: Any) -> _Settings:
        """These with some others. Raises SettingInvalid for a name that there is not, and for what one can't be."""
        assert is_dataclass(self)
        known = [each.name for each in fields(self)]
        for name in changes:
            if name not in known:
                raise SettingInvalid(name, f"is no setting: there are {', '.join(known)}")
        return replace(self, **changes) if changes else self
