"""Settings of which some can be said and the others stay."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar, get_type_hints

from moert.errors import SettingInvalid
from moert.pack.fitting import fits, unknown, wanted

_Settings = TypeVar("_Settings", bound="Adjustable")


class Adjustable:
    """The base of settings: a frozen dataclass whose annotations say what each can be."""

    @classmethod
    def of(cls: type[_Settings], settings: _Settings | None, changes: Mapping[str, Any]) -> _Settings:
        """Returns the settings, or those that are usual, with these changes by name. Raises SettingInvalid."""
        if settings is not None and not isinstance(settings, cls):
            raise SettingInvalid("settings", f"is {settings!r}: it should be {cls.__name__}(...), or settings by name")
        return (settings or cls()).but(**changes)

    def but(self: _Settings, **changes: Any) -> _Settings:
        """Returns these settings with some changed. Raises SettingInvalid for a name that there is not, and for what
        one can't be."""
        assert is_dataclass(self)
        known = [each.name for each in fields(self)]
        for name in changes:
            if name not in known:
                raise SettingInvalid(name, unknown(name, known))
        return replace(self, **changes) if changes else self

    def check_types(self) -> None:
        """Raises SettingInvalid for the first setting of another type than its annotation says."""
        for name, hint in get_type_hints(type(self)).items():
            if not fits(value := getattr(self, name), hint):
                raise SettingInvalid(name, f"is {value!r}: it should be {wanted(hint)}")
