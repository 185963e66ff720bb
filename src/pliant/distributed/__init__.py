"""What the ranks of one training run share: seeds, settings, statistics of units, and shards of parameters.

Every rank runs the same code. `Method.attach` and `Method.apply` are collective: all ranks call them, in the same
order. There the ranks agree on a seed, and check that they hold the same parameters, state and settings. In a step,
only statistics of the batch are exchanged. A single process exchanges nothing.

Under `fully_shard` and `parallelize_module`, each rank holds a shard of each parameter. While a method acts, plain
parameters stand in for them in the model (`Shards`): this rank's shards for a formula that holds entry by entry, whole
parameters for any other. So a method is written as for one process.
"""

from pliant.distributed.ranks import (
    Group,
    broadcast_,
    call_on_first,
    check_not_flat,
    check_same,
    find_group,
    gather_rows,
    iterate_together,
    merge_over_ranks,
    rank_count,
    rank_in,
    share_first,
    share_seed,
    sum_over_ranks,
    unwrap_model,
)
from pliant.distributed.shards import (
    add_whole,
    as_shard,
    as_sharded,
    data_group,
    gather_whole,
    group_of,
    has_shards,
    held,
    is_shard,
    is_sharded,
    largest_of_shards,
    local,
    own_part,
    own_rows_and_columns,
    splits_inputs,
    splits_units,
    sum_shards,
    whole_norms,
    whole_of,
)
from pliant.distributed.stand_ins import Shards, whole_model

__all__ = [
    "Group",
    "Shards",
    "add_whole",
    "as_shard",
    "as_sharded",
    "broadcast_",
    "call_on_first",
    "check_not_flat",
    "check_same",
    "data_group",
    "find_group",
    "gather_rows",
    "gather_whole",
    "group_of",
    "has_shards",
    "held",
    "is_shard",
    "is_sharded",
    "iterate_together",
    "largest_of_shards",
    "local",
    "merge_over_ranks",
    "own_part",
    "own_rows_and_columns",
    "rank_count",
    "rank_in",
    "share_first",
    "share_seed",
    "splits_inputs",
    "splits_units",
    "sum_over_ranks",
    "sum_shards",
    "unwrap_model",
    "whole_model",
    "whole_norms",
    "whole_of",
]
