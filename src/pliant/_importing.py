"""Import the user's objects by `module:name` or `path/to/file.py:name`, and name missing extras."""

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
    """Import the object that a reference names; the global random generators keep their states.

    Args:
        reference: `package.module:name`, or `path/to/file.py:name`. Modules are also looked for in the
            current folder.

    Returns:
        The object.

    Raises:
        ValueError: If the reference has another form, does not exist, or is not valid Python.

    Example:
        >>> import_object("math:pi")
        3.141592653589793
    """
    module_name, colon, name = reference.rpartition(":")
    if not (colon and module_name and name):
        raise ValueError(f"{reference!r} must be of the form module:name or path/to/file.py:name")
    with contextlib.suppress(ImportError):
        importlib.import_module("numpy.random")  # Else `undrawn` misses its generator if the module imports it first.
    try:
        with undrawn():  # A module may seed; only the first run of a process imports it.
            module = _import_file(Path(module_name)) if module_name.endswith(".py") else _import_module(module_name)
    except SyntaxError as error:
        raise ValueError(f"{reference!r} is not valid Python: {error}") from error
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
        # If the module exists but one of its own imports is missing, that error stands.
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
    # Pickle looks up classes by their module.
    sys.modules[name] = module
    with _first(path.parent):
        spec.loader.exec_module(module)
    return module


_FOLDERS: set[Path] = set()
"""Folders that the user's modules were imported from."""


@contextlib.contextmanager
def _first(folder: Path) -> Iterator[None]:
    """Put a folder first on the import path, and drop loaded modules of the same names from other user folders.

    Afterwards the folder is last on the path, so that a `json.py` beside a network cannot break workers.
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
    """Describe in one line what the user's code raised, and where.

    Example:
        >>> try:
        ...     1 / 0
        ... except ZeroDivisionError as error:
        ...     tell_failure(error).partition(" (")[0]
        'ZeroDivisionError: division by zero'
    """
    *_, (frame, line) = traceback.walk_tb(error.__traceback__)
    return f"{type(error).__name__}: {error} ({frame.f_code.co_filename}, line {line})"


def find_missing(*modules: str) -> list[str]:
    """Return the modules that are not installed.

    Example:
        >>> find_missing("torch", "no_such_package")
        ['no_such_package']
    """
    return [name for name in modules if importlib.util.find_spec(name) is None]


@contextlib.contextmanager
def naming_extra(what: str, extra: str) -> Iterator[None]:
    """Turn an ImportError into an ImportError that names the extra to install.

    Args:
        what: The feature that needs the package.
        extra: The extra of Pliant that installs it.

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
