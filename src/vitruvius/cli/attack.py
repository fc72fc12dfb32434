"""Make adversarial examples once and keep them as a data set: a safetensors file, or a folder of pictures."""

from __future__ import annotations

import argparse


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("target", metavar="RUN|MODEL", help="a run folder or a model name")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="e.g. data.root=/imagenet")
    parser.add_argument("--threat", required=True, metavar="NAME:key=value,…", help="e.g. pgd:eps=4/255,steps=10")
    parser.add_argument("--what", choices=("images", "perturbations"), default="images", help="default: %(default)s")
    parser.add_argument("--out", required=True, help="a file *.safetensors (lossless), or a folder of 8-bit pictures")


def run(options: argparse.Namespace) -> None:
    from vitruvius._processes import choose_device
    from vitruvius.data import eval_loader
    from vitruvius.evaluation import check_head, check_numbering, open_target, parse_threat
    from vitruvius.evaluation.examples import make_examples, save_examples

    threat = parse_threat(options.threat)
    model, config = open_target(options.target, options.overrides)
    check_head(options.target, model)
    device = choose_device(config.device)
    model.to(device).eval()
    loader = eval_loader(config.data, input_size=model.data_config, device=device)
    check_numbering(options.target, options.overrides, model, config.data, loader)
    examples = make_examples(model, loader, threat, what=options.what)
    print(f"{examples.spec}: accuracy {examples.accuracy:.4f}, after rounding to 8 bits {examples.accuracy_8bit:.4f}")
    print(save_examples(examples, options.out))
