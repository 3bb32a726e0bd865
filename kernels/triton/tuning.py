"""Tile shapes, chosen by head size, element size and architecture so that nothing spills.

They are choices by register and shared-memory use as `compile_check` lists them, not by time: none
was tuned on a GPU yet.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Tile:
    """Query rows and keys per step of the inner loop, and how the program is compiled."""

    rows: int
    keys: int
    num_warps: int
    num_stages: int


STAGES = 5
"""The address of a tile of keys comes from the page table, itself loaded: with that in front, five
stages are what it takes to have two tiles on their way while a third is worked on."""


def decode_tile(padded_dim: int, group: int, itemsize: int) -> Tile:
    """For single tokens: all query heads of a kv head are the rows. `itemsize` is that of the
    activations in bytes."""
    rows = max(16, 1 << (group - 1).bit_length())
    if itemsize == 4:
        return Tile(rows, 16, 8, 2) if padded_dim > 128 else Tile(rows, 32, 4, 2)
    return Tile(rows, 32 if padded_dim > 128 or rows > 32 else 64, 4, STAGES)


def prefill_tile(padded_dim: int, group: int, itemsize: int, coded: bool, capability: int) -> Tile:
    """For many rows. `coded`: pages hold 8-bit codes, which take registers to widen; `capability`
    is 10 · major + minor."""
    least = max(16, 1 << (group - 1).bit_length())
    if itemsize == 4:
        return Tile(least, 16, 8, 2) if padded_dim > 128 else Tile(least, 32, 4, 2)
    if padded_dim <= 64:
        if coded and capability < 90:
            return Tile(max(64, least), 32, 4, 3)
        return Tile(max(64, least), 64, 4, STAGES)
    if padded_dim <= 128:
        if capability >= 90:
            return Tile(max(128, least), 64, 8, STAGES)
        return Tile(max(64, least), 64, 8, STAGES) if coded else Tile(max(64, least), 32, 4, STAGES)
    if capability >= 90:
        return Tile(max(64, least), 32, 8, STAGES)
    return Tile(max(64, least), 16 if coded else 32, 8, 3)
