"""Speed and memory of conversions against `cp`: `python benchmarks/convert.py [--disk DIR]`.

Makes a random 1.5 GB MoE in bf16, then, at 1 and at 2 ranks, imports it (`convert from-hf`) and
exports the result (`convert to-hf`). Beside each conversion, in the same run and on the same disk,
`cp` of the same source files followed by `sync`. Speed is that of the write phase, through the
last fsync; reading back is timed by itself. Memory is the largest anonymous resident memory of a
rank (RssAnon), less what it has before the first file. Wanted: 60 % of the speed of `cp` at least,
and at most twice the largest tensor and one output file of memory.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

SHARD_GB = 0.25
CONFIG = {
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "vocab_size": 64000,
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "moe_intermediate_size": 512,
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}


def make_model(directory: Path) -> int:
    """Random tensors, several files; returns the bytes of the largest tensor."""
    import torch
    from safetensors.torch import save_file

    c = CONFIG
    h, m, d = c["hidden_size"], c["moe_intermediate_size"], c["head_dim"]
    shapes = {
        "model.embed_tokens.weight": (c["vocab_size"], h),
        "lm_head.weight": (c["vocab_size"], h),
        "model.norm.weight": (h,),
    }
    for layer in range(c["num_hidden_layers"]):
        p = f"model.layers.{layer}."
        shapes |= {
            p + "input_layernorm.weight": (h,),
            p + "post_attention_layernorm.weight": (h,),
            p + "self_attn.q_norm.weight": (d,),
            p + "self_attn.k_norm.weight": (d,),
            p + "self_attn.q_proj.weight": (c["num_attention_heads"] * d, h),
            p + "self_attn.k_proj.weight": (c["num_key_value_heads"] * d, h),
            p + "self_attn.v_proj.weight": (c["num_key_value_heads"] * d, h),
            p + "self_attn.o_proj.weight": (h, c["num_attention_heads"] * d),
            p + "mlp.gate.weight": (c["num_experts"], h),
        }
        for expert in range(c["num_experts"]):
            e = f"{p}mlp.experts.{expert}."
            shapes |= {
                e + "gate_proj.weight": (m, h),
                e + "up_proj.weight": (m, h),
                e + "down_proj.weight": (h, m),
            }
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(CONFIG))
    names, count = list(shapes), 6
    weight_map = {}
    for part in range(count):
        file = f"model-{part + 1:05d}-of-{count:05d}.safetensors"
        tensors = {
            name: torch.randn(shapes[name], dtype=torch.bfloat16) for name in names[part::count]
        }
        save_file(tensors, directory / file, {"format": "pt"})
        weight_map.update(dict.fromkeys(tensors, file))
    index = {"metadata": {}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return max(2 * torch.Size(shape).numel() for shape in shapes.values())


def cp_speed(source: Path, target: Path) -> float:
    """GB/s of `cp` followed by `sync` of the copies."""
    num_bytes = size_of(source)
    started = time.perf_counter()
    subprocess.run(["cp", "-r", str(source), str(target)], check=True)
    files = [str(path) for path in target.rglob("*") if path.is_file()]
    subprocess.run(["sync", *files], check=True)
    seconds = time.perf_counter() - started
    shutil.rmtree(target)
    return num_bytes / seconds / 1e9


def size_of(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())


def evict(directory: Path) -> None:
    """Drop the files from the page cache: both sides read the disk."""
    for path in directory.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


class MemoryWatch(threading.Thread):
    """Largest RssAnon of any rank, less what it was when the rank began to write."""

    def __init__(self, parent: int, partial: Path):
        super().__init__(daemon=True)
        self.parent, self.partial, self.first, self.extra = parent, partial, {}, 0
        self.done = threading.Event()

    def run(self) -> None:
        while not self.done.wait(0.01):
            writes = any(self.partial.rglob("*-of-*.*"))
            for rank in _children(self.parent):
                held = _anonymous(rank)
                if not writes or rank not in self.first:
                    self.first[rank] = held
                self.extra = max(self.extra, held - self.first[rank])


def _children(pid: int) -> list[int]:
    try:
        return [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def _anonymous(pid: int) -> int:
    try:
        found = re.search(r"RssAnon:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
    except OSError:
        return 0
    return 1024 * int(found[1]) if found else 0


def convert(command: str, source: Path, target: Path, ranks: int) -> tuple[float, float, int]:
    """GB/s of the write phase and of reading back, and the extra memory of a rank."""
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "grpo_megatron.cli.main",
            "convert",
            command,
            str(source),
            "--to",
            str(target),
            "--shard-gb",
            str(SHARD_GB),
            "--no-probe",
            f"num_ranks={ranks}",
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    watch = MemoryWatch(process.pid, target.with_name(target.name + ".partial"))
    watch.start()
    out, errors = process.communicate()
    watch.done.set()
    watch.join()
    if process.returncode:
        sys.exit(out + errors)
    speeds = dict(re.findall(r"^(write|read back): [\d.]+ GB in ([\d.]+) s", out, re.M))
    num_bytes = size_of(target) / 1e9
    return num_bytes / float(speeds["write"]), num_bytes / float(speeds["read back"]), watch.extra


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--disk", type=Path, default=Path.cwd(), help="where to write")
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.disk) as folder:
        root = Path(folder)
        source = root / "hf"
        largest = make_model(source)
        os.sync()
        allowed = 2 * largest + SHARD_GB * 1e9
        print(
            f"{size_of(source) / 1e9:.2f} GB, files of {SHARD_GB} GB, largest tensor "
            f"{largest / 1e6:.0f} MB, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}"
        )
        megatron = root / "megatron"
        for ranks in (1, 2):
            for command, begin, target in (
                ("from-hf", source, megatron),
                ("to-hf", megatron, root / "back"),
            ):
                rows = []
                for _ in range(arguments.repeats):
                    shutil.rmtree(target, ignore_errors=True)
                    evict(begin)
                    copied = cp_speed(begin, root / "copy")
                    evict(begin)
                    rows.append((copied, *convert(command, begin, target, ranks)))
                copied, written, read, extra = map(list, zip(*rows, strict=True))
                ratio = statistics.median(w / c for w, c in zip(written, copied, strict=True))
                print(
                    f"{command:8} {ranks} rank(s): cp {statistics.median(copied):.2f} GB/s, "
                    f"write {statistics.median(written):.2f} GB/s = {ratio:.0%} of cp (of 60 %), "
                    f"read back {statistics.median(read):.2f} GB/s, extra memory "
                    f"{max(extra) / 1e6:.0f} MB = {max(extra) / allowed:.0%} of what is allowed",
                    flush=True,
                )
            shutil.rmtree(root / "back")


if __name__ == "__main__":
    main()
