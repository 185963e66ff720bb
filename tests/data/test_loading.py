"""`pliant.data.load` finds data by name, path or function."""

from pathlib import Path

import pytest

from pliant import data
from tests.data.pictures import write_folder

pytestmark = pytest.mark.usefixtures("own_cache")


def test_unknown_names_get_a_suggestion(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="did you mean 'cifar10'"):
        data.load("cifar-10")
    (tmp_path / "file.csv").touch()
    with pytest.raises(ValueError, match=r"is neither a folder nor an \.npz file"):
        data.load(str(tmp_path / "file.csv"))
    with pytest.raises(ValueError, match="there is no 'sise'; did you mean 'size'"):
        data.load(str(tmp_path), sise=3)


def test_a_built_in_name_wins_over_a_local_folder_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert data.tell_namesake("digits") is None
    write_folder(tmp_path / "digits")
    assert len(data.load("digits").classes) == 10
    assert data.load("./digits").classes == ("cat", "dog", "owl")
    assert data.tell_namesake("digits").endswith("write './digits' for the local folder")
    assert data.tell_namesake("./digits") is None
    (tmp_path / "digits" / "recipe.json").touch()
    assert data.tell_namesake("digits") is None, "the folder of an experiment"


def test_an_existing_path_with_a_colon_is_not_a_function(tmp_path: Path) -> None:
    root = write_folder(tmp_path / "2026-11-16T10:00")
    assert data.load(str(root), size=5).shape == (3, 5, 5)
    assert data.options(str(root)) == data.options(str(write_folder(tmp_path / "zoo")))
