"""From text to batches: reading, subwords, the indexed corpus, and the order in which training goes through it."""

from tamis.data.batching import Batch, Position, Prefetcher, Updates, collate, padded_share, split_batch
from tamis.data.corpus import Limits, ParallelCorpus, build_corpus
from tamis.data.indexed import Report
from tamis.data.text import BadLine, Pair, read_lines, read_pairs
from tamis.data.vocabulary import Vocabulary

__all__ = [
    "BadLine",
    "Batch",
    "Limits",
    "Pair",
    "ParallelCorpus",
    "Position",
    "Prefetcher",
    "Report",
    "Updates",
    "Vocabulary",
    "build_corpus",
    "collate",
    "padded_share",
    "read_lines",
    "read_pairs",
    "split_batch",
]
