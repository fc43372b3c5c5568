"""In how many ways a recipe divides a model over ranks, beside sharding."""

from dataclasses import dataclass

from trainkit.recipe.schema import Fsdp, GptModel, Recipe
from trainkit.text import pluralize

HYBRID = ("hybrid_shard", "hybrid_shard_zero2")  # of strategy.sharding


@dataclass(frozen=True, slots=True)
class GridSizes:
    """How many copies of the model there are, and over how many ranks experts, samples and matrices are shared out."""

    copies: int = 1
    experts: int = 1
    context: int = 1
    tensor: int = 1

    @property
    def alike(self) -> int:
        """How many ranks compute the same samples."""
        return self.context * self.tensor

    def words(self, ranks: int) -> str:
        """What so many ranks have."""
        shards = ranks // (self.copies * self.tensor)
        sharded = pluralize(shards, "shard")
        found = [f"{self.copies} copies of the model, in {sharded} each" if self.copies > 1 else sharded]
        found += [f"samples in {self.context} parts"] if self.context > 1 else []
        found += [f"matrices in {self.tensor} parts"] if self.tensor > 1 else []
        found += [f"experts shared out over {self.experts} ranks"] if self.experts > 1 else []
        return ", ".join(found)

    @property
    def divides_blocks(self) -> bool:
        """Whether ranks have parts of what a block computes."""
        return max(self.experts, self.context, self.tensor) > 1

    @property
    def several(self) -> bool:
        """Whether ranks have more dimensions than that of shards."""
        return self != GridSizes()


def grid_sizes(recipe: Recipe) -> GridSizes:
    """Of a recipe whose `strategy.replicate` is decided, for the built-in trainer."""
    asked, model = recipe.strategy, recipe.model
    if not isinstance(asked, Fsdp):
        return GridSizes()
    copies = (asked.replicate or 1) if asked.sharding in HYBRID else 1
    experts = model.moe.parallel if isinstance(model, GptModel) else 1
    return GridSizes(copies, experts, asked.context, asked.tensor)
