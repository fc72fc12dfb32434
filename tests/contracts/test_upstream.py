"""Sockets repeat a few lines of timm; these tests notice when timm changes them."""

from __future__ import annotations

import hashlib
import inspect

import pytest
from timm.models.vision_transformer import Block

from vitruvius.surgery.base import _SOCKETS, Socket
from vitruvius.surgery.vit import BlockSocket

# SHA-256 (first 12 digits) of inspect.getsource(upstream.forward), one for each text seen in timm >= 1.0.29.
KNOWN = {
    "timm.layers.attention.Attention": {"37a80e0fdf45"},
    "timm.layers.attention.AttentionRope": {"7cfdadf4d88e", "3f742ca1632d"},  # 1.0.29, 1.0.30
    "timm.layers.attention_pool.AttentionPoolLatent": {"327a3f339ba6"},
    "timm.layers.diff_attention.DiffAttention": {"8cd7d972c9b3"},
    "timm.models.beit.Attention": {"0bcb86fe6e1f"},
    "timm.models.cait.ClassAttn": {"e8bf85de797e"},
    "timm.models.cait.TalkingHeadAttn": {"e8bdb61a0c2a"},
    "timm.models.crossvit.CrossAttention": {"bcf2866085c6"},
    "timm.models.eva.EvaAttention": {"ab5e17e344c3"},
    "timm.models.levit.Attention": {"17a9cd9e3c60"},
    "timm.models.levit.AttentionDownsample": {"01b9a7da8cc3"},
    "timm.models.maxxvit.Attention2d": {"254089d4c16b"},
    "timm.models.maxxvit.AttentionCl": {"4213588190ad"},
    "timm.models.swin_transformer.WindowAttention": {"25ecc84950d1"},
    "timm.models.swin_transformer_v2.WindowAttention": {"127a2e4fdaaa"},
    "timm.models.swin_transformer_v2_cr.WindowMultiHeadAttention": {"a86e7d6d4a43"},
    "timm.models.vision_transformer_relpos.RelPosAttention": {"a38419a4d20b"},
    "timm.models.xcit.XCA": {"353312bdd2b6"},
}

PAIRS = [(upstream, socket) for upstream, socket in _SOCKETS.items() if socket.__module__.startswith("vitruvius.")]


def fingerprint(upstream: type) -> str:
    return hashlib.sha256(inspect.getsource(upstream.forward).encode()).hexdigest()[:12]  # type: ignore[attr-defined]


@pytest.mark.parametrize(("upstream", "socket"), PAIRS, ids=lambda cls: cls.__name__)
def test_upstream_forward_is_the_one_we_read(upstream: type, socket: type[Socket]) -> None:
    name = f"{upstream.__module__}.{upstream.__qualname__}"
    file = socket.__module__.rsplit(".", 1)[1]
    message = complaint(name, fingerprint(upstream), file)
    assert not message, message


def complaint(name: str, found: str, file: str) -> str:
    """What to do about a forward that is not the one we read; nothing where it is."""
    if name not in KNOWN:
        return (
            f'{name} has a new socket, {file}.py. Compare the two forwards, then add to KNOWN: "{name}": {{"{found}"}}'
        )
    if found not in KNOWN[name]:
        return f"{name}.forward has changed: re-read upstream, update {file}.py, then this hash: {found}"
    return ""


def test_a_new_socket_is_told_that_it_is_new_and_a_changed_upstream_that_it_has_changed() -> None:
    name = "timm.layers.attention.Attention"
    assert complaint("timm.models.davit.WindowAttention", "0123", "davit").startswith(
        "timm.models.davit.WindowAttention has a new socket, davit.py."
    )
    assert complaint(name, "0123", "vit").startswith(f"{name}.forward has changed: re-read upstream, update vit.py")
    assert complaint(name, "37a80e0fdf45", "vit") == ""


def test_the_forward_of_upstreams_block_is_the_one_we_read() -> None:
    assert fingerprint(Block) == "2cb6f77c3039", "re-read upstream, update surgery/vit.py, then this hash"
    ours, theirs = (inspect.signature(cls.forward).parameters.values() for cls in (BlockSocket, Block))
    assert [(p.name, p.kind, p.default) for p in ours] == [(p.name, p.kind, p.default) for p in theirs]


@pytest.mark.parametrize(("upstream", "socket"), PAIRS, ids=lambda cls: cls.__name__)
def test_signatures_are_upstreams(upstream: type, socket: type[Socket]) -> None:
    ours, theirs = (inspect.signature(cls.forward).parameters.values() for cls in (socket, upstream))  # type: ignore[attr-defined]
    assert [(p.name, p.kind, p.default) for p in ours] == [(p.name, p.kind, p.default) for p in theirs]


@pytest.mark.parametrize(("upstream", "socket"), PAIRS, ids=lambda cls: cls.__name__)
def test_swapping_the_class_keeps_what_upstream_can_do(upstream: type, socket: type[Socket]) -> None:
    assert issubclass(socket, upstream)
    assert socket.upstream is upstream
    ours = {name for name in vars(socket) if not name.startswith("__")}
    allowed = {"forward", "head_weights", "family", "attends", "upstream", "grid", "width", "check", "enter", "leave"}
    private = {name for name in ours if name.startswith("_")}
    assert ours - private <= allowed, "a socket replaces forward and nothing else"
    assert not private & set(dir(upstream)), "a private helper hides one of upstream's"


def test_every_socket_has_its_own_family_name() -> None:
    families = [socket.family for _, socket in PAIRS]
    assert len(set(families)) == len(families)
