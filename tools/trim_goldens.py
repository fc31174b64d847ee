"""Trims full golden and calibration files to what the tests read: python trim_goldens.py FULL_DATA_DIR OUT_DATA_DIR

Tensors are copied bit for bit; only whole keys, or rows of a key, are left out, so that the repository stays small.
Needs nothing but Python."""
import json, os, re, struct, sys, zlib

SRC, OUT = sys.argv[1], sys.argv[2]
SIZE = {"F32": 4, "I32": 4, "BF16": 2, "U8": 1, "I8": 1, "I64": 8, "F64": 8}


def read(path):
    data = open(path, "rb").read()
    n = struct.unpack("<Q", data[:8])[0]
    head = json.loads(data[8:8 + n])
    head.pop("__metadata__", None)
    return {k: (v["dtype"], v["shape"], data[8 + n + v["data_offsets"][0]:8 + n + v["data_offsets"][1]]) for k, v in head.items()}


def write(path, tensors):
    head, at = {}, 0
    for k, (dtype, shape, data) in tensors.items():
        head[k] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + len(data)]}
        at += len(data)
    text = json.dumps(head, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as f:
        f.write(struct.pack("<Q", len(text)) + text)
        for _, _, data in tensors.values():
            f.write(data)
    print(path, os.path.getsize(path))


def png(path, width, height, pixels):
    chunk = lambda kind, data: struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
    up = bytearray()
    for y in range(height):
        row, above = pixels[3 * width * y:][:3 * width], pixels[3 * width * (y - 1):][:3 * width] if y else bytes(3 * width)
        up += b"\2" + bytes((a - b) % 256 for a, b in zip(row, above))
    with open(path, "wb") as f:
        f.write(b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)))
        f.write(chunk(b"IDAT", zlib.compress(bytes(up), 9)) + chunk(b"IEND", b""))
    print(path, os.path.getsize(path))


def rows(t, first=None, last=None):
    dtype, shape, data = t
    row = len(data) // shape[0]
    n = min(first or last, shape[0])
    return dtype, [n] + shape[1:], data[:n * row] if first else data[len(data) - n * row:]


def last_rows(t, n):
    return t[0], [1, n, t[1][2]], t[2][-n * t[1][2] * 4:]


# Micro: per-row keys keep their last 2 rows (logits one but for the longest prompt), logits of decoding the first (all greedy tokens are kept), states only the longest
# prompt, of the first and the last layer that has one.
for name in ("short_think", "short_direct", "tool_think", "image_direct", "recall_400", "recall_1000"):
    full, kept = read(f"{SRC}/goldens/micro_{name}.f32.safetensors"), {}
    for k, t in full.items():
        if k.endswith("recurrent_state"):
            if name == "recall_1000" and "layer1." not in k: kept[k] = t
        elif k in ("decode.logits", "mtp.logits", "mtp.hidden"): kept[k] = rows(t, first=1)
        elif k == "prefill.logits": kept[k] = rows(t, last=2 if name == "recall_1000" else 1)
        elif k == "pixel_values": kept[k] = rows(t, first=4)
        elif k.startswith("prefill."): kept[k] = rows(t, last=2)
        else: kept[k] = t
    write(f"{OUT}/goldens/micro/{name}.safetensors", kept)

# Tiny: every block of a KDA and of a DSA layer, block outputs and choices of the others, ends of the other passes. What is
# inside one stage of the backend has its own f64 references in the tests of that stage.
INSIDE, kept = re.compile(r"kda\.(?!state)|kv_latent|router\.logits|routed_out|shared_out|hc_mean|cache\..*(conv|latent|indexer)"), {}
for k, t in read(f"{SRC}/goldens/tiny/golden_fp32.safetensors").items():
    layer = re.search(r"\.layer(\d)\.", k)
    ends = ("embed", "final_norm", "logits") if k.startswith(("image.", "video.")) else ("logits",)
    if k.startswith(("in.", "mtp.", "cache.", "decode.", "decode31.", "decode44.")): keep = True
    elif k.startswith("prefill."):
        keep = not layer or layer[1] in "03" or k.endswith(("streams_out", "attn_out", "mlp_out", "topk", "router.indices", "router.weights"))
    else: keep = ".vis." in k or k.endswith(ends) or (k.startswith(("image.", "video.")) and k.endswith(("layer7.streams_out", "topk")))
    # Hidden states are kept of every row, so logits of the last 15 do (of 10 where there are pictures).
    if k in ("prefill.logits", "mtp.prefill.logits", "dec_prefill.logits", "image.logits", "video.logits"): t = last_rows(t, 10 if k[0] in "iv" else 15)
    if keep and not INSIDE.search(k): kept[k] = t
write(f"{OUT}/goldens/tiny/golden.safetensors", kept)

# Pre-processing: the pictures are formulas (red (7x+3y) mod 256, green (xy div 5 + 31) mod 256, blue (255-x+2y) mod 256), so
# only their sizes are kept; the resized pixels as a PNG of all patches, one below the other (the two frames are equal), and the
# first patch as the floats that the reference produced.
full, kept = read(f"{SRC}/goldens/tiny/golden_preproc.safetensors"), {}
MEAN, STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
for i in (0, 3, 4):
    dtype, (n, width), data = full[f"img{i}.pixel_values"]
    out = bytearray()
    for p in range(n):
        v = struct.unpack(f"<{width}f", data[p * width * 4:(p + 1) * width * 4])
        assert all(v[c * 392:c * 392 + 196] == v[c * 392 + 196:c * 392 + 392] for c in range(3))
        out += bytes(round((v[c * 392 + x] * STD[c] + MEAN[c]) * 255) for x in range(196) for c in range(3))
    kept[f"img{i}.size"] = ("I32", [2], struct.pack("<2i", *full[f"img{i}.rgb_hwc"][1][:2]))
    kept[f"img{i}.max_image_tokens"] = full[f"img{i}.max_image_tokens"]
    kept[f"img{i}.grid_thw"] = full[f"img{i}.grid_thw"]
    kept[f"img{i}.pixel_values"] = rows((dtype, [n, width], data), first=1)
    png(f"{OUT}/goldens/tiny/img{i}.png", 14, 14 * n, bytes(out))
write(f"{OUT}/goldens/tiny/preproc.safetensors", kept)

# GPTQ: the Hessian follows from the inputs, so it is left out; inputs that several cases share are kept once, and the
# map `same_inputs` in gptq_inputs.json says whose `x` a case uses.
full, kept, owner, same = read(f"{SRC}/vectors/gptq.safetensors"), {}, {}, {}
for k, t in full.items():
    case, key = k.split(".")
    if key == "h_raw": continue
    if key == "x":
        same[case] = owner.setdefault(t[2], case)
        if same[case] != case: continue
    kept[k] = t
write(f"{OUT}/vectors/gptq.safetensors", kept)
with open(f"{OUT}/vectors/gptq_inputs.json", "w") as f: json.dump({"same_inputs": same}, f, indent=1); f.write("\n")

# Calibration: the token ids are what is read; the text they came from is left out.
with open(f"{SRC}/calib/calib.jsonl") as source, open(f"{OUT}/calib/calib.jsonl", "w") as out:
    for line in source:
        sample = json.loads(line)
        del sample["text"]
        out.write(json.dumps(sample, ensure_ascii=False, separators=(",", ":")) + "\n")
