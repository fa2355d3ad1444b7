"""Pairs to retrieve: the parquet schema, reading and writing."""

from rlcompute.data.schema import MODALITIES, PAIR_SCHEMA, Pair, PairSet, Side, read_pairs, write_pairs

__all__ = ["MODALITIES", "PAIR_SCHEMA", "Pair", "PairSet", "Side", "read_pairs", "write_pairs"]
