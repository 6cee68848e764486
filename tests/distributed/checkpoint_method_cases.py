"""Cases of ranks_reshape.py: DeepSpeed's own save and load, and loads that fail on one rank alone."""

import errno

import checkpoint_cases
import torch
import torch.distributed as dist

from megalowbit.engine.checkpoints.store import CheckpointStore
from megalowbit.errors import UserError
from megalowbit.layers.conversion.convert import random_stream

FAILING = {0: "mp_rank_00_model_states", 1: "zero_pp_rank_0", 3: "zero_pp_rank_0"}


def run_all(folder, make_engine, train):
    """What each case saw on this rank, by name."""
    found = {}
    for stage in (0, 1, 3):
        engine = make_engine(stage, seed=1)
        train(engine, range(2))
        own = folder / f"methods{stage}"
        engine.save_checkpoint(str(own), tag="t", client_state={"note": stage})
        path = CheckpointStore(folder / f"unreadable{stage}").save(engine, 2, {})
        after = train(engine, range(2, 4))
        engine.destroy()
        engine = make_engine(stage, seed=2)
        store = CheckpointStore(path.parent)
        found[f"unreadable {stage}"] = failure(stage, store.load, engine, path)
        engine.destroy()
        engine = make_engine(stage, seed=2)
        _, state = engine.load_checkpoint(str(own))
        found[f"same {stage}"] = [state, train(engine, range(2, 4)) == after]
        engine.destroy()
    found["stream"] = continue_drawing(folder / "drawn")
    engine = make_engine(2, seed=2)
    found["another stage"] = engine.load_checkpoint(str(folder / "methods3"))[1]
    engine.destroy()
    for name, stage, damage in (("swapped", 1, swap), ("truncated", 3, truncate)):
        dist.barrier()
        if dist.get_rank() == 0:
            damage(folder / f"methods{stage}" / "t")
        dist.barrier()
        engine = make_engine(stage, seed=2)
        found[name] = failure(None, engine.load_checkpoint, str(folder / f"methods{stage}"), "t")
        engine.destroy()
    engine = make_engine(0, seed=2)
    found["tags"] = failure(None, engine.save_checkpoint, str(folder / "tags"), f"t{dist.get_rank()}")
    found["load tags"] = failure(
        None, engine.load_checkpoint, str(folder / "methods0"), ["t", "u"][dist.get_rank()]
    )
    found["no tag"] = failure(None, engine.save_checkpoint, str(folder / "tags"), ["t", ""][dist.get_rank()])
    state = [{"note": 1}, 7][dist.get_rank()]
    found["no state"] = failure(None, CheckpointStore(folder / "tags").save, engine, 1, state)
    dist.barrier()  # rank 0 has removed what was begun
    found["left"] = sorted(path.name for path in (folder / "tags").iterdir())
    engine.destroy()
    return found


def continue_drawing(folder):
    """Whether a run whose gradients are rounded stochastically continues bit for bit."""
    engine = checkpoint_cases.build("nvfp4 1", 1)
    checkpoint_cases.train(engine, range(3))
    engine.save_checkpoint(str(folder), tag="t")
    after = train_on(engine)
    engine.destroy()
    engine = load_drawn(folder)
    same = train_on(engine) == after
    engine.destroy()
    return same


def train_on(engine):
    """Three further steps, with the same dropout each time: the method leaves torch's generator alone."""
    torch.manual_seed(3)
    return checkpoint_cases.train(engine, range(3, 6))


def load_drawn(folder):
    """An engine of the present number of ranks that has loaded what `continue_drawing` saved."""
    engine = checkpoint_cases.build("nvfp4 1", 2)
    engine.load_checkpoint(str(folder), "t")
    return engine


def position_of(engine):
    """How many micro-batches the layers have drawn for."""
    return random_stream(engine.module).step


def failure(unreadable_stage, work, *its_arguments):
    """The line that `work` ends with; rank 0 cannot read one of its files, if a stage is given."""
    real = torch.load

    def load(path, *arguments, **named):
        if FAILING[unreadable_stage] in str(path) and not named.get("mmap"):
            raise OSError(errno.EIO, "Input/output error")
        return real(path, *arguments, **named)

    if unreadable_stage is not None and dist.get_rank() == 0:
        torch.load = load
    try:
        work(*its_arguments)
    except (UserError, TypeError, RuntimeError) as error:
        return str(error)
    finally:
        torch.load = real
    return "nothing failed"


def swap(folder):
    """Two ranks' optimizer files change names."""
    one, other = sorted(folder.glob("zero_pp_rank_*_optim_states.pt"))
    contents = one.read_bytes(), other.read_bytes()
    one.write_bytes(contents[1])
    other.write_bytes(contents[0])


def truncate(folder):
    """The second rank's optimizer file ends in its middle."""
    file = folder / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    file.write_bytes(file.read_bytes()[:1000])
