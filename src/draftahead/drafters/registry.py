"""The registry of drafters: names to classes, and a drafter from a configuration.

A file or folder in this package registers itself by the decorator; it is imported when the first
drafter is built.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import pkgutil
from collections.abc import Callable, Mapping
from typing import Any, TypeGuard, TypeVar

from draftahead import drafters
from draftahead.core.checks import TEXT, shown
from draftahead.drafters.base import Drafter, DrafterContext
from draftahead.errors import ConfigError, UnknownDrafterError, nearest

_REGISTRY: dict[str, Callable[..., Drafter]] = {}
_SYNONYMS: dict[str, str] = {}
REQUIRED = ("propose", "learn", "release")
REQUIRED_OPTION = inspect.Parameter.empty
Maker = TypeVar("Maker", bound=Callable[..., Any])


def register(name: str, *, synonyms: tuple[str, ...] = ()) -> Callable[[Maker], Maker]:
    """Makes a drafter class known by name. It is built as `cls(context, **options)`; its keyword
    parameters are the configuration keys that users may give. A user's drafter replaces a built-in
    one of the same name, which may be imported later."""

    def add(maker: Maker) -> Maker:
        is_built_in = maker.__module__.startswith(f"{drafters.__name__}.")
        if not (is_built_in and name in _REGISTRY):
            _REGISTRY[name] = maker
        _SYNONYMS.update(dict.fromkeys(synonyms, name))
        return maker

    return add


@functools.cache
def _load_all() -> None:
    """Imports every drafter of this package, so that each has registered itself."""
    for module in pkgutil.iter_modules(drafters.__path__):
        importlib.import_module(
            f"{drafters.__name__}.{module.name}" + (".drafter" if module.ispkg else "")
        )


def names() -> list[str]:
    _load_all()
    return sorted(_REGISTRY)


def build(wanted: str | Mapping[str, Any] | Drafter | None, context: DrafterContext) -> Drafter:
    """A drafter from a name, a configuration with vLLM's keys, or a drafter itself; None: plain
    decoding."""
    if _is_drafter(wanted):
        return wanted
    maker, options = _found(wanted)
    return maker(context, **options)


def check(wanted: Any) -> None:
    """Refuses what `build` would refuse, before anything is loaded."""
    if not _is_drafter(wanted):
        _found(wanted)


def _found(wanted: Any) -> tuple[Callable[..., Drafter], dict[str, Any]]:
    """The maker of a drafter, and its options, checked by name."""
    if wanted is None or isinstance(wanted, str):
        wanted = {"method": "none" if wanted is None else wanted}
    if not isinstance(wanted, Mapping):
        raise ConfigError(
            f"drafter must be a name, a configuration or an object with propose, learn and "
            f"release, not {type(wanted).__name__}"
        )
    try:
        options = {TEXT.read(key): value for key, value in wanted.items()}
    except Exception:
        raise ConfigError(
            f"the drafter's configuration is a dictionary with names as keys, not {shown(wanted)}"
        ) from None
    # vLLM lets a configuration with a model leave its method out.
    name = options.pop("method", "draft_model" if "model" in options else None)
    if name is None:
        raise ConfigError(
            f"the drafter's configuration needs 'method' (one of {', '.join(names())})"
        )
    maker, name = _maker(name), str.__str__(name)
    known = _options(maker)
    for key in options:
        if key not in known:
            hint = nearest(key, known) if known else " (it takes none)"
            raise ConfigError(f"drafter {name!r} has no option {shown(key)}{hint}")
    for key, default in known.items():
        if default is REQUIRED_OPTION and options.get(key) is None:
            raise ConfigError(f"drafter {name!r} needs {key!r}: a name or a path")
    return maker, options


def options_of(name: str) -> dict[str, Any]:
    """The configuration keys of a drafter, and their defaults (or REQUIRED_OPTION)."""
    return _options(_maker(name))


def synonyms_of(name: str) -> list[str]:
    return sorted(synonym for synonym, meant in _SYNONYMS.items() if meant == name)


def summary_of(name: str) -> str:
    """The first line of a drafter's docstring."""
    return (inspect.getdoc(_maker(name)) or "").partition("\n")[0]


def _maker(name: Any) -> Callable[..., Drafter]:
    _load_all()
    typed = str.__str__(name) if isinstance(name, str) else ""
    maker = _REGISTRY.get(typed) or _REGISTRY.get(_SYNONYMS.get(typed, ""))
    if maker is None:
        known = [*_REGISTRY, *_SYNONYMS]
        raise UnknownDrafterError(f"no drafter {shown(name)}{nearest(typed, known)}")
    return maker


def _options(maker: Callable[..., Drafter]) -> dict[str, Any]:
    parameters = inspect.signature(maker).parameters.items()
    return {key: found.default for key, found in parameters if found.kind is found.KEYWORD_ONLY}


def _is_drafter(wanted: Any) -> TypeGuard[Drafter]:
    """Whether an object has the methods that a drafter must have; the others are optional. An
    `isinstance` check of the protocol would also run its properties, which may fail."""
    methods = (inspect.getattr_static(wanted, name, None) for name in REQUIRED)
    return not isinstance(wanted, type) and all(method is not None for method in methods)
