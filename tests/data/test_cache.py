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
    """Load from the cache at the same time as another process, and leave a mark file if this process decodes."""
    x, y = torch.arange(2 * 3 * 6 * 6, dtype=torch.uint8).view(2, 3, 6, 6), torch.arange(2)

    def decode() -> cache.Decoded:
        (marks / str(os.getpid())).touch()
        time.sleep(1)  # By now the other process has seen the empty cache.
        return (x, y), (x, y), ("cat", "dog")

    together.wait()
    assert torch.equal(cache.cached("slow", "1", decode).train.x, x)


@pytest.mark.usefixtures("own_cache")
class TestCache:
    def test_images_are_memory_mapped(self, tmp_path: Path, own_cache: Path) -> None:
        root = write_folder(tmp_path / "zoo")
        loaded = data.load(str(root))
        (entry,) = (path for path in own_cache.iterdir() if path.is_dir())
        file = (entry / "train.x").read_bytes()
        assert loaded.train.x.numpy().tobytes() == file
        assert str(entry / "train.x") in Path("/proc/self/maps").read_text()

    def test_writing_to_a_tensor_leaves_the_file_alone(self, tmp_path: Path, own_cache: Path) -> None:
        root = write_folder(tmp_path / "zoo")
        data.load(str(root)).train.x.zero_()
        assert data.load(str(root)).train.x.max() > 0

    def test_damaged_files_are_found(self, tmp_path: Path, own_cache: Path) -> None:
        root = write_folder(tmp_path / "zoo")
        data.load(str(root))
        (entry,) = (path for path in own_cache.iterdir() if path.is_dir())
        assert cache.check(entry) == []
        content = bytearray((entry / "test.x").read_bytes())
        content[5] ^= 1
        (entry / "test.x").write_bytes(content)
        (problem,) = cache.check(entry)
        assert "test.x: the content does not match its checksum" in problem
        (entry / "test.x").unlink()
        assert cache.check(entry) == [problem]

    @pytest.mark.parametrize("content", ["", "[]", '{"classes": ["cat"]}', '{"sha256": {}, "shapes": {}}'])
    def test_a_damaged_meta_file_is_found(self, tmp_path: Path, own_cache: Path, content: str) -> None:
        root = write_folder(tmp_path / "zoo")
        data.load(str(root))
        (entry,) = (path for path in own_cache.iterdir() if path.is_dir())
        (entry / "meta.json").write_text(content)
        (problem,) = cache.check(entry)
        assert "meta.json is damaged (" in problem

    def test_concurrent_processes_decode_once(self, tmp_path: Path, own_cache: Path) -> None:
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
