"""Hugging Face folders and checkpoints to start from, each damaged in one random way.

`damage_hf` and `damage_start` change a folder in place and return a description of what they did. Bytes of
weights are not changed in files that nothing else describes, because those are then simply other weights.
"""

import json
import os
import struct

import pytest
import torch
from safetensors.torch import load_file, save_file

from megalowbit.checkpoints.shards import ORIGIN_KEY, origin_of
from megalowbit.durable_files import MANIFEST, write_manifest
from megalowbit.errors import UserError
from megalowbit.hf.folders.stored_weights import same_bits
from megalowbit.hf.training_checkpoint import HEADER_FILE, read_checkpoint

INDEX = "model.safetensors.index.json"
GARBAGE = (
    None, True, -1, 0, 2**62, 2**70, 1e400, 0.5, "", "x", "../x", "\0", "é" * 300,
    [], {}, [[]], [None], {"a": {}},
)  # fmt: skip
HARMFUL = (
    b"",
    b"\0" * 8,
    b"garbage",
    struct.pack("<Q", 2**63) + b"{}",
    struct.pack("<Q", 2) + b"[]" + b"\0" * 99,
)


class Harmful:
    def __reduce__(self):
        return os.mkdir, ("executed",)


def replace_in(value, random):
    """`value` with one of its parts replaced by garbage or removed, and where."""
    path = []
    parent, key = {"": value}, ""
    root = parent
    while True:
        inner = parent[key]
        path.append(str(key))
        keys = (
            list(inner)
            if isinstance(inner, dict)
            else list(range(len(inner)))
            if isinstance(inner, list)
            else []
        )
        if not keys or random.random() < 0.2:
            break
        parent, key = inner, random.choice(keys)
    if isinstance(parent, dict) and random.random() < 0.25 and parent is not root:
        del parent[key]
        return root[""], f"{'.'.join(path)} removed"
    parent[key] = random.choice(GARBAGE)
    return root[""], f"{'.'.join(path)} = {parent[key]!r}"


def damage_json(path, random):
    if random.random() < 0.3:
        return damage_bytes(path, random)
    value, what = replace_in(json.loads(path.read_text()), random)
    path.write_text(json.dumps(value))
    return what


def damage_bytes(path, random):
    """A text cut off, followed by something, or replaced."""
    content = path.read_bytes()
    kind = random.choice(("cut", "append", "replace"))
    cut = random.randrange(max(1, len(content) - 2))  # a final line break may be missing
    path.write_bytes(
        {"cut": content[:cut], "append": content + b"{", "replace": random.choice(HARMFUL)}[kind]
    )
    return kind


def damage_header(path, random):
    """The header of a safetensors file: one byte, one value, its length, or offsets that lie."""
    content = path.read_bytes()
    length = struct.unpack("<Q", content[:8])[0]
    header, data = json.loads(content[8 : 8 + length]), content[8 + length :]
    kind = random.choice(("byte", "value", "length", "overlap", "shape", "beyond", "hole"))
    names = [name for name in header if name != "__metadata__"]
    first, other = header[names[0]], header[random.choice(names)]
    if kind == "byte":
        position = random.randrange(8 + length)
        changed = bytes([random.randrange(256)])
        path.write_bytes(content[:position] + changed + content[position + 1 :])
        return f"byte {position} = {changed!r}"
    if kind == "length":
        found = random.choice((0, 1, length - 1, length + 1, len(content), 2**31, 2**63, 2**64 - 1))
        path.write_bytes(struct.pack("<Q", found) + content[8:])
        return f"length {found}"
    if kind == "value":
        header, what = replace_in(header, random)
        kind += " " + what
    elif kind == "overlap":
        first["data_offsets"] = [0, len(data)]
    elif kind == "shape":
        other["shape"] = random.choice(
            ([2**40, 2**40], [-1], [0], [*other["shape"], 1], [*other["shape"], 2], [])
        )
    elif kind == "beyond":
        other["data_offsets"] = [each + len(data) for each in other["data_offsets"]]
    else:
        other["data_offsets"][1] -= 1
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return kind


def damage_tensors(path, random):
    """Tensors that are missing, additional, misshapen, of another dtype, or not finite."""
    tensors = load_file(path)
    name = random.choice(sorted(tensors))
    value = tensors[name]
    kind = random.choice(("drop", "add", "flat", "wider", "dtype", "nan", "rename"))
    if kind == "drop":
        del tensors[name]
    elif kind == "add":
        tensors[random.choice(("x", name + "_scale", "lm_head.weights", "model.x"))] = value.clone()
    elif kind == "flat":
        tensors[name] = value.reshape(1, -1)
    elif kind == "wider":
        tensors[name] = torch.cat([value, value])
    elif kind == "dtype":
        tensors[name] = value.to(
            random.choice((torch.int8, torch.uint8, torch.bool, torch.float8_e4m3fn, torch.int64))
        )
    elif kind == "nan":
        value.view(-1)[random.randrange(value.numel())] = random.choice((float("nan"), float("inf")))
    else:
        tensors[name.replace(".", "_")] = tensors.pop(name)
    save_file(tensors, path, metadata={"format": "pt"})
    return f"{kind} {name}"


def damage_file(path, random):
    """Something else in the place of a file."""
    kind = random.choice(("missing", "folder", "FIFO", "dangling", "device", "outside", "loop"))
    content = path.read_bytes()
    path.unlink()
    if kind == "folder":
        path.mkdir()
    elif kind == "FIFO":
        os.mkfifo(path)
    elif kind == "dangling":
        path.symlink_to("nowhere")
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "loop":
        path.symlink_to(path.name)
    elif kind == "outside":  # harmless by itself: the same content
        outside = path.parent.parent / f"outside-{path.name}"
        outside.write_bytes(content)
        path.symlink_to(outside)
    return kind


def damage_pickle(folder, random):
    """A pickle instead of safetensors, damaged or not."""
    tensors = {}
    for path in folder.glob("*.safetensors*"):
        tensors |= load_file(path) if path.suffix == ".safetensors" else {}
        path.unlink()
    path = folder / "pytorch_model.bin"
    kind = random.choice(("whole", "harmful", "cut", "legacy", "list", "sparse", "module", "zeroed"))
    if kind == "harmful":
        tensors["x"] = Harmful()
    elif kind == "sparse":
        name = sorted(tensors)[0]
        tensors[name] = tensors[name].to_sparse()
    elif kind == "module":
        tensors = {"module": tensors}
    content = list(tensors.values()) if kind == "list" else tensors
    torch.save(content, path, _use_new_zipfile_serialization=kind != "legacy")
    if kind == "cut":
        path.write_bytes(path.read_bytes()[: random.randrange(path.stat().st_size)])
    if kind == "zeroed":  # its directory of records
        path.write_bytes(path.read_bytes()[:-200] + b"\0" * 200)
    return kind


def damage_hf(folder, random):
    """Damage a Hugging Face folder whose weights are safetensors."""
    weights = random.choice(sorted(folder.glob("*.safetensors")))
    index = folder / INDEX
    texts = [
        path for path in (index, folder / "config.json", folder / "generation_config.json") if path.exists()
    ]
    text = random.choice(texts)
    kinds = {
        "header": lambda: damage_header(weights, random),
        "tensors": lambda: damage_tensors(weights, random),
        "bytes": lambda: damage_weight_bytes(weights, random),
        "json": lambda: f"{text.name}: {damage_json(text, random)}",
        "file": lambda: (path := random.choice([weights, text])).name + ": " + damage_file(path, random),
        "pickle": lambda: damage_pickle(folder, random),
        "index": lambda: damage_index(index, random) if index.exists() else damage_header(weights, random),
    }
    kind = random.choice(sorted(kinds))
    return f"{kind}: {kinds[kind]()}"


def damage_weight_bytes(path, random):
    content = path.read_bytes()
    kind = random.choice(("cut", "append", "empty"))
    cut = random.randrange(len(content))
    path.write_bytes(
        {"cut": content[:cut], "append": content + b"\0" * random.randrange(1, 99), "empty": b""}[kind]
    )
    return kind


def damage_index(index, random):
    """An index that leads elsewhere."""
    content = json.loads(index.read_text())
    files = content["weight_map"]
    name = random.choice(sorted(files))
    names = ("../x.safetensors", "/etc/passwd", "a/../../x.safetensors", "", ".", "config.json", "x" * 300,
             "nowhere.safetensors", "model\0.safetensors", 5, None, ["a"])  # fmt: skip
    kind = random.choice(("place", "drop", "add", "swap"))
    if kind == "place":
        files[name] = random.choice(names)
    elif kind == "drop":
        del files[name]
    elif kind == "add":
        files["x"] = files[name]
    else:
        files[name] = next(each for each in sorted(set(files.values())) if each != files[name])
    index.write_text(json.dumps(content))
    return f"{kind} {name}: {files.get(name)!r}"


def damage_start(folder, random):
    """Damage a checkpoint to start from, perhaps with a manifest and a digest that fit the damage."""
    step = folder / "step-00000000"
    weights = random.choice(sorted(step.glob("*.safetensors")))
    path = random.choice([weights, step / HEADER_FILE])
    kinds = {
        "file": lambda: damage_file(path, random),
        "bytes": lambda: damage_weight_bytes(path, random),
        "header": lambda: damage_header(weights, random),
        "tensors": lambda: damage_tensors(weights, random),
        "content": lambda: damage_content(step / HEADER_FILE, random),
        "manifest": lambda: damage_json(step / MANIFEST, random),
        "any byte": lambda: damage_any_byte(path, random),
    }
    kind = random.choice(sorted(kinds))
    what = f"{kind}: {kinds[kind]()}"
    if kind in ("bytes", "header", "content") and random.random() < 0.8:
        (step / MANIFEST).unlink()
        write_manifest(step)
        what += ", under a manifest that fits"
    return what


def damage_any_byte(path, random):
    content = bytearray(path.read_bytes())
    position = random.randrange(len(content))
    content[position] ^= 1 << random.randrange(8)
    path.write_bytes(content)
    return f"byte {position}"


def damage_content(path, random):
    """One part of the first file."""
    content, what = replace_in(torch.load(path, weights_only=True), random)
    if (
        isinstance(content, dict)
        and isinstance(content.get("megalowbit_engine"), dict)
        and random.random() < 0.8
    ):
        content[ORIGIN_KEY] = origin_of(content, path, content["megalowbit_engine"].get("step"))
        what += ", with a digest that fits"
    torch.save(content, path)
    return what


def outcome(convert, source, out, what):
    """Whether `convert` wrote `out`; otherwise it raised an error of one line and left nothing."""
    try:
        convert(source, out)
    except UserError as error:
        if "\n" in str(error) or out.exists():
            pytest.fail(f"{what}: {error}")
    except Exception as error:
        pytest.fail(f"{what}: {type(error).__name__}: {error}")
    left = [path.name for path in out.parent.iterdir() if not path.name.startswith(("outside", "source"))]
    assert left in ([], ["out"]), what
    return out.exists()


def same_weights(folder, expected):
    """Whether a checkpoint to start from has exactly these weights."""
    found = read_checkpoint(folder).state_dict
    return found.keys() == expected.keys() and all(
        same_bits(found[name], expected[name]) for name in expected
    )
