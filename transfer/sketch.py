"""How often each key was seen of late, in memory that does not grow with the number of keys. Pure.

Count-min sketch (Cormode and Muthukrishnan, 2005) with conservative update (Estan and Varghese, SIGCOMM'02).
"""

from __future__ import annotations

import array
import hashlib
import struct
import sys

from transfer.errors import InvalidValue

MAX_COUNT = 65_535
MAX_DEPTH = 16


class CountMin:
    """Deterministic: places are read off the key's own hash, equal in every process.

    Estimates are too high only where keys collide in every row, and too low only beyond MAX_COUNT and by what age()
    rounded off. 2 * width * depth bytes.
    """

    def __init__(self, width: int = 16_384, depth: int = 4) -> None:
        """width: counters of a row, a power of two. Raises InvalidValue for sizes that cannot work."""
        if width < 1 or width & (width - 1) or width > 1 << 32 or not 1 <= depth <= MAX_DEPTH:
            raise InvalidValue(
                f"a sketch of {depth} rows of {width} cannot work: take 1 to {MAX_DEPTH} rows, of a power of two each"
            )
        self._rows = tuple(array.array("H", bytes(2 * width)) for _ in range(depth))
        self._mask = width - 1
        self._places = struct.Struct(f"<{depth}I").unpack
        self._digest_bytes = 4 * depth

    def add(self, key: bytes) -> int:
        """Count it once more; returns the new estimate."""
        mask = self._mask
        if len(self._rows) == 4:  # as below, for what is counted most
            (a, b, c, d), (i, j, k, n) = self._rows, self._hashed(key)
            i, j, k, n = i & mask, j & mask, k & mask, n & mask
            one, two, three, four = a[i], b[j], c[k], d[n]
            count = min(one, two, three, four)
            if count < MAX_COUNT:
                more = count + 1
                if one == count:
                    a[i] = more
                if two == count:
                    b[j] = more
                if three == count:
                    c[k] = more
                if four == count:
                    d[n] = more
                return int(more)
            return int(count)
        places = self._hashed(key)
        cells = [(row, place & mask) for row, place in zip(self._rows, places, strict=True)]
        counts = [row[place] for row, place in cells]
        count = min(counts)
        if count < MAX_COUNT:
            for (row, place), seen in zip(cells, counts, strict=True):
                if seen == count:  # conservative: those above it keep their count
                    row[place] = seen + 1
            count += 1
        return count

    def estimate(self, key: bytes) -> int:
        mask = self._mask
        return min([row[place & mask] for row, place in zip(self._rows, self._hashed(key), strict=True)])

    def age(self) -> None:
        """Halve every count, rounding down, so that what was often seen long ago is forgotten."""
        for row in self._rows:
            # All counters of the row as one number: shifted right by a bit, less the bits that came from a neighbour.
            halved = int.from_bytes(row.tobytes(), sys.byteorder) >> 1
            lowest = int.from_bytes(array.array("H", [MAX_COUNT >> 1]).tobytes() * len(row), sys.byteorder)
            row[:] = array.array("H", (halved & lowest).to_bytes(2 * len(row), sys.byteorder))

    def _hashed(self, key: bytes) -> tuple[int, ...]:
        return self._places(hashlib.blake2b(key, digest_size=self._digest_bytes).digest())
