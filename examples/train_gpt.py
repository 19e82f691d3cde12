"""Train a GPT on real text with `flashattn.attention`, and measure it: loss, tokens/s, MFU, validation loss, a sample, a plot.

    python examples/train_gpt.py                        # a GPU: 124M parameters, sequence 4096; none: about two minutes on two cores
    python examples/train_gpt.py --attention sdpa       # the same weights and the same batches through torch's attention
    python examples/train_gpt.py --data book.txt        # any text; by default the sources of Python's own standard library

The model (`gpt.py`, beside this file) reads bytes, so there is no tokenizer and the head costs next to nothing. Every run leaves run.json,
sample.txt and loss.png in its directory; `benchmarks/train_gpt_compare.py` lays two of them side by side.

The surprising fact: nothing is loaded during training. The corpus is bytes, so all of it sits on the device, and a batch is one gather.
"""

import argparse
import contextlib
import hashlib
import importlib.metadata
import json
import math
import platform
import statistics
import sys
import sysconfig
from datetime import datetime, timezone
from pathlib import Path

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from flashattn.roofline import MFUMeter, detect, mfu, train_flops_per_token
from gpt import GPT, generate, make_attention

# Slow warm-up and a learning rate below the edge of stability: beyond it the rounding of two attentions grows into different losses.
PRESETS = {
    "small": {"layers": 4, "width": 128, "heads": 4, "hidden": 384, "seq": 256, "batch": 4, "steps": 600, "lr": 1.5e-3},
    "124m": {"layers": 12, "width": 768, "heads": 12, "hidden": 3456, "seq": 4096, "batch": 16, "steps": 300, "lr": 2e-4},
}
SIZES = {
    "layers": "blocks of the model",
    "width": "of the residual stream",
    "heads": "of q, each width / heads wide",
    "hidden": "width of SwiGLU; GELU, with two matrices instead of three, gets 3/2 of it and so as many parameters",
    "seq": "bytes of a sequence",
    "batch": "sequences of a step",
    "steps": "of the optimizer",
}
SDPA_BACKENDS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}


def load_corpus(path):
    """(description, training bytes, validation bytes): every 20th file of the standard library is held out, or the last 20th of `path`."""
    if path:
        text = path.read_bytes()
        cut = len(text) - len(text) // 20
        return f"{path.name}: {len(text) / 1e6:.1f} MB", text[:cut], text[cut:]
    root = Path(sysconfig.get_path("stdlib"))
    skip = {"site-packages", "dist-packages", "test", "tests", "idle_test"}  # distributions differ in these
    files = sorted((f.relative_to(root) for f in root.rglob("*.py")), key=lambda f: f.as_posix())
    texts = [(root / f).read_bytes() for f in files if not skip & set(f.parts)]
    if not texts:
        raise FileNotFoundError(f"no .py sources under {root}: give a text with --data FILE")
    held_out = b"".join(texts[10::20])
    del texts[10::20]
    train = b"".join(texts)
    return f"sources of Python {platform.python_version()}'s library: {(len(train) + len(held_out)) / 1e6:.1f} MB", train, held_out


class Windows:
    """Windows of seq + 1 bytes, gathered on the device: inputs are the first seq of them, targets the last seq."""

    def __init__(self, text, seq, device, what):
        if len(text) < seq + 2:
            raise ValueError(f"the {what} text has {len(text)} bytes; --seq {seq} needs at least {seq + 2}")
        self.bytes, self.span = torch.frombuffer(bytearray(text), dtype=torch.uint8).to(device), torch.arange(seq + 1, device=device)

    def starts(self, count):
        return torch.linspace(0, len(self.bytes) - len(self.span), count, dtype=torch.float64).long().to(self.bytes.device)

    def random_starts(self, steps, batch, seed):
        """All batches of a run, drawn on the CPU: they depend on the seed and on nothing else."""
        rng = torch.Generator().manual_seed(seed)
        return torch.randint(len(self.bytes) - len(self.span) + 1, (steps, batch), generator=rng).to(self.bytes.device)

    def __call__(self, starts):
        window = self.bytes[starts[:, None] + self.span].long()
        return window[:, :-1], window[:, 1:]


def learning_rate(step, cfg):
    """Linear warm-up over a third of the steps, then half a cosine to zero."""
    warmup = max(1, cfg.steps // 3)
    progress = (step - warmup) / max(1, cfg.steps - warmup)
    return cfg.lr * ((step + 1) / warmup if step < warmup else 0.5 * (1 + math.cos(math.pi * progress)))


@torch.no_grad()
def evaluate(model, data, cfg):
    return torch.stack([model(*data(s)) for s in data.starts(cfg.val_batches * cfg.batch).split(cfg.batch)]).mean().item()


def train(model, data, val_data, cfg, report, meter):
    """Returns the loss of every step, [(step, validation loss)] and the tokens/s of every full interval of --log-every steps but the first.

    The loop touches the host only once an interval: losses stay on the device until then, and reading one is the only synchronisation."""
    decay, rest = ([p for p in model.parameters() if (p.ndim > 1) == matrix] for matrix in (True, False))
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=cfg.lr, betas=(0.9, 0.99), fused=cfg.device.split(":")[0] in ("cuda", "cpu"))
    starts = data.random_starts(cfg.steps, cfg.batch, cfg.seed)
    losses, validation, rates = torch.zeros(cfg.steps, device=cfg.device), [], []
    meter.start()
    since = 0
    for step in range(cfg.steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, cfg)
        loss = model(*data(starts[step]))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses[step] = loss.detach()
        done, last = step + 1, step + 1 == cfg.steps
        validate = last or (cfg.val_every and done % cfg.val_every == 0)
        if not (done % cfg.log_every == 0 or validate):
            continue
        now_loss = losses[step].item()
        if not math.isfinite(now_loss):
            raise FloatingPointError(f"the loss of step {done} is {now_loss}: lower --lr")
        speed = meter.lap((done - since) * cfg.batch * cfg.seq)
        if since and done - since == cfg.log_every:  # the first interval compiles and warms up
            rates.append(speed.tokens_per_second)
        status = f"loss {now_loss:.4f}  {speed.tokens_per_second:,.0f} tokens/s"
        if speed.mfu is not None:
            status += f"  MFU {speed.mfu:.1%}"
        if validate:
            validation.append((done, evaluate(model, val_data, cfg)))
            status += f"  validation {validation[-1][1]:.4f}"
        report(done, status)
        meter.start()  # without the validation and the report
        since = done
    return losses.tolist(), validation, rates


@contextlib.contextmanager
def progress(total):
    """report(step, text): a bar on a terminal that has rich, otherwise plain lines."""
    try:
        from rich import progress as bars
    except ImportError:
        bars = None
    if bars is None or not sys.stdout.isatty():
        yield lambda step, text: print(f"step {step:>5}/{total}  {text}", flush=True)
        return
    columns = bars.BarColumn(), bars.MofNCompleteColumn(), bars.TimeRemainingColumn(), bars.TextColumn("{task.description}")
    with bars.Progress(*columns, auto_refresh=False) as bar:
        task = bar.add_task("first steps", total=total)
        yield lambda step, text: bar.update(task, completed=step, description=text, refresh=True)


def plot(path, record):
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print("no loss plot: matplotlib is not installed (pip install matplotlib)")
        return
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    axes.plot(range(1, len(record["loss"]) + 1), record["loss"], label="training")
    axes.plot(*zip(*record["validation"], strict=True), "o", label="validation")
    axes.set(xlabel="step", ylabel="loss (nats per byte)")
    axes.set_title(f"{record['parameters']:,} parameters, attention {record['config']['attention']}, {record['device']}")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)


def save(directory, record, sample):
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "run.json").write_text(json.dumps(record, indent=1) + "\n")
    (directory / "sample.txt").write_bytes(sample)
    plot(directory / "loss.png", record)


def arguments(argv):
    on_gpu = torch.cuda.is_available()
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--preset", choices=PRESETS, default="124m" if on_gpu else "small", help="decides defaults of the options below")
    parser = argparse.ArgumentParser(
        description="Train a GPT on real text.", parents=[first], allow_abbrev=False, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--attention", choices=("flashattn", "sdpa", "eager", "flex"), default="flashattn")
    parser.add_argument("--sdpa-backend", choices=SDPA_BACKENDS, help="the only backend --attention sdpa may use; None lets torch choose")
    parser.add_argument("--data", type=Path, help="a file of any text; None: Python's standard library")
    parser.add_argument("--out", type=Path, help="directory of the results; None: runs/PRESET-ATTENTION-TIME")
    parser.add_argument("--device", default="cuda" if on_gpu else "cpu")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), help="of the activations; None: bfloat16 on a GPU, float32 on a CPU")
    parser.add_argument("--compile", action="store_true", help="torch.compile the model")
    parser.add_argument("--mlp", choices=("swiglu", "gelu"), default="swiglu")
    for name, text in SIZES.items():
        parser.add_argument(f"--{name}", type=int, help=text)
    parser.add_argument("--kv-heads", type=int, help="fewer than --heads: GQA; None: as many as heads")
    parser.add_argument("--lr", type=float, help="peak learning rate: linear warm-up over a third of the steps, then half a cosine to zero")
    parser.add_argument("--seed", type=int, default=0, help="decides weights and batches, whatever the attention")
    parser.add_argument("--log-every", type=int, default=20, help="steps from one look at the loss, and at the clock, to the next")
    parser.add_argument("--val-every", type=int, default=0, help="0: only at the end")
    parser.add_argument("--val-batches", type=int, default=8)
    parser.add_argument("--sample", type=int, default=300, help="bytes to generate at the end")
    parser.add_argument("--prompt", help="what the sample continues; None: the first 64 bytes of the validation text")
    parser.set_defaults(**PRESETS[first.parse_known_args(argv)[0].preset])
    cfg = parser.parse_args(argv)
    cfg.kv_heads = cfg.heads if cfg.kv_heads is None else cfg.kv_heads
    cfg.dtype = cfg.dtype or ("float32" if cfg.device == "cpu" else "bfloat16")
    cfg.out = cfg.out or Path("runs", f"{cfg.preset}-{cfg.attention}-{datetime.now():%Y%m%d-%H%M%S}")
    for name in (*SIZES, "kv_heads", "log_every", "val_batches"):
        if getattr(cfg, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1, got {getattr(cfg, name)}")
    if cfg.width % (2 * cfg.heads) or cfg.heads % cfg.kv_heads:
        parser.error(f"--width {cfg.width} must be a multiple of 2 * --heads {cfg.heads}, and that one of --kv-heads {cfg.kv_heads}")
    if cfg.data and not cfg.data.is_file():
        parser.error(f"--data {cfg.data} is not a file")
    if cfg.sdpa_backend and cfg.attention != "sdpa":
        parser.error("--sdpa-backend needs --attention sdpa")
    return cfg


def version(package):
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def main(argv=None):
    """Runs one training and returns what run.json holds."""
    cfg = arguments(argv)
    attention, dtype = make_attention(cfg.attention), getattr(torch, cfg.dtype)
    description, text, val_text = load_corpus(cfg.data)
    data, val_data = (Windows(t, cfg.seq, cfg.device, what) for t, what in ((text, "training"), (val_text, "validation")))
    torch.manual_seed(cfg.seed)
    model = GPT(cfg, attention, dtype).to(cfg.device)  # drawn on the CPU: the same weights on every device
    parameters = sum(p.numel() for p in model.parameters())
    device = torch.cuda.get_device_name(cfg.device) if cfg.device.startswith("cuda") else f"{cfg.device} ({platform.machine()})"
    flops = train_flops_per_token(parameters, cfg.layers, cfg.width, cfg.seq, causal=True)  # the tied embedding is the head's product
    meter = MFUMeter(flops, detect(device))
    print(f"data   {description}, {len(val_text) / 1e6:.2f} MB of them for validation")
    shape = f"{cfg.layers} layers, width {cfg.width}, {cfg.heads} heads ({cfg.kv_heads} of k and v), {cfg.mlp}"
    print(f"model  {parameters:,} parameters: {shape}")
    print(f"run    {device}, {cfg.dtype}, attention {cfg.attention}, {cfg.steps} steps of {cfg.batch} x {cfg.seq} tokens, seed {cfg.seed}")
    print(f"FLOPs  6*N + 12*L*H*Q*T/2 = {flops / 1e9:.3g} GFLOP per token (N parameters, L layers, H*Q width, T sequence; /2: causal)")
    if meter.peak:
        print(f"MFU    tokens/s * FLOPs / {meter.peak / 1e12:g} TFLOP/s, the dense bf16 peak of this GPU")
    backend = sdpa_kernel(SDPA_BACKENDS[cfg.sdpa_backend]) if cfg.sdpa_backend else contextlib.nullcontext()
    with backend, progress(cfg.steps) as report:
        losses, validation, rates = train(torch.compile(model) if cfg.compile else model, data, val_data, cfg, report, meter)
        prompt = cfg.prompt.encode() if cfg.prompt else val_text[:64]
        sample = generate(model, prompt, cfg.sample, cfg.seed)
    rate = statistics.median(rates) if rates else None
    record = {
        "config": {name: value for name, value in vars(cfg).items() if name not in ("out", "data")},
        "data": {"description": description, "sha256": hashlib.sha256(text + val_text).hexdigest()},
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "device": device,
        "versions": {"python": platform.python_version(), **{name: version(name) for name in ("torch", "triton", "flashattn")}},
        "parameters": parameters,
        "flops_per_token": flops,
        "peak_tflops": meter.peak and meter.peak / 1e12,
        "loss": losses,
        "final_loss": statistics.fmean(losses[-20:]),
        "validation": validation,
        "validation_loss": validation[-1][1],
        "tokens_per_second": rate,
        "mfu": mfu(flops, rate, meter.peak) if rate and meter.peak else None,
    }
    save(cfg.out, record, sample)
    print(f"\n{sample.decode(errors='replace')}\n")
    speed = f"{rate:,.0f} tokens/s (median after warm-up)" if rate else "too few steps to measure tokens/s"
    speed += f", MFU {record['mfu']:.1%}" if record["mfu"] else ""
    print(f"training loss {record['final_loss']:.4f} (last 20 steps), validation {record['validation_loss']:.4f} nats per byte, {speed}")
    print(f"results in {cfg.out}")
    return record


if __name__ == "__main__":
    main()
