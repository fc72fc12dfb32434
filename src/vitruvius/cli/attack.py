"""Make adversarial examples once and keep them as a data set: a safetensors file, or a folder of pictures."""

from __future__ import annotations

import argparse


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("target", metavar="RUN|MODEL", help="a run folder or a model name")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="e.g. data.root=/imagenet")
    parser.add_argument("--threat", required=True, metavar="NAME:key=value,…", help="e.g. pgd:eps=4/255,steps=10")
    parser.add_argument("--what", choices=("images", "perturbations"), default="images", help="default: %(default)s")
    parser.add_argument("--images", type=int, metavar="N", help="attack N images, a fixed random choice (default: all)")
    parser.add_argument("--out", required=True, help="a file *.safetensors (lossless), or a folder of 8-bit pictures")


def run(options: argparse.Namespace) -> None:
    from vitruvius.evaluation.examples import attack_target

    examples, path = attack_target(
        options.target,
        options.overrides,
        options.threat,
        options.out,
        what=options.what,
        images=options.images,
    )
    print(f"{examples.spec}: accuracy {examples.accuracy:.4f}, after rounding to 8 bits {examples.accuracy_8bit:.4f}")
    print(path)
