"""A peer loads the artifact: python load_with_transformers.py SOURCE ARTIFACT [--json FILE]

Loads a W4A16 artifact with transformers (5.16 or 5.17: later versions fail on every glm5_next artifact with KDA layers) and
compares, bit for bit, every expert matrix it built with the packed tensors unpacked here from the layout alone:
code = nibble - 8, lowest nibble first, times the BF16 scale of its 128 columns, product rounded once to BF16. Everything else
must equal the source checkpoint. Needs torch, transformers 5.17, compressed-tensors, safetensors. Exit code 1 on a difference."""
import argparse, glob, json, re, sys

import torch
import transformers
from safetensors import safe_open
from transformers import AutoModelForImageTextToText

args = argparse.ArgumentParser()
args.add_argument("source")
args.add_argument("artifact")
args.add_argument("--json")
args = args.parse_args()


def tensors(folder):
    out = {}
    for path in sorted(glob.glob(f"{folder}/*.safetensors")):
        with safe_open(path, "pt") as f:
            for k in f.keys(): out[k] = f.get_tensor(k)
    return out


def unpack(packed, scale, shape):
    rows, columns = shape.tolist()
    words = packed.to(torch.int64) & 0xFFFFFFFF
    codes = torch.stack([(words >> (4 * i)) & 15 for i in range(8)], 2).reshape(rows, -1)[:, :columns] - 8
    return (codes.float() * scale.float().repeat_interleave(columns // scale.shape[1], 1)).to(torch.bfloat16)


model, info = AutoModelForImageTextToText.from_pretrained(args.artifact, dtype=torch.bfloat16, output_loading_info=True)
built = dict(model.named_parameters()) | dict(model.named_buffers())
source, artifact = tensors(args.source), tensors(args.artifact)
config = json.load(open(f"{args.artifact}/config.json"))
layers = config.get("text_config", config)["num_hidden_layers"]
width = config.get("text_config", config)["moe_intermediate_size"]
differences, experts, others, skipped = [], 0, 0, []


def find(*endings):
    hits = [k for k in built if any(k.endswith(e) for e in endings)]
    return hits[0] if len(hits) == 1 else None


for k in sorted(artifact):
    m = re.search(r"layers\.(\d+)\.mlp\.experts\.(\d+)\.(gate|up|down)_proj\.weight_packed$", k)
    if not m: continue
    base = k[:-len("_packed")]
    ours = unpack(artifact[k], artifact[base + "_scale"], artifact[base + "_shape"])
    layer, expert, part = int(m[1]), int(m[2]), m[3]
    if part == "down": theirs = built[find(f"layers.{layer}.mlp.experts.down_proj")][expert]
    else:
        both = built[find(f"layers.{layer}.mlp.experts.gate_up_proj")][expert]
        theirs = both[:width] if part == "gate" else both[width:]
    experts += 1
    if theirs.dtype != torch.bfloat16 or not torch.equal(theirs.view(torch.int16), ours.view(torch.int16)): differences.append(base)

for k, t in source.items():
    if re.search(rf"layers\.{layers}\.", k): skipped.append(k); continue
    if re.search(r"mlp\.experts\.\d+\.", k): continue
    name = k.replace("model.language_model.", "language_model.").replace("model.visual.", "visual.")
    hit = find(name)
    if hit is None: continue
    others += 1
    if not torch.equal(built[hit].float(), t.float().reshape(built[hit].shape)): differences.append(k)

result = {"transformers": transformers.__version__, "torch": torch.__version__, "expert_matrices_equal": experts - sum("experts" in d for d in differences),
          "expert_matrices": experts, "other_tensors_compared_by_name": others, "differences": differences[:20],
          "missing_keys": sorted(info["missing_keys"])[:20], "unexpected_keys_outside_draft_layer": sorted(k for k in info["unexpected_keys"] if not re.search(rf"layers\.{layers}\.", k))[:20]}
print(json.dumps(result, indent=1))
if args.json: json.dump(result, open(args.json, "w"), indent=1)
sys.exit(bool(differences or result["missing_keys"] or result["unexpected_keys_outside_draft_layer"] or not experts))
