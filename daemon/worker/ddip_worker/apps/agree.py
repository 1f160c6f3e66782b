# SPDX-License-Identifier: Apache-2.0
"""What ranks must have in common before they train together, and how a difference is told.

Everything here is collective: each rank calls it at the same place, and all raise or none does.
"""

import hashlib
import numbers
from pathlib import PurePath

import numpy as np
import torch
import torch.distributed as dist

ITEMS_SAMPLED = 1000


class RanksDiffer(RuntimeError):
    """The same on every rank: names what differs, and on which."""


def check(things):
    """Compares (name, value) of what must be the same, of numbers and lists of text."""
    mine = dict(things)
    every = gather({name: _digest(value) for name, value in mine.items()})
    differ = [name for name in mine if any(one.get(name) != every[0][name] for one in every)]
    if differ or any(len(one) != len(every[0]) for one in every):
        full = gather({name: mine[name] for name in differ})
        raise RanksDiffer(_report(differ, full))


def share_optimizer(opt, load):
    """An optimizer whose state differs, after a fit that was stopped say, gets rank 0's."""
    sums = gather([repr(float(t.double().sum())) for t in _tensors(opt.state_dict())])
    if any(one != sums[0] for one in sums):
        load(from_rank_0(copied(opt.state_dict())))


def copied(state):
    """A copy on the CPU of a state dict, nested as those of optimizers are."""
    return moved(state, "cpu")


def moved(state, device):
    """A copy of a state dict with its tensors on the device."""
    if isinstance(state, torch.Tensor):
        return state.detach().to(device, copy=True)
    if isinstance(state, dict):
        return {key: moved(value, device) for key, value in state.items()}
    if isinstance(state, list) or _is_l(state):
        return type(state)([moved(value, device) for value in state])
    return state


def share_buffers(model):
    """Rank 0's buffers on all ranks, those of one kind at once."""
    kinds = {}
    for buffer in model.buffers():
        kinds.setdefault((buffer.dtype, buffer.device), []).append(buffer)
    for buffers in kinds.values():
        flat = torch.cat([buffer.detach().flatten() for buffer in buffers])
        dist.broadcast(flat, 0)
        for buffer, values in zip(buffers, flat.split([b.numel() for b in buffers]), strict=True):
            buffer.detach().copy_(values.view_as(buffer))


def gather(value):
    """Each rank's value, a list by rank."""
    every = [None] * dist.get_world_size()
    dist.all_gather_object(every, value)
    return every


def from_rank_0(value):
    """Rank 0's value, on every rank."""
    shared = [value]
    dist.broadcast_object_list(shared, src=0)
    return shared[0]


def numbers_from_rank_0(numbers):
    """Rank 0's list of whole numbers, which may be long."""
    where = "cpu" if dist.get_backend() == "gloo" else torch.cuda.current_device()
    count = torch.tensor(len(numbers), device=where)
    dist.broadcast(count, 0)
    if count != len(numbers):
        numbers = [0] * count.item()
    sent = torch.tensor(numbers, dtype=torch.int64, device=where)
    dist.broadcast(sent, 0)
    return sent.tolist()


# --- how things are described to check() ----------------------------------------------------------


def length(dataset):
    try:
        return len(dataset)
    except TypeError:
        return None


def parameters(model):
    return [f"{n} {list(p.shape)} {p.requires_grad}" for n, p in model.named_parameters()]


def sample(items):
    """Some of the items, as text, if they are of a kind that is written the same everywhere."""
    if hasattr(items, "index") and hasattr(items, "columns"):  # a DataFrame: its rows' names
        items = items.index
    try:
        step = max(1, len(items) // ITEMS_SAMPLED)
        some = [items[i] for i in range(0, len(items), step)]
    except Exception:
        return None
    texts = [_text(item) for item in some]
    return None if None in texts else texts


def _text(item):
    if isinstance(item, np.ndarray) and item.size <= ITEMS_SAMPLED:
        return str(item.tolist())
    return str(item) if isinstance(item, (str, PurePath, numbers.Number)) else None


def words(vocab):
    """A vocabulary, or several, as one list of words."""
    if vocab is None:
        return None
    if isinstance(vocab, dict):
        return [f"{key}: {word}" for key, some in vocab.items() for word in words(some) or ()]
    if isinstance(vocab, str) or not hasattr(vocab, "__iter__"):
        return [str(vocab)]
    nested = [word for word in vocab if not isinstance(word, str) and hasattr(word, "__iter__")]
    return [w for some in vocab for w in (words(some) if nested else [str(some)])]


def _digest(value):
    return hashlib.sha256(repr(value).encode()).hexdigest()


def _report(differ, every):
    lines = ["the ranks do not train the same thing, so nothing was trained:"]
    for name in differ:
        values = [one[name] for one in every]
        lines.append(f"  {name}: {_difference(values)}")
    lines.append(
        "make data and model by the same code on all ranks; what is made at random needs a cell "
        "that runs on all of them, or a seed"
    )
    return "\n".join(lines)


def _difference(values):
    if not all(isinstance(value, list) for value in values):
        return ", ".join(f"{value} on rank {rank}" for rank, value in enumerate(values))
    other = next(rank for rank, value in enumerate(values) if value != values[0])
    parts = [f"{len(value)} on rank {rank}" for rank, value in enumerate(values)]
    for one, rest in ((0, other), (other, 0)):
        only = sorted(set(values[one]) - set(values[rest]))
        if only:
            shown = ", ".join(only[:5]) + (", ..." if len(only) > 5 else "")
            parts.append(f"only rank {one} has {shown}")
    if len(parts) == len(values):
        parts.append("the same, in another order")
    return "; ".join(parts)


def _tensors(state):
    if isinstance(state, torch.Tensor):
        yield state
    elif isinstance(state, dict):
        for value in state.values():
            yield from _tensors(value)
    elif isinstance(state, (list, tuple)) or _is_l(state):
        for value in state:
            yield from _tensors(value)


def _is_l(state):
    """fastai 2 has a list of its own kind."""
    return type(state).__name__ == "L"
