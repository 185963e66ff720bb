"""Write the documentation's generated blocks and figures anew: `python -m benchmarks.reproduction`."""

from benchmarks.reproduction.documents import write_documents

write_documents()
