"""Regenerate the blocks and figures of the documentation: `python -m benchmarks.reproduction`."""

from benchmarks.reproduction.documents import write_documents

write_documents()
