"""Look: where a vision transformer looks on a picture, as one page, as figures, or live in a browser."""

from typing import TYPE_CHECKING

from vitruvius._lazy import exports

if TYPE_CHECKING:
    from vitruvius.look.looking import Look as Look
    from vitruvius.look.looking import look as look
else:
    __getattr__, __dir__, __all__ = exports(__name__)
