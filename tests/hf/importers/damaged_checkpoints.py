"""Checkpoints of DeepSpeed and Megatron-LM, each damaged in one random way.

`damage_deepspeed` and `damage_megatron` change a folder in place and return a description of what they did.
Nothing is damaged that only the damaged part describes, because the result is then another valid checkpoint:

- a pickle, tensor or argument that is written again goes into one rank's file, and another rank has its own;
- files of ranks change places only at ZeRO 2, where the model's half-precision weights disagree. ZeRO 3 and
  Megatron-LM's weights do not say which rank they are of;
- descriptions that start with `anything:` may give other weights. They must still give a checkpoint or an
  error of one line: bytes of the pickle under a fitting checksum, files in the format before torch 1.6, and
  tensors of other values.
"""

import argparse
import warnings
import zipfile

import torch
from damaged_folders import GARBAGE, Harmful, damage_bytes, damage_file, damage_json, damage_weight_bytes
from damaged_folders import damage_any_byte as damage_any_bit

UNREAD = ("exp_avg.pt", "exp_avg_sq.pt", "step.pt", "optimizer_state.pt")  # of universal checkpoints
CONFIG = "config.json"
ANYTHING = "anything: "
TEXTS = ("", "12", "13", "global_step4", "release", "../run", "..", ".", "/", "9" * 5000, "9" * 300, "\0",
         "é" * 300, "²", "-1")  # fmt: skip
ARCHIVE_KINDS = ("drop", "twice", "rename", "pack", "cut", "longer", "big", "swap", "byte of a header")


def containers_in(value, keys=()):
    """Paths of all dictionaries and lists, the attributes of arguments included."""
    inner = vars(value) if isinstance(value, argparse.Namespace) else value
    if isinstance(inner, (dict, list)):
        yield keys, inner
        for key in inner if isinstance(inner, dict) else range(len(inner)):
            yield from containers_in(inner[key], (*keys, key))


def damage_content(path, random):
    """One value is garbage, harmful, or gone."""
    root = {"content": torch.load(path, weights_only=False)}
    keys, parent = random.choice([each for each in containers_in(root) if each[1]])
    key = random.choice(list(parent) if isinstance(parent, dict) else range(len(parent)))
    garbage = random.choice((*GARBAGE, Harmful(), torch.tensor(5), torch.float16, {"a"}, (1, (2,)), 1j, b"x"))
    if isinstance(parent, dict) and parent is not root and random.random() < 0.3:
        del parent[key]
        garbage = "removed"
    else:
        parent[key] = garbage
    torch.save(root["content"], path)
    return f"{path.name}: {'.'.join(map(str, (*keys, key)))} = {str(garbage)[:40]}"


def damage_tensor(path, random):
    """One tensor has another shape, dtype, layout, name, or values that are not finite."""
    content = torch.load(path, weights_only=False)
    places = [
        (parent, key)
        for _, parent in containers_in(content)
        for key in (parent if isinstance(parent, dict) else range(len(parent)))
        if isinstance(parent[key], torch.Tensor) and parent[key].numel() > 1
    ]
    if not places:
        return damage_content(path, random)
    parent, key = random.choice(places)
    value = parent[key].detach()
    kinds = {
        "flat": lambda: value.reshape(1, -1),
        "wider": lambda: torch.cat([value, value]),
        "shorter": lambda: value[:-1].clone(),
        "dtype": lambda: value.to(
            random.choice((torch.int8, torch.bool, torch.float16, torch.complex64, torch.float8_e5m2))
        ),
        "wide": lambda: value.double(),
        "not contiguous": lambda: torch.stack([value, value], dim=-1)[..., 0],
        "backwards": lambda: value.t().contiguous().t() if value.ndim == 2 else value.view(-1)[:],
        "view": lambda: torch.cat([value.new_zeros(5), value.flatten(), value.new_zeros(5)])[5:-5].view(
            value.shape
        ),
        "expanded": lambda: value.view(-1)[:1].expand(value.shape),
        "sparse": value.to_sparse,
        "meta": lambda: value.to("meta"),
        "nan": lambda: value.clone().view(-1).index_fill_(0, torch.tensor(1), float("nan")).view(value.shape),
        "negated": lambda: torch.complex(value.float(), -value.float()).conj().imag,
        "empty": lambda: value[:0].clone(),
        "parameter": lambda: torch.nn.Parameter(value.float()),
    }
    kind = random.choice(sorted(kinds))
    if isinstance(parent, dict) and isinstance(key, str) and random.random() < 0.15:
        kind, name = "renamed", random.choice((f"{key}s", f"module.{key}", 5, "x", key.replace("0", "1", 1)))
        parent[name] = parent.pop(key)
    else:
        parent[key] = kinds[kind]()
    torch.save(content, path)
    # an expanded tensor has other values of the right shape
    return f"{ANYTHING * (kind == 'expanded')}{path.name}: {key} {kind}"


def damage_archive(path, random):
    """Records that are gone, twice there, renamed, compressed, or not what their headers say."""
    with zipfile.ZipFile(path) as archive:
        infos = archive.infolist()
        records = [(info.filename, archive.read(info)) for info in infos]
    kind = random.choice(ARCHIVE_KINDS)
    number = random.randrange(len(records))
    name, content = records[number]
    if kind == "byte of a header":
        data, place = bytearray(path.read_bytes()), infos[number].header_offset + random.randrange(30)
        data[place] ^= 1 << random.randrange(8)
        path.write_bytes(data)
        return f"{path.name}: {kind} {place} of {name}"
    if kind == "drop":
        del records[number]
    elif kind == "twice":
        records.append((name, content + b"x"))
    elif kind == "rename":
        records[number] = (name + "1", content)
    elif kind == "cut":
        records[number] = (name, content[:-1])
    elif kind == "longer":
        records[number] = (name, content + b"x")
    elif kind == "big":
        records = [(one, b"big" if one.endswith("byteorder") else data) for one, data in records]
    elif kind == "swap":  # only of different sizes: others are the weights of another model
        others = [i for i, (_, data) in enumerate(records) if len(data) != len(content)]
        other = random.choice(others)
        records[number], records[other] = (name, records[other][1]), (records[other][0], content)
    packing = zipfile.ZIP_DEFLATED if kind == "pack" else zipfile.ZIP_STORED
    with warnings.catch_warnings(), zipfile.ZipFile(path, "w", compression=packing) as archive:
        warnings.simplefilter("ignore")  # of names that occur twice
        for one, data in records:
            archive.writestr(one, data)
    return f"{path.name}: {kind} {name}"


def damage_pickle(path, random):
    """Bytes of the pickle, under a fitting checksum; or the format before torch 1.6, perhaps damaged."""
    if random.random() < 0.3:
        content = torch.load(path, weights_only=False)
        for holder in (content, content.get("optimizer_state_dict", {})):
            for key in ("args", "loss_scaler", "zero_stage"):
                holder.pop(key, None)
        torch.save(content, path, _use_new_zipfile_serialization=False)
        return f"{ANYTHING}{path.name}: former format, " + (damage_any_bit if random.random() < 0.7 else no)(
            path, random
        )
    with zipfile.ZipFile(path) as archive:
        records = {info.filename: archive.read(info) for info in archive.infolist()}
    (name,) = (name for name in records if name.endswith("/data.pkl"))
    data = bytearray(records[name])
    for _ in range(random.choice((1, 1, 4))):
        data[random.randrange(len(data))] = random.randrange(256)
    if random.random() < 0.2:
        del data[random.randrange(len(data)) :]
    records[name] = bytes(data)
    with zipfile.ZipFile(path, "w") as archive:
        for one, content in records.items():
            archive.writestr(one, content)
    return f"{ANYTHING}{path.name}: bytes of the pickle"


def no(path, random):
    return "undamaged"


def damage_text(path, random):
    """A file with the name of a step."""
    if random.random() < 0.5:
        return f"{path.name}: {damage_bytes(path, random)}"
    text = random.choice(TEXTS)
    path.write_text(text)
    return f"{path.name}: {text[:20]!r}"


def damage_ranks(files, random, *, may_swap):
    """A file that is gone, has the name of another rank, or is another's."""
    kind = random.choice(("drop", "rename", "add", *["swap", "copy"] * may_swap))
    file = random.choice(files)
    if kind == "drop":
        file.unlink()
    elif kind == "rename":
        file.rename(file.with_name(file.name.replace("0", "7", 1)))
    elif kind == "add":
        file.with_name(file.name.replace("0", "7", 1)).write_bytes(file.read_bytes())
    else:
        other = random.choice([each for each in files if each != file] or [file])
        content = file.read_bytes()
        file.write_bytes(other.read_bytes())
        if kind == "swap":
            other.write_bytes(content)
    return f"{file.name}: {kind}"


def damage(folder, files, texts, file, random, *, may_swap):
    """Damage one of `files` or `texts`, or how files are named; `file` may be written anew."""
    text, any_file = random.choice(texts), random.choice(files)
    kinds = {
        "any bit": lambda: f"{any_file.name}: {damage_any_bit(any_file, random)}",
        "size": lambda: f"{any_file.name}: {damage_weight_bytes(any_file, random)}",
        "archive": lambda: damage_archive(any_file, random),
        "pickle": lambda: damage_pickle(any_file, random),
        "content": lambda: damage_content(file, random),
        "tensor": lambda: damage_tensor(file, random),
        "text": lambda: damage_text(text, random),
        "file": lambda: (one := random.choice([any_file, text])).name + ": " + damage_file(one, random),
        "ranks": lambda: damage_ranks(files, random, may_swap=may_swap),
    }
    if (folder / CONFIG).exists():
        kinds["config"] = lambda: damage_json(folder / CONFIG, random)
    kind = random.choice(sorted(kinds))
    what = kinds[kind]()
    return what if what.startswith(ANYTHING) else f"{kind}: {what}"


def damage_deepspeed(folder, random):
    """Damage a checkpoint of DeepSpeed; one of its files is written anew, other ranks' are not."""
    files = [path for path in sorted(folder.glob("global_step*/**/*.pt")) if path.name not in UNREAD]
    texts = [path for path in (folder / "latest", folder / "latest_universal") if path.exists()]
    may_swap = len(list(folder.glob("global_step*/mp_rank_00*"))) == 1
    return damage(folder, files, texts, random.choice(files), random, may_swap=may_swap)


def damage_megatron(folder, random):
    """Damage a checkpoint of Megatron-LM; the file of its last rank is written anew."""
    files = sorted(folder.glob("iter_*/*/*.pt"))
    texts = [folder / "latest_checkpointed_iteration.txt"]
    return damage(folder, files, texts, random.choice(files), random, may_swap=False)
