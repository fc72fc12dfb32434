"""Names for pieces: a file dropped into a package, a plugin module or an entry point registers itself."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import inspect
import pkgutil
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Generic, TypeVar

from vitruvius._config import bind
from vitruvius._errors import ConfigError, MissingExtra, UnknownName, suggest
from vitruvius._format import format_number
from vitruvius._lazy import uncollected
from vitruvius._yaml import parse_value

T = TypeVar("T")


Spec = str | Mapping[str, Any]


class Registry(Generic[T]):
    """One kind of piece, by name.

    A piece with its settings is written in one grammar everywhere, in Python, in recipes and on the command line:
    the object itself, `"name:key=value,…"` or `{use: name, key: value}`. `make` and `bind` read it.

    Its own pieces lie in `homes`, packages with a file for each or modules, which are imported when a name is looked up
    that is not registered yet: first the file of that name, then all. Outside packages add pieces with the entry-point
    group `vitruvius.<kind>s`, or with a module named in a recipe's `plugins:`.
    """

    def __init__(self, kind: str, plural: str | None = None, *, homes: Sequence[str] = ()) -> None:
        self.kind = kind
        self.plural = plural or f"{kind}s"
        self.homes = homes
        self._pieces: dict[str, T] = {}
        self._loaded = False

    def register(self, name: str) -> Callable[[T], T]:
        """Decorator: make a piece known under `name`. A second piece of that name is refused."""

        def add(piece: T) -> T:
            if not _origin(piece).startswith(("vitruvius.", *self.homes)):
                self._load()  # a name of our own is not taken over, whatever was imported first
            known = self._pieces.get(name)
            if known is not None and _origin(known) != _origin(piece):
                other = f"already registered by {_origin(known)}; {_origin(piece)} needs another name."
                raise ConfigError(f"{self.kind} {name!r} is {other}")
            self._pieces[name] = piece
            return piece

        return add

    def __getitem__(self, name: str) -> T:
        return self.get(name)

    def make(self, spec: Any, /, *args: Any, where: str = "") -> Any:
        """The object that `spec` means: itself, or a registered piece called with `args` and its settings."""
        if isinstance(spec, str | Mapping):
            return self.bind(spec, where=where)(*args)
        if spec is None or isinstance(spec, bool | int | float | list | tuple | set | bytes):
            raise self.not_a_piece(spec, where)
        return spec

    def bind(self, spec: Any, /, *, where: str = "", settings: Mapping[str, Any] | None = None) -> Callable[..., Any]:
        """The piece that `spec` means, not called yet, with its settings checked against its signature.

        `spec` is a name, `"name:key=value,…"`, `{use: name, key: value}`, or the piece itself; `settings` are further
        settings given beside it, `where` begins an error's sentence.
        """
        given, piece = dict(settings or {}), spec
        if isinstance(spec, str | Mapping):
            name, own = read_spec(spec, where=where or self.kind)
            if twice := own.keys() & given.keys():
                key = min(twice)
                raise ConfigError(f"{where or self.kind}: {key!r} of {name!r} is set twice, in {spec!r} and beside it.")
            given, piece = own | given, self.get(name, where=where)
        elif not callable(spec):
            raise self.not_a_piece(spec, where)
        elif not given:
            return piece
        else:
            name = getattr(spec, "__name__", type(spec).__name__)
        return functools.partial(piece, **bind(name, piece, given, where=where))

    def get(self, name: str, *, where: str = "") -> T:
        """The piece of that name; an error says where the name was written."""
        if name not in self:
            opening, known = f"{where}: " if where else "", ", ".join(self) or "none"
            raise UnknownName(f"{opening}no {self.kind} named {name!r}{suggest(name, self)} Known: {known}.")
        return self._pieces[name]

    def not_a_piece(self, spec: Any, where: str = "") -> ConfigError:
        """The error for something that does not say which piece is meant: what it is, and what was expected."""
        example = next(iter(self), "name")
        article = "an" if self.kind[0] in "aeiou" else "a"
        return ConfigError(
            f"{where or self.kind}: {spec!r} is not {article} {self.kind}; expected a name such as {example!r}, "
            f"'{example}:key=value', {{use: {example}, key: value}}, or the object itself."
        )

    def __iter__(self) -> Iterator[str]:
        self._load()
        return iter(sorted(self._pieces))

    def __contains__(self, name: object) -> bool:
        if name not in self._pieces:
            self._import_file(str(name))
        if name not in self._pieces:
            self._load()
        return name in self._pieces

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def describe(self) -> list[tuple[str, str, str]]:
        """(name, signature, first line of the docstring) of every piece."""
        return [(name, signature_of(self[name]), first_line(self[name])) for name in self]

    def _import_file(self, name: str) -> None:
        """Import the file of that name in a home, if there is one."""
        if not name.isidentifier() or name.startswith("_"):
            return
        for home in self.homes:
            module = home if home.endswith(f".{name}") else f"{home}.{name}"
            if _is_module(module):
                importlib.import_module(module)

    def _load(self) -> None:
        """Import all homes and entry points, once."""
        if self._loaded:
            return
        self._loaded = True  # at once: a module that is being loaded may look something up
        try:
            with uncollected():
                for home in self.homes:
                    package = importlib.import_module(home)
                    load_package(home, getattr(package, "__path__", ()))
            for point in entry_points(group=f"vitruvius.{self.plural}"):
                with _explained(f"the entry point {point.name!r} = {point.value}"):
                    self.register(point.name)(point.load())
        except BaseException:
            self._loaded = False
            raise


def check_name(kind: str, package: str, name: str, *, where: str = "") -> None:
    """Refuse a `name` that neither a file of `vitruvius.<package>` nor an entry point registers; none is imported."""
    known = {point.name for point in entry_points(group=f"vitruvius.{package}")}
    for file in Path(__file__).with_name(package).glob("*.py"):
        known |= set(re.findall(rf'^@{package}\.register\("(.+)"\)', file.read_text(encoding="utf-8"), re.MULTILINE))
    if name not in known:
        raise UnknownName(f"{where}no {kind} named {name!r}{suggest(name, known)} Known: {', '.join(sorted(known))}.")


def read_spec(spec: Spec, *, where: str) -> tuple[str, dict[str, Any]]:
    """Name and settings of `"name:key=value"` or `{use: name, key: value}`; `where` begins an error's sentence."""
    if isinstance(spec, str):
        return parse_spec(spec, where=where)
    settings = dict(spec)
    if "use" not in settings:
        raise ConfigError(f"{where}: {settings} does not say which piece to use; add a key `use:`.")
    name = settings.pop("use")
    if not isinstance(name, str) or not name:
        raise ConfigError(f"{where}: use = {name!r}, expected the name of a piece.")
    return name, settings


def parse_spec(text: str, *, where: str = "") -> tuple[str, dict[str, Any]]:
    """`pgd:eps=4/255,steps=10` → ("pgd", {"eps": 0.0157, "steps": 10}); commas inside [] and {} stay together."""
    prefix = f"{where}: " if where else ""
    name, _, rest = text.partition(":")
    if not name.strip():
        raise ConfigError(f"{prefix}{text!r} does not begin with a name; expected e.g. pgd:eps=4/255,steps=10.")
    settings: dict[str, Any] = {}
    for item in re.findall(r"(?:\[[^\]]*\]|\{[^}]*\}|[^,\[{])+", rest):
        key, equals, value = item.partition("=")
        key = key.strip()
        if not equals or not key:
            raise ConfigError(f"{prefix}{item!r} in {text!r} is not of the form key=value, e.g. pgd:eps=4/255.")
        if key in settings:
            raise ConfigError(f"{prefix}{text!r} sets {key!r} twice.")
        settings[key] = parse_value(value)
    return name.strip(), settings


def piece_of(bound: Callable[..., Any]) -> Callable[..., Any]:
    """The piece itself, whose settings `Registry.bind` has bound."""
    return bound.func if isinstance(bound, functools.partial) else bound


def load_package(package: str, path: Iterable[str]) -> None:
    """Import every public file of a package, so that its pieces register themselves."""
    for module in pkgutil.iter_modules(path):
        if not module.name.startswith("_"):
            importlib.import_module(f"{package}.{module.name}")


def _is_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # what stands before the last dot is a module itself
        return False


def load_plugins(names: Iterable[str]) -> None:
    """Import the modules a recipe names under `plugins:`, from the current folder or the Python path."""
    for name in names:
        sys.path.insert(0, str(Path.cwd()))  # `vitruvius` as a command does not look there by itself
        try:
            _import_plugin(name)
        finally:
            sys.path.remove(str(Path.cwd()))


def _import_plugin(name: str) -> None:
    with _explained(f"plugins: {name!r}"):
        importlib.import_module(name)


def load_foreign_plugins(names: object, *, source: str, trust: bool = False) -> None:
    """Import the modules that somebody's run names under `plugins:`; a module runs code, so only where that is wanted.

    names: what the run says.
    source: the file that says it, for errors.
    trust: import them like one's own. Otherwise only what is imported already (a recipe of one's own names it) and what
        an installed package offers under an entry point of vitruvius; anything else is a ConfigError, and nothing of it
        is imported.
    """
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        raise ConfigError(f"{source}: plugins = {names!r} is not a list of modules.")
    if trust:
        load_plugins(names)
        return
    for name in names:
        if name not in sys.modules and not _is_installed(name):
            raise ConfigError(
                f"{source} names the plugin {name!r}, Python code that came with the run and was not imported. If "
                f"you trust it, say --trust-plugins or plugins=[{name}] (in Python: trust_plugins=True, or import it "
                "first; in a recipe that uses this run: list it under plugins)."
            )
    before, here = list(sys.path), Path.cwd().resolve()  # a file there may have the name of what is installed
    sys.path[:] = [path for path in before if path and Path(path).resolve() != here]
    try:
        for name in names:
            _import_plugin(name)
    finally:
        sys.path[:] = before


def _is_installed(name: str) -> bool:
    """Whether a package offers this module, or something inside it, under one of our entry points."""
    points = entry_points()
    groups = [group for group in points.groups if group.startswith("vitruvius.")]
    offered = [point.module for group in groups for point in points.select(group=group)]
    return any(module == name or module.startswith(f"{name}.") for module in offered)


def require(package: str, extra: str) -> object:
    """Import an optional package, or say in one line what to install."""
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] != package.split(".")[0]:
            raise
        raise MissingExtra(package, extra) from error


def signature_of(piece: object) -> str:
    """The settings of a piece as one would type them: the keyword-only parameters."""
    assert callable(piece)
    settings = [
        p.name if p.default is inspect.Parameter.empty else f"{p.name}={_typed(p.default)}"
        for p in inspect.signature(piece).parameters.values()
        if p.kind is inspect.Parameter.KEYWORD_ONLY and p.name != "generator"
    ]
    return ", ".join(settings)


def _typed(value: object) -> str:
    """A default as one would type it: eps=4/255."""
    if isinstance(value, tuple):
        return f"({', '.join(map(_typed, value))}{',' * (len(value) == 1)})"
    return format_number(value) if isinstance(value, float) else repr(value)


def first_line(piece: object) -> str:
    """First line of the docstring, or nothing."""
    return (inspect.getdoc(piece) or "").split("\n", 1)[0]


@contextlib.contextmanager
def _explained(what: str) -> Iterator[None]:
    """Any failure of somebody else's module as one ConfigError that names it."""
    try:
        yield
    except ConfigError:
        raise
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{what} needs a module named {error.name!r}, which is neither in this folder nor on the Python path. "
            "Install it, or run from the folder that holds it."
        ) from error
    except Exception as error:
        raise ConfigError(f"{what} fails when it is imported: {type(error).__name__}: {error}") from error


def _origin(piece: object) -> str:
    module = getattr(piece, "__module__", "?")
    return f"{module}.{getattr(piece, '__qualname__', repr(piece))}"
