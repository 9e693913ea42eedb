"""How ranks share heads and context out."""

from __future__ import annotations

from dataclasses import dataclass

from indexer.distributed.stripe import Stripe
from kernel.checks import check_heads
from kernel.errors import InvalidArgumentError
from kernel.scalars import check_int


@dataclass(frozen=True)
class Division:
    """A rank's place: rank ``group * context_ranks + context_rank`` of ``head_groups * context_ranks``."""

    head_groups: int
    context_ranks: int
    """Ranks that the blocks of a sequence go round, in every head group."""
    context_rank: int
    heads: slice
    """Index heads that this rank scores."""

    @property
    def ranks(self) -> int:
        """Ranks of all head groups."""
        return self.head_groups * self.context_ranks

    @classmethod
    def of(cls, rank: int, ranks: int, num_heads: int, head_groups: int) -> Division:
        """The place of a rank.

        Raises:
            InvalidArgumentError: ``head_groups`` does not divide the heads or the ranks.
        """
        groups = check_int("head_groups", head_groups)
        for name, value in (("num_index_heads", num_heads), ("the number of ranks", ranks)):
            if groups < 1 or value % groups:
                raise InvalidArgumentError(
                    "head_groups", groups, f"must divide {name}, {value}", "use 1 to divide the context only"
                )
        heads = check_heads(num_heads // groups)
        group, context_rank = divmod(rank, ranks // groups)
        return cls(groups, ranks // groups, context_rank, slice(group * heads, (group + 1) * heads))

    def stripe(self, first_rank: int) -> Stripe:
        """What this rank holds of a sequence whose block 0 lies on context rank ``first_rank``."""
        return Stripe((self.context_rank - first_rank) % self.context_ranks, self.context_ranks)
