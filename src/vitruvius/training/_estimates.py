"""What a dry run has found, in words: sites and cores, parameters, memory a process, time an epoch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vitruvius._errors import NoSiteError, UnsuitableSite
from vitruvius._yaml import dump_yaml
from vitruvius.surgery import head_weights, inner, survey
from vitruvius.training._session import Session, with_rate
from vitruvius.training.config import Config


@dataclass(frozen=True, kw_only=True)
class Findings:
    """Numbers of a dry run; what could not be found is None."""

    config: Config
    processes: int  # that the recipe is for
    session: Session
    batches: int | None  # in an epoch, of this process
    flops: int  # of one image's forward pass
    images: int  # in a measured step
    seconds: float | None  # a step
    activations: int | None  # bytes an image
    optimizer: int | None  # bytes
    forwards: float | None = None  # passes of an image through the model in a step, those of an attack included
    backwards: float | None = None
    how: str = ""  # on what memory was measured
    remarks: tuple[str, ...] = ()


def describe(found: Findings) -> str:
    """The whole answer."""
    sections = [dump_yaml(found.config).strip(), schedule(found.config, found.processes)]
    sections += [_sites(found.session), _parameters(found.session)]
    sections += [_memory(found), _time(found), *(f"note: {remark}" for remark in found.remarks)]
    return "\n\n".join(sections)


def schedule(config: Config, processes: int) -> str:
    """Epochs that run, peak rate and global batch, with this number of processes."""
    train = with_rate(config, processes).train
    epochs = train.epochs
    if train.sched in ("cosine", "tanh", "poly"):
        epochs += train.cooldown_epochs
    if train.warmup_prefix:
        epochs += train.warmup_epochs
    batch = config.data.batch_size * processes * train.grad_accum_steps
    words = "1 process" if processes == 1 else f"{processes} processes"
    return f"schedule with {words}: {epochs} epochs, peak rate {train.lr:.6g}, {batch:,} images an update"


def idle_parameters(session: Session) -> int:
    """Weights that are kept in timm's layout though no core looks at them: the queries of symmetric attention."""
    root = inner(session.model)
    names = [name for name, module in root.named_modules() if "q" in _discarded(getattr(module, "core", None))]
    if not names:
        return 0
    try:
        views = head_weights(session.model, names)
    except UnsuitableSite:
        return 0
    idle = 0
    for _, weights in views.values():
        idle += weights.q.numel()
        if weights.q_bias is not None:
            idle += weights.q_bias.numel()
    return idle


def _discarded(core: Any) -> set[str]:
    return {name for part in getattr(core, "parts", {}).values() for name in getattr(part, "discards", ())}


def _sites(session: Session) -> str:
    try:
        sites = survey(session.model)
    except NoSiteError:
        return "attention sites: none; attacks, training and evaluation work, surgery does not"
    root, rows = inner(session.model), []
    for name, site in sites.items():
        core = getattr(root.get_submodule(name), "core", None)
        what = "upstream" if core is None else core.describe()
        shape = f"{site.num_heads} heads of {site.key_dim}, {site.num_queries} × {site.num_keys} {site.attends}"
        rows.append((name, f"{site.family:<8} {shape:<40} {what}"))
    width = max(len(name) for name, _ in rows)
    return "\n".join(["attention sites", *(f"  {name:<{width}}  {text}" for name, text in rows)])


def _parameters(session: Session) -> str:
    parameters = list(session.model.parameters())
    total = sum(p.numel() for p in parameters)
    trainable = sum(p.numel() for p in parameters if p.requires_grad)
    idle = idle_parameters(session)
    return f"parameters\n  total      {total:>13,}\n  trainable  {trainable:>13,}\n  idle       {idle:>13,}"


def _memory(found: Findings) -> str:
    parts = _memory_parts(found)
    known = sum(size or 0 for size in parts.values())
    how = "nothing was run"
    if found.how:
        how = f"optimiser and activations {found.how}"
    lines = [f"memory of a process: about {format_bytes(known)} ({how}; buffers of kernels come on top)"]
    for name, size in parts.items():
        text = "not measured" if size is None else format_bytes(size)
        lines.append(f"  {name:<28} {text}")
    return "\n".join(lines)


def _memory_parts(found: Findings) -> dict[str, int | None]:
    """What takes memory, in bytes; None where it was not measured."""
    parameters = list(found.session.model.parameters())
    weights = sum(p.nbytes for p in parameters)
    average = 0
    if found.config.train.model_ema:
        average = weights
    batch = found.config.data.batch_size * max(1, found.config.data.aug_splits)
    activations = None
    if found.activations is not None:
        activations = found.activations * batch
    return {
        "parameters": weights,
        "gradients": sum(p.nbytes for p in parameters if p.requires_grad),
        "optimiser": found.optimizer,
        "average": average,
        f"activations of {images_in_words(batch)}": activations,
    }


def _time(found: Findings) -> str:
    work = f"{found.flops / 1e9:.2f} GFLOP per image and forward pass"
    if found.forwards is not None and found.backwards is not None:
        work += f"; a step makes {found.forwards:.3g} forward and {found.backwards:.3g} backward passes of each image"
        work += f", {found.flops * (found.forwards + 2 * found.backwards) / 1e9:,.2f} GFLOP"
    if found.seconds is None:
        return f"time: not measured here; {work}"
    device = found.session.process.device.type
    rate = found.images / found.seconds
    text = f"time: {rate:,.1f} images/s on one {device}, measured with {images_in_words(found.images)} a step; {work}"
    compile = found.config.train.compile
    if compile and (compile != "auto" or device != "cpu"):
        text += "; measured before compiling"
    if found.batches is None:
        return text
    epoch = found.batches * found.config.data.batch_size / rate
    epochs = found.session.num_epochs
    return f"{text}\n  an epoch {format_time(epoch)}, {epochs} epochs {format_time(epoch * epochs)}, without evaluation"


def images_in_words(number: int) -> str:
    """`1 image`, `1,024 images`; `number` of them."""
    return f"{number:,} image{'' if number == 1 else 's'}"


def format_bytes(number: float) -> str:
    """1536 → 1.5 KiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if number < 1024 or unit == "GiB":
            return f"{number:,.1f} {unit}"
        number /= 1024
    raise AssertionError


def format_time(seconds: float) -> str:
    """90 → 1.5 min."""
    for limit, unit, scale in ((120, "s", 1), (7200, "min", 60)):
        if seconds < limit:
            return f"{seconds / scale:.1f} {unit}"
    return f"{seconds / 3600:.1f} h"
