"""The names that a setting may have, each with what it makes. Scripts may register more."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from inspect import signature
from typing import Any, NoReturn, TypeVar

from mend.errors import ConfigError

Make = TypeVar("Make", bound=Callable[..., Any])


class Registry(dict[str, Make]):
    """Name -> a function that makes an object with this `name`. `room`: the module with its
    `register`. `arguments`: the names and values of the arguments with which one is made on trial,
    in order."""

    def __init__(self, room: str, own: Mapping[str, Make], **arguments: object) -> None:
        super().__init__(own)
        self.room, self.arguments = room, arguments

    def __missing__(self, name: str) -> NoReturn:
        raise self.unknown(self.room, name, "Choose one of these")

    def unknown(self, field: str, name: object, choose: str) -> ConfigError:
        """The error for a name that is not registered. `choose`: the beginning of its remedy."""
        rule = f"needs one of {', '.join(self)} (the names registered in this process)"
        remedy = (
            f"{choose}, or import what calls mend.{self.room}.register({name!r}, ...) before "
            "MendConfig is built."
        )
        return ConfigError(field, name, rule, remedy)

    def tried(self, name: str, make: Callable[..., Any]) -> Any:
        """Make an object in order to register `make`. Raises ConfigError if the name is taken or
        differs from the object's own, or if `make` takes other arguments."""
        try:
            signature(make).bind(*self.arguments.values())
        except TypeError as error:
            rule = f"cannot be made by {getattr(make, '__name__', make)!s} ({error})"
            given = f"with ({', '.join(self.arguments)})" if self.arguments else "without arguments"
            raise ConfigError(self.room, name, rule, f"make is called {given}.") from error
        except ValueError:
            pass  # written in C, without a signature
        if self.get(name, make) is not make:
            raise ConfigError(self.room, name, "is registered already", "Choose another name.")
        made = make(*self.arguments.values())
        if not hasattr(made, "name"):
            rule = f"makes a {type(made).__name__}, which has no name"
            raise ConfigError(self.room, name, rule, f"See mend.{self.room} for what it needs.")
        if made.name != name:
            rule = f"makes one whose name is {made.name!r}"
            raise ConfigError(self.room, name, rule, "Register it under the name that it has.")
        return made
