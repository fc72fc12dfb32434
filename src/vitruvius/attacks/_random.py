"""The random numbers of attacks are those of every disturbance: `vitruvius._dice`."""

from vitruvius._dice import Dice, image_ids

__all__ = ["Dice", "image_ids"]
