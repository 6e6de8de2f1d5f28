"""How many rows are cut in pieces: the cheapest cover by the sizes that there are."""

from __future__ import annotations

import math
from collections.abc import Sequence

MAX_PIECES = 16


class Cover:
    """The cheapest ways to serve any number of rows by pieces of these sizes.

    A dynamic programme over the rows left, kept and extended when more rows are asked for. On a tie
    the fewest pieces.

    Args:
        rows: the rows of each size, ascending.
        costs: the cost of one piece of each size.
        overhead: the cost of each piece after the first.

    Example:
        >>> Cover([8, 16], [8.0, 16.0], 0.0).chosen(20)
        [1, 0]
    """

    def __init__(self, rows: Sequence[int], costs: Sequence[float], overhead: float) -> None:
        self._rows, self._costs, self._overhead = rows, costs, overhead
        self._best: list[tuple[float, int, int]] = [(-overhead, 0, -1)]  # cost, count, last size

    def chosen(self, total: int) -> list[int]:
        """The sizes that serve `total` rows, by their index, largest first; at most 16.

        Empty if 16 pieces do not hold them.
        """
        found = self._cheapest(total)
        if len(found) > MAX_PIECES:
            found = self._cheapest_of_few(total)
        return sorted(found, key=lambda i: -self._rows[i])

    def cost(self, chosen: Sequence[int]) -> float:
        """What these pieces cost together."""
        return sum(self._costs[i] for i in chosen) + self._overhead * (len(chosen) - 1)

    def _cheapest(self, total: int) -> list[int]:
        best = self._best
        for left in range(len(best), total + 1):
            options = []
            for i, (rows, price) in enumerate(zip(self._rows, self._costs, strict=True)):
                cost, count, _ = best[max(0, left - rows)]
                options.append((cost + price + self._overhead, count + 1, i))
            best.append(min(options))
        found, left = [], total
        while left > 0:
            found.append(best[left][2])
            left -= self._rows[found[-1]]
        return found

    def _cheapest_of_few(self, total: int) -> list[int]:
        """A table for each count of pieces."""
        costs = [cost + self._overhead for cost in self._costs]
        tables: list[list[tuple[float, int]]] = [[(0.0, -1)] + [(math.inf, -1)] * total]
        for _ in range(MAX_PIECES):
            table: list[tuple[float, int]] = [(0.0, -1)]
            for left in range(1, total + 1):
                rest = (tables[-1][max(0, left - rows)][0] for rows in self._rows)
                options = (c + r for c, r in zip(costs, rest, strict=True))
                table.append(min((cost, i) for i, cost in enumerate(options)))
            tables.append(table)
        least = tables[-1][total][0]
        if least == math.inf:
            return []
        fewest = next(k for k, table in enumerate(tables) if table[total][0] == least)
        found, left = [], total
        for table in reversed(tables[1 : fewest + 1]):
            if left > 0:
                found.append(table[left][1])
                left -= self._rows[found[-1]]
        return found
