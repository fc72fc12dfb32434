"""Attacks, the worst case: one file per attack, (model, x, y) → x'."""

from typing import TYPE_CHECKING

from vitruvius._lazy import exports

if TYPE_CHECKING:
    from vitruvius.attacks.apgd import APGD as APGD
    from vitruvius.attacks.apgd_malt import APGDMalt as APGDMalt
    from vitruvius.attacks.apgd_targeted import APGDTargeted as APGDTargeted
    from vitruvius.attacks.autoattack import AutoAttack as AutoAttack
    from vitruvius.attacks.base import Attack as Attack
    from vitruvius.attacks.base import attacks as attacks
    from vitruvius.attacks.carlini import Carlini as Carlini
    from vitruvius.attacks.ddn import DDN as DDN
    from vitruvius.attacks.deepfool import DeepFool as DeepFool
    from vitruvius.attacks.fab import FAB as FAB
    from vitruvius.attacks.fab_targeted import FABTargeted as FABTargeted
    from vitruvius.attacks.fgsm import FGSM as FGSM
    from vitruvius.attacks.hopskipjump import HopSkipJump as HopSkipJump
    from vitruvius.attacks.momentum_fgsm import MIFGSM as MIFGSM
    from vitruvius.attacks.momentum_fgsm import NIFGSM as NIFGSM
    from vitruvius.attacks.patch_fool import PatchFool as PatchFool
    from vitruvius.attacks.pgd import PGD as PGD
    from vitruvius.attacks.sparse_l1 import SparseL1 as SparseL1
    from vitruvius.attacks.spsa import SPSA as SPSA
    from vitruvius.attacks.square import Square as Square
    from vitruvius.attacks.targeted_pgd import TargetedPGD as TargetedPGD
    from vitruvius.attacks.transfer import Transfer as Transfer
else:
    __getattr__, __dir__, __all__ = exports(__name__)
