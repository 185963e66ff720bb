"""The cache of decoded data."""

import multiprocessing
import os
import time
from multiprocessing.synchronize import Barrier
from pathlib import Path

import pytest
import torch

from pliant import data
from pliant.data import cache
from tests.data.pictures import write_folder


def decode_slowly(marks: Path, together: Barrier) -> None:
    """Ask the cache for data together with another process, and leave a mark if it is decoded here."""
    x, y = torch.arange(2 * 3 * 6 * 6, dtype=torch.uint8).view(2, 3, 6, 6), torch.arange(2)

    def decode() -> cache.Decoded:
        (marks / str(os.getpid())).touch()
        time.sleep(1)  # The other one has seen by now that nothing is in the cache.
        return (x, y), (x, y), ("cat", "dog")

    together.wait()
    assert torch.equal(cache.cached("slow", "1", decode).train.x, x)


@pytest.mark.usefixtures("own_cache")
class TestCache:
    def test_images_are_mapped_not_read(self, tmp_path: Path, own_cache: Path) -> None:
        root = write_folder(tmp_path / "zoo")
        loaded = data.load(str(root))
        (entry,) = (path for path in own_cache.iterdir() if path.is_dir())
        file = (entry / "train.x").read_bytes()
        assert loaded.train.x.numpy().tobytes() == file
        assert str(entry / "train.x") in Path("/proc/self/maps").read_text()

    def test_a_tensor_cannot_change_the_file(self, tmp_path: Path, own_cache: Path) -> None:
        root = write_folder(tmp_path / "zoo")
        data.load(str(root)).train.x.zero_()
        assert data.load(str(root)).train.x.max() > 0

    def test_damage_is_found(self, tmp_path: Path, own_cache: Path) -> None:
        root = write_folder(tmp_path / "zoo")
        data.load(str(root))
        (entry,) = (path for path in own_cache.iterdir() if path.is_dir())
        assert cache.check(entry) == []
        content = bytearray((entry / "test.x").read_bytes())
        content[5] ^= 1
        (entry / "test.x").write_bytes(content)
        (problem,) = cache.check(entry)
        assert "test.x: the content is not what was decoded" in problem
        (entry / "test.x").write_bytes(content[:-1])
        with pytest.raises(ValueError, match=r"test\.x has the wrong size; delete"):
            data.load(str(root))
        (entry / "test.x").unlink()
        assert cache.check(entry) == [problem]
        with pytest.raises(ValueError, match=r"test\.x has the wrong size; delete"):
            data.load(str(root))

    @pytest.mark.parametrize("content", ["", "[]", '{"classes": ["cat"]}', '{"sha256": {}, "shapes": {}}'])
    def test_a_list_of_files_that_is_damaged_is_found(self, tmp_path: Path, own_cache: Path, content: str) -> None:
        root = write_folder(tmp_path / "zoo")
        data.load(str(root))
        (entry,) = (path for path in own_cache.iterdir() if path.is_dir())
        (entry / "meta.json").write_text(content)
        (problem,) = cache.check(entry)
        assert "meta.json: cannot be understood; delete" in problem
        with pytest.raises(ValueError, match=r"meta\.json: cannot be understood; delete"):
            data.load(str(root))

    def test_processes_that_start_together_decode_once(self, tmp_path: Path, own_cache: Path) -> None:
        marks = tmp_path / "marks"
        marks.mkdir()
        context = multiprocessing.get_context("spawn")
        together = context.Barrier(2, timeout=300)
        processes = [context.Process(target=decode_slowly, args=(marks, together)) for _ in range(2)]
        for process in processes:
            process.start()
        for process in processes:
            process.join(600)
        assert [process.exitcode for process in processes] == [0, 0]
        assert len(list(marks.iterdir())) == 1
        assert [path.suffix for path in own_cache.iterdir() if path.is_dir()] == [""]
