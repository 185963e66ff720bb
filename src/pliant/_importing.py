"""Objects of the user's own, named as text, `module:name` or `path/to/file.py:name`; and packages that are extras."""

import contextlib
import importlib
import importlib.util
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pliant._names import suggest
from pliant._seeding import undrawn


def import_object(reference: str) -> Any:
    """Import what a reference names; the global random generators stay as they were.

    Args:
        reference: `package.module:name`, or `path/to/file.py:name`. Modules are also looked for in the
            current folder.

    Returns:
        The object.

    Raises:
        ValueError: If the reference has another form, or there is nothing behind it, or no valid Python.

    Example:
        >>> import_object("math:pi")
        3.141592653589793
    """
    module_name, colon, name = reference.rpartition(":")
    if not (colon and module_name and name):
        raise ValueError(f"{reference!r} must be of the form module:name or path/to/file.py:name")
    with contextlib.suppress(ImportError):
        importlib.import_module("numpy.random")  # or its generator, which the module may bring, is not looked after
    try:
        with undrawn():  # A module may seed, and is imported by the first run of a process alone.
            module = _import_file(Path(module_name)) if module_name.endswith(".py") else _import_module(module_name)
    except SyntaxError as error:
        raise ValueError(f"{reference!r} is no valid Python: {error}") from error
    except (ValueError, OSError):
        raise
    except ImportError as error:
        module_form = module_name.removesuffix(".py").replace("/", ".")
        hint = f"; write {module_form}:{name} if it is part of a package" if "relative import" in str(error) else ""
        raise ImportError(f"{reference!r} cannot be imported: {error}{hint}") from error
    except Exception as error:
        raise ValueError(f"{reference!r} cannot be imported: {tell_failure(error)}") from error
    try:
        return getattr(module, name)
    except AttributeError:
        own = [each for each, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__]
        raise ValueError(f"{reference!r}: {module_name} has no {name!r}; {suggest(name, own)}") from None


def _import_module(name: str) -> Any:
    folder = Path.cwd()
    try:
        with _first(folder):
            return importlib.import_module(name)
    except ModuleNotFoundError as error:
        # A module that is there but misses one of its own imports is another matter.
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise
        raise ValueError(f"there is no module {name!r} in {folder} or among the installed ones") from None


def _import_file(path: Path) -> Any:
    path = path.resolve()
    if not path.is_file():
        raise ValueError(f"there is no file {str(path)!r}")
    name = f"pliant_user_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # What the file itself imports may lie beside it, and classes are looked up by their module when pickled.
    sys.modules[name] = module
    with _first(path.parent):
        spec.loader.exec_module(module)
    return module


_FOLDERS: set[Path] = set()
"""Where modules of the user's own were imported from."""


@contextlib.contextmanager
def _first(folder: Path) -> Iterator[None]:
    """Let a folder's modules be found before all others, also if one of the same name was loaded from another such one.

    They can be found afterwards too, but then after all others: a `json.py` beside a network must not stop workers.
    """
    _FOLDERS.add(folder)
    for name, module in list(sys.modules.items()):
        origin = Path(getattr(module, "__file__", None) or "")
        root = origin.parent.parent if origin.name == "__init__.py" else origin.parent
        beside = folder / f"{name}.py", folder / name / "__init__.py"
        if root in _FOLDERS - {folder} and any(map(Path.is_file, beside)):
            for loaded in [each for each in sys.modules if f"{each}.".startswith(f"{name}.")]:
                del sys.modules[loaded]
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))
        if str(folder) not in sys.path:
            sys.path.append(str(folder))


def tell_failure(error: Exception) -> str:
    """Say in a line what code of the user's own raised, and where.

    Example:
        >>> try:
        ...     1 / 0
        ... except ZeroDivisionError as error:
        ...     tell_failure(error).partition(" (")[0]
        'ZeroDivisionError: division by zero'
    """
    *_, (frame, line) = traceback.walk_tb(error.__traceback__)
    return f"{type(error).__name__}: {error} ({frame.f_code.co_filename}, line {line})"


@contextlib.contextmanager
def naming_extra(what: str, extra: str) -> Iterator[None]:
    """Say how to install what an import misses.

    Args:
        what: What cannot be done without it.
        extra: The extra of Pliant that has it.

    Example:
        >>> with naming_extra("juggling", "circus"):
        ...     import no_such_package
        Traceback (most recent call last):
        ImportError: juggling needs a package (No module named 'no_such_package'): pip install 'pliant[circus]'
    """
    try:
        yield
    except ImportError as error:
        raise ImportError(f"{what} needs a package ({error}): pip install 'pliant[{extra}]'") from error
