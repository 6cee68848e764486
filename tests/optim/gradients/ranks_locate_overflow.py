"""One of three ranks over gloo: where overflows were, by cases of test_locate_overflow.py.

Arguments: rank, file for the rendezvous, cases as JSON: what each rank of a group saw.
"""

import json
import sys

import torch.distributed as dist

from megalowbit.optim.gradients.locate_overflow import RankOverflow, locate_overflow

WORLD = 3
rank, cases = int(sys.argv[1]), json.loads(sys.argv[3])
dist.init_process_group("gloo", init_method=f"file://{sys.argv[2]}", rank=rank, world_size=WORLD)
groups = {size: dist.new_group(range(size)) for size in (1, 2, 3)}
found = {}
for name, of_ranks in cases.items():
    if rank < len(of_ranks):
        positions, is_own, prefix = of_ranks[rank]
        own = RankOverflow(
            rank=rank, tensors=[(place, f"{prefix}{place}") for place in positions], num_gradients=9,
            is_own=is_own,
        )  # fmt: skip
        place = locate_overflow(own, groups[len(of_ranks)])
        found[name] = place and [place.tensor, place.rank, place.num_tensors, list(place.ranks), str(place)]
print(json.dumps(found))
dist.destroy_process_group()
